"""An agent whose control plane is taken over, or confused: what it is told to start and fetch, and what it says then.

That a control plane chooses what runs is no fault. Leaving the work directory is, and ending, and silence ever after.
"""

from __future__ import annotations

import asyncio
import errno
import http.server
import shutil
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import adopt, files, output, protocol, tellable, weights
from agent.answers import Answers
from agent.errands import Errands
from agent.host import Host
from agent.installer import Installer
from agent.process import identify
from agent.protocol import Ack, Adapter, Command, Fetch, InstallEngine, Running, ShardSpec, ShardState, StartShard
from agent.weights import FetchError, Weights
from nodes import intake
from tests.agent.conftest import AgentTask, ControlPlane, Quiet, eventually, serving, spec
from tests.factories import inventory
from tests.nodes.test_stream import a_register

HUGE = 10**30
ODD = st.text(max_size=130) | st.sampled_from(["", "x" * 200, "x" * 5000, "a\nb", "\x1b[2J", "../..", "\0"])
NUMBER = st.integers(-3, 3) | st.sampled_from([HUGE, -HUGE, 2**31, 2**63])
SPECS = st.builds(
    ShardSpec,
    replica=ODD,
    rank=NUMBER,
    model=ODD,
    profile=ODD,
    profile_digest=ODD,
    engine=ODD,
    source=ODD,
    adapters=st.lists(st.builds(Adapter, name=ODD, source=ODD), max_size=2).map(tuple),
    max_loaded_adapters=st.none() | NUMBER,
    args=st.lists(ODD, max_size=2).map(tuple),
    env=st.dictionaries(ODD, ODD, max_size=2),
    gpus=st.lists(ODD, max_size=3).map(tuple),
    fabric=ODD,
    cores=NUMBER.map(float),
    slots=NUMBER,
    tp=NUMBER,
    pp=NUMBER,
    nodes=NUMBER,
    startup_timeout_s=NUMBER.map(float) | st.just(1e300),
    made_at=st.none() | st.datetimes(timezones=st.none() | st.just(UTC)),
)
GOOD = spec("/m/x.gguf")


def told_again(told: ShardSpec) -> protocol.Up:
    """The register that tells of it, as a control plane takes it. Raises Unfit."""
    running = Running(spec=told, status=ShardState(replica=told.replica, rank=told.rank, state="failed"))
    register = a_register(shards=(running,), inventory=inventory())
    return intake.fitted(protocol.decode_up(protocol.encode(register)))


@given(SPECS)
def test_whatever_is_started_is_something_that_every_control_plane_can_be_told_of(told: ShardSpec) -> None:
    if tellable.objection(told, ()) is None:
        assert told_again(told)


@given(st.sampled_from(ShardSpec.__struct_fields__), SPECS)
def test_one_odd_field_suffices_to_be_refused_where_registers_could_not_tell_of_it(field: str, odd: ShardSpec) -> None:
    told = msgspec.structs.replace(GOOD, **{field: getattr(odd, field)})
    if tellable.objection(told, ()) is None:
        assert told_again(told)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"replica": "x" * 121}, "replica: it is not one line of 1 to 120 characters."),
        ({"model": "a\nb"}, "model: it is not one line"),
        ({"source": "/a\0"}, "source: a source is not one line of 1 to 1000 characters."),
        ({"adapters": (Adapter(name="a", source="/" * 1001),)}, "adapters: a source is not one line"),
        ({"adapters": (Adapter(name="", source="/a"),)}, "adapters: a name is not one line of 1 to 200 characters."),
        ({"gpus": ("x" * 121,)}, "gpus: the name of a card or of the fabric is too long, or there are too many."),
        ({"gpus": ("x",) * 129}, "gpus: the name of a card or of the fabric is too long, or there are too many."),
        ({"tp": HUGE}, "tp: it is not between 0 and 2147483647."),
        ({"cores": -1.0}, "cores: it is not between 0 and 2147483647."),
        ({"startup_timeout_s": 1e300}, "startup_timeout_s: it is not between 0 and 2147483647."),
        ({"made_at": datetime(2026, 1, 1)}, "made_at: it has no time zone, or is not of our time."),
        ({"args": ("--x\0",)}, "args: one has more than 4096 characters, or a NUL in it."),
        ({"env": {"A=B": "x"}}, "env: 'A=B' is no variable's name, or its value is too long or has a NUL in it."),
        ({"args": ("x" * 4096,) * 9}, "args: with all else that it says the shard takes"),
    ],
)
def test_what_no_register_could_tell_is_refused_by_its_field(changes: dict[str, object], says: str) -> None:
    found = tellable.objection(msgspec.structs.replace(GOOD, **changes), ())
    assert found
    assert found.startswith(says)


