"""What an agent may say: everything it says is bounded, and nothing of it acts on a terminal or breaks a page."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from django.test import Client
from hypothesis import given
from hypothesis import strategies as st

from agent import protocol
from nodes import consumers, intake
from nodes.models import Node, Replica
from tests.factories import inventory, make_user, sealed
from tests.nodes.test_stream import a_register, connected, full_register, heard, in_db, refusal, tell, token

__all__ = ["token"]

HOSTILE = "a\x00b \x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \u202e<script>alert(1)</script>\r\n=cmd()"


def running(**fields: Any) -> protocol.Running:
    spec = {
        "replica": "r",
        "model": "m",
        "profile": "cpu",
        "profile_digest": "d" * 64,
        "engine": "llamacpp",
        "source": "/x",
    }
    status = {name: fields.pop(name) for name in ("port", "pid", "rank", "reason", "rendezvous") if name in fields}
    return protocol.Running(
        spec=protocol.ShardSpec(**{**spec, **fields}),
        status=protocol.ShardState(replica="r", state="loading", **status),
    )


@given(st.text())
def test_shown_text_holds_no_control_character_and_is_shown_as_it_is_again(text: str) -> None:
    found = intake.shown(text)
    assert all(letter in "\n\t" or not _acts(letter) for letter in found)
    assert intake.shown(found) == found


def _acts(letter: str) -> bool:
    return ord(letter) < 32 or 127 <= ord(letter) < 160


def test_colours_and_titles_go_whole_and_progress_bars_become_lines() -> None:
    text = "\x1b[1;31mCUDA error\x1b[0m\x1b]0;owned\x07\x1b[2K\x1b(B\r10 %\r\n20 %\tü 模"
    assert intake.shown(text) == "CUDA error\n10 %\n20 %\tü 模"


def a_gpu(**fields: Any) -> protocol.Gpu:
    return protocol.Gpu(**{"uuid": "GPU-1", "index": 0, "name": "L4", "gpu_class": "l4-22g", **fields})


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"gpus": (a_gpu(), a_gpu())}, "one of the cards is there twice"),
        ({"gpus": (a_gpu(uuid=""),)}, "the name of one of the cards is not one line of 1 to 120 characters"),
        ({"gpus": (a_gpu(uuid="a\nb"),)}, "the name of one of the cards is not one line"),
        ({"gpus": tuple(a_gpu(uuid=str(i)) for i in range(129))}, "129 cards are more than 128"),
        ({"gpus": (a_gpu(gpu_class="x" * 81),)}, "class, name or fault of card GPU-1 is too long"),
        ({"gpus": (a_gpu(fault="x" * 401),)}, "class, name or fault of card GPU-1 is too long"),
        ({"fabrics": (protocol.Fabric(name="ib0"),) * 2}, "one of the fabrics is there twice"),
        ({"adapters": tuple(protocol.RdmaAdapter(name=str(i)) for i in range(65))}, "65 adapters are more than 64"),
        ({"engine_builds": {str(i): "auto" for i in range(17)}}, "17 choices of builds are more than 16"),
        ({"engine_builds": {"vllm": "a\nb"}}, "a chosen build or its engine is not one line of 1 to 80 characters"),
        ({"engine_builds": {"": "cu13"}}, "a chosen build or its engine is not one line"),
        ({"engine_builds": {"vllm": "x" * 81}}, "a chosen build or its engine is not one line"),
        ({"files": (protocol.File(path="/x", size_bytes=1),) * 2001}, "2001 files are more than 2000"),
    ],
)
def test_hardware_is_bounded_and_each_piece_is_there_once(fields: dict[str, Any], fault: str) -> None:
    told = inventory(**fields)
    for message in (a_register(inventory=told), protocol.Heartbeat(load=protocol.NodeLoad(), inventory=told)):
        with pytest.raises(intake.Unfit, match=fault):
            intake.fitted(message)


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ({f"l{i}": "" for i in range(65)}, "65 labels are more than 64"),
        ({"": "a"}, "or it has no name"),
        ({"x" * 64: "a"}, "has more than 63 characters"),
        ({"a": "x" * 64}, "label 'a' or its value has more than 63 characters"),
    ],
)
def test_labels_are_few_and_short(labels: dict[str, str], fault: str) -> None:
    with pytest.raises(intake.Unfit, match=fault):
        intake.fitted(a_register(labels=labels))


def test_readings_are_bounded() -> None:
    readings = (protocol.GpuReading(uuid="GPU-1"),) * 129
    with pytest.raises(intake.Unfit, match="129 readings of cards are more than 128"):
        intake.fitted(protocol.Heartbeat(load=protocol.NodeLoad(gpus=readings)))


def test_errands_are_bounded() -> None:
    errands = (protocol.Errand(command=1, what="/x"),) * 65
    with pytest.raises(intake.Unfit, match="65 errands are more than 64"):
        intake.fitted(protocol.Heartbeat(load=protocol.NodeLoad(), errands=errands))


def test_a_full_message_passes_unchanged() -> None:
    sent = full_register()
    assert intake.fitted(sent) is sent


@given(st.recursive(st.text() | st.integers(-(2**63), 2**63) | st.none(), lambda inner: st.lists(inner)))
def test_any_message_is_fit_or_refused_in_words(part: Any) -> None:
    raw = {
        **msgspec.to_builtins(full_register()),
        "labels": {"x": json.dumps(part)[:60]},
        "agent_version": str(part)[:60],
        "shards": [],
    }
    message = msgspec.convert(raw, protocol.Up)
    version = intake.shown(raw["agent_version"])
    if len(version) > 40 or not version.isprintable():
        with pytest.raises(intake.Unfit, match="agent_version"):
            intake.fitted(message)
        return
    found = intake.fitted(message)
    assert intake.fitted(found) == found
    assert "\\u00" not in protocol.encode(found).decode().replace("\\\\", "")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"agent_version": "x" * 41}, "agent_version"),
        ({"machine_id": "x" * 65}, "machine_id"),
        ({"address": ""}, "address"),
        ({"address": "host/../admin?x=@evil"}, "address"),
        ({"address": "a\r\nX-Evil: 1"}, "address"),
        ({"address": "x" * 256}, "address"),
        ({"inventory": inventory(memory_bytes=10**400)}, "63 bits"),
        ({"shards": (running(replica=""),)}, "replica"),
        ({"shards": (running(replica="a\nb"),)}, "replica"),
        ({"shards": (running(model="m" * 201),)}, "model"),
        ({"shards": (running(engine="e" * 21),)}, "engine"),
        ({"shards": (running(slots=2**31),)}, "slots"),
        ({"shards": (running(port=0),)}, "port"),
        ({"shards": (running(adapters=(protocol.Adapter(name="", source="/x"),)),)}, "an adapter of replica r"),
        ({"shards": (running(max_loaded_adapters=-1),)}, "max_loaded_adapters"),
        ({"shards": (running(pid=2**31),)}, "pid"),
    ],
)
@pytest.mark.django_db(transaction=True)
async def test_what_no_row_can_hold_is_refused_naming_the_field(token: str, fields: dict[str, Any], names: str) -> None:
    async with connected(token) as link:
        await tell(link, a_register(**fields))
        assert names in await refusal(link)


@pytest.mark.django_db(transaction=True)
async def test_json_nested_beyond_reading_is_refused(token: str) -> None:
    async with connected(token) as link:
        await link.send_to(text_data='{"type":"ack","id":1,"x":' + "[" * 50_000 + "]" * 50_000 + "}")
        assert "could not be read" in await refusal(link)


@pytest.mark.django_db(transaction=True)
async def test_hostile_text_is_stored_harmless_and_pages_show_it_as_text(token: str) -> None:
    machine = inventory(
        hostname=HOSTILE,
        os=HOSTILE,
        cpu=protocol.Cpu(model=HOSTILE),
        builds=(protocol.Build(engine="llamacpp", name=HOSTILE, version=HOSTILE),),
        files=(protocol.File(path=HOSTILE, size_bytes=1),),
    )
    async with connected(token) as link:
        shard = running(reason=HOSTILE)
        shard = msgspec.structs.replace(shard, spec=await in_db(sealed, "one", shard.spec))
        await tell(link, a_register(inventory=machine, labels={HOSTILE: HOSTILE}, shards=(shard,)))
        assert isinstance(await heard(link), protocol.Welcome)
        failed = protocol.ShardState(replica="r", state="failed", reason=HOSTILE)
        await tell(link, protocol.ShardStatus(status=failed, tail=HOSTILE))
        await tell(link, protocol.Ack(id=2**62, ok=False, error=HOSTILE))
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), shards=(failed,)))
        await tell(link, protocol.ShardStatus(status=protocol.ShardState(replica="unknown", state="loading")))
        closed = await link.receive_output(timeout=30)  # told to register again: all before it has been dealt with
        assert closed["code"] == consumers.REGISTER_AGAIN
    assert (await Replica.objects.aget()).state == "failed"
    row = await Node.objects.aget(pk="one")
    told = json.dumps([row.inventory, row.labels])
    assert "\\u0000" not in told
    assert "\\u001b" not in told
    await _look()


async def _look() -> None:
    def pages() -> None:
        client = Client()
        client.force_login(make_user("root", is_superuser=True))
        for url in ("/dashboard/", "/nodes/", "/nodes/one/", "/replicas/", "/replicas/r/"):
            page = client.get(url).content.decode()
            assert "<script>alert" not in page, url
            assert "alert(1)" in page or url in ("/nodes/", "/replicas/", "/dashboard/"), url
            assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in page), url

    await in_db(pages)