@pytest.mark.parametrize("key", ["x" * 257, "a\0b", "a\nb"])
def test_a_key_that_no_engine_could_have_is_refused_and_not_kept(key: str) -> None:
    said = tellable.objection(GOOD, (), key)
    assert said == "engine_key: it is not one line of at most 256 characters."
    assert tellable.objection(GOOD, (), "k" * 64) is None


def test_no_more_shards_run_than_one_register_can_tell_of() -> None:
    many = [msgspec.structs.replace(GOOD, replica=f"r-{number}") for number in range(tellable.MAX_RUNNING)]
    assert tellable.objection(GOOD, many[1:]) is None
    assert tellable.objection(many[0], many) is None, "it is one of them"
    assert tellable.objection(GOOD, many) == "replica: 512 shards run on this node, which is as many as it can tell of."
    large = [msgspec.structs.replace(each, args=("x" * 4000,) * 7) for each in many[:40]]
    assert "as many as it can tell of" in str(tellable.objection(GOOD, large))


async def test_a_hostile_start_costs_neither_the_stream_nor_the_node(
    control_plane: ControlPlane, agent: AgentTask, gguf: Path
) -> None:
    agent.start()
    await eventually(lambda: control_plane.heartbeats, what="heartbeats")
    outside = set(agent.settings.work_dir.parent.iterdir())
    hostile: list[dict[str, Any]] = [
        {"replica": "x" * 300},
        {"replica": "../../../etc/cron.d/x\n"},
        {"source": "\0"},
        {"env": {"LD_PRELOAD\0": "x"}},
        {"tp": 2**62, "pp": 2**62},
        {"replica": "../../out", "source": "/etc/shadow"},
        {"replica": "..", "source": "./../../etc/shadow"},
        {"args": ("--host", "0.0.0.0")},
        {"args": ("--port=1",)},
        {"args": ("--api-key", "mine")},
        {"args": ("--log-file", "/etc/passwd")},
        {"args": ("--ssl-key-file", "/etc/ssl/private/x")},
    ]
    for number, changes in enumerate(hostile):
        told = msgspec.structs.replace(spec(gguf, f"r{number}"), **changes)
        await control_plane.send(StartShard(spec=told))
    await eventually(lambda: len(control_plane.acks) == len(hostile), what="answers")
    refused = [ack for ack in control_plane.acks if not ack.ok]
    assert len(refused) == len(hostile) - 1, "what is no model is looked at, and fails then"
    await eventually(lambda: "failed" in control_plane.states("../../out"), what="it fails")
    assert "GGUF" in control_plane.last("../../out").status.reason
    beats = len(control_plane.heartbeats)
    await eventually(lambda: len(control_plane.heartbeats) > beats + 2, what="heartbeats go on")
    assert len(control_plane.registers) == 1
    assert set(agent.settings.work_dir.parent.iterdir()) == outside
    control_plane.cut()
    await eventually(lambda: len(control_plane.registers) == 2, what="the node registers again")
    assert intake.fitted(control_plane.registers[1])


def test_shards_of_any_name_have_files_of_their_own_in_the_work_directory(tmp_path: Path) -> None:
    names = ["..", ".", "../../etc/x", "a/b", "a%2Fb", "a", "a.0", "a.0.json", "~", "-rf", "a b", "ä"]
    records = adopt.Records(tmp_path / "shards")
    me = identify(1)
    assert me
    for name in names:
        for rank in (0, 1):
            told = spec("/m/x.gguf", name, rank=rank)
            records.write(adopt.Record(spec=told, processes=(me,), port=1, state="ready", output="", address=""))
    assert len(list((tmp_path / "shards").iterdir())) == 2 * len(names)
    assert {(each.spec.replica, each.spec.rank) for each in records.read_all()} == {
        (name, rank) for name in names for rank in (0, 1)
    }
    assert [each.name for each in tmp_path.iterdir()] == ["shards"]


def test_answers_are_remembered_without_the_commands_themselves() -> None:
    answers = Answers(lambda command: "")
    tracemalloc.start()
    try:
        for number in range(64):
            answers.answer(Command(id=number, body=Fetch(source=f"{number}" + "x" * 2**20)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 8 * 2**20
    assert answers.answer(Command(id=1, body=Fetch(source="other"))) == Ack(id=1)


@pytest.mark.parametrize("body", [Fetch(source="x" * 1001), Fetch(source="/a\n"), InstallEngine(engine="x\0")])
async def test_errands_that_heartbeats_could_not_tell_are_refused(tmp_path: Path, body: Fetch | InstallEngine) -> None:
    host = Host(address="127.0.0.1", architecture="x86_64")
    errands = Errands(Weights(tmp_path), Installer(tmp_path), lambda: host)
    assert errands.begin(1, body) == "what is asked for is not one line of at most 1000 characters."
    assert errands.told() == ()


# --- what it is told to fetch ----------------------------------------------------------------------------------------
class Hostile(Quiet):
    def do_GET(self) -> None:
        where = {"/file": "file:///etc/shadow", "/loop": "/loop", "/odd": "http://[::1/x", "/gopher": "gopher://x/y"}
        where |= {"/port": "http://127.0.0.1:99999/x"}
        if self.path in where:
            self.send_response(302)
            self.send_header("Location", where[self.path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        if self.path == "/bomb":
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            self.wfile.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(weights, "RETRY_S", 0.01)
    monkeypatch.setattr(weights, "PROGRESS_S", 0.01)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("path", ["/file", "/loop", "/odd", "/port", "/gopher", "/bomb"])
async def test_a_server_that_leads_elsewhere_fails_the_fetch_in_words(tmp_path: Path, hostile: str, path: str) -> None:
    with pytest.raises(FetchError, match=r"cannot be fetched(:| from) 127\.0\.0\.1"):
        await Weights(tmp_path).ensure(f"{hostile}{path}", lambda _: None)
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size > 1000]


@pytest.mark.parametrize("source", ["http://127.0.0.1:99999/x", "http://127.0.0.1:0/x", "http://\u2100.example/x"])
async def test_an_address_that_is_none_fails_the_fetch_in_words(tmp_path: Path, source: str) -> None:
    with pytest.raises(FetchError):
        await Weights(tmp_path).ensure(source, lambda _: None)


async def test_a_download_without_end_stops_before_the_disk_is_full(
    tmp_path: Path, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = shutil.disk_usage(tmp_path).free

    def small_disk(path: Path) -> int:
        held = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
        return max(0, min(begun, 64 * 2**20) - held)

    monkeypatch.setattr(files, "free_bytes", small_disk)
    async with asyncio.timeout(60):
        with pytest.raises(FetchError, match="endless has no end so far: its server does not say how large it is"):
            await Weights(tmp_path).ensure(f"{hostile}/endless", lambda _: None)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


# --- a disk that is full ---------------------------------------------------------------------------------------------
def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_output_that_fills_the_disk_is_cut_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.0.log"
    path.write_bytes(b"x" * 5000)
    output.previous(path).write_bytes(b"earlier")
    monkeypatch.setattr(shutil, "copyfile", full)
    assert output.bound(path, 1000)
    assert path.stat().st_size == 0
    assert not output.previous(path).exists()


def test_a_file_that_does_not_fit_leaves_what_was_there_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record"
    files.write_private(path, b"before")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_private(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
