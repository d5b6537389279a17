"""The small pure modules: command lines, builds, sources, validation, ports, backoff, answers."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import builds, ports, sources, validate
from agent.answers import REMEMBERED, Answers
from agent.backoff import Backoff
from agent.engines import ENGINES
from agent.engines.base import Build, Launch, names_flag
from agent.engines.llamacpp import LlamaCpp, cache_ram_mib, threads
from agent.host import Host
from agent.protocol import Command, StopShard
from tests.agent.conftest import spec

HOST = Host(address="10.0.0.7", architecture="x86_64", cores=8, memory_bytes=32 * 2**30)
LAUNCH = Launch(Build("named", "1", ("llama-server",), (("A", "b"),)), weights="/m/a.gguf", port=21007, key="secret")
SHA = "ab" * 32


# --- command lines (golden) ------------------------------------------------------------------------------------------
def test_llamacpp_is_started_with_everything_said() -> None:
    (command,) = LlamaCpp().commands(spec("/m/a.gguf", slots=3, env={"Z": "1"}), HOST, LAUNCH)
    assert " ".join(command.argv) == (
        "llama-server --model /m/a.gguf --alias tiny --host 10.0.0.7 --port 21007 --parallel 3 --ctx-size 12288"
        " --threads 4 --n-gpu-layers 0 --cache-ram 2048 --metrics --offline --no-ui"
    )
    assert command.env == (("A", "b"), ("Z", "1"))
    assert command.secrets == (("LLAMA_API_KEY", "secret"),)
    assert "secret" not in repr(command)
    assert command.wait_for is None


def test_llamacpp_leaves_to_the_profile_what_the_profile_names() -> None:
    args = (
        "-c",
        "512",
        "-np",
        "1",
        "--threads=2",
        "-ngl",
        "20",
        "-cram",
        "0",
        "--metrics",
        "--embeddings",
        "--pooling",
        "mean",
    )
    keyless = Launch(LAUNCH.build, weights="/m/a.gguf", port=21007)
    (command,) = LlamaCpp().commands(spec("/m/a.gguf", args=args, gpus=("GPU-1",)), HOST, keyless)
    assert " ".join(command.argv) == (
        "llama-server --model /m/a.gguf --alias tiny --host 10.0.0.7 --port 21007 --offline --no-ui"
        " -c 512 -np 1 --threads=2 -ngl 20 -cram 0 --metrics --embeddings --pooling mean"
    )
    assert command.secrets == ()


def test_llamacpp_puts_all_layers_on_the_cards_of_a_shard_that_has_some() -> None:
    (command,) = LlamaCpp().commands(spec("/m/a.gguf", gpus=("GPU-1",)), HOST, LAUNCH)
    assert command.argv[command.argv.index("--n-gpu-layers") + 1] == "all"


def test_threads_are_half_the_cpus_unless_the_operator_says() -> None:
    assert [threads(Host("a", "x", cores=cores)) for cores in (None, 1, 2, 7, 8)] == [1, 1, 1, 3, 4]
    assert threads(Host("a", "x", cores=8, llamacpp_threads=6)) == 6
    assert cache_ram_mib(Host("a", "x")) == 0
    assert cache_ram_mib(Host("a", "x", memory_bytes=2**30)) == 64


def test_only_rank_0_of_llamacpp_serves_http() -> None:
    assert [ENGINES["llamacpp"].serves_http(rank) for rank in (0, 1)] == [True, False]


def test_a_flag_is_found_in_both_ways_of_writing_it() -> None:
    assert names_flag(("--port=1",), "--port")
    assert names_flag(("-c", "1"), "--ctx-size", "-c")
    assert not names_flag(("--portable", "1"), "--port")


# --- builds ----------------------------------------------------------------------------------------------------------
def test_every_build_is_pinned_by_hash_and_made_for_two_architectures() -> None:
    for build in builds.BUILDS:
        assert build.requirement().count("--hash=sha256:") == len(build.hashes) == 2
        assert all(len(digest) == 64 for _, digest in build.hashes)
        assert build.directory == f"{build.name}-{build.version}"
        assert build in builds.for_engine(build.engine)


def test_a_build_says_why_a_machine_cannot_have_it() -> None:
    assert builds.objection(builds.XLLAMACPP, HOST) is None
    assert "riscv64" in str(builds.objection(builds.XLLAMACPP, Host("a", "riscv64")))
    assert "2 GPUs" in str(builds.objection(builds.XLLAMACPP, Host("a", "x86_64", gpus=2)))


def test_an_engine_without_a_build_says_what_to_do() -> None:
    assert builds.unnamed("exllama") == "This version of llmgw has no build of exllama."
    assert all(key in builds.unnamed(engine) for engine, key in builds.NAMED_ONLY.items())


# --- sources ---------------------------------------------------------------------------------------------------------
def test_sources_of_three_kinds_are_read() -> None:
    assert sources.parse("/m/a.gguf") == sources.LocalFile("/m/a.gguf")
    assert sources.parse("./b/./a..gguf") == sources.RelativeFile("b/a..gguf")
    wheel = sources.parse(f"pypi://some-model==1.2/some/a.gguf?wheel_sha256={SHA}&sha256={SHA}")
    assert wheel == sources.WheelFile("some-model", "1.2", "some/a.gguf", SHA, SHA)
    assert wheel.target == "pypi/some-model-1.2/some/a.gguf"
    url = sources.parse(f"https://models.example/x/a%20b.gguf?download=1#sha256={SHA}")
    assert url == sources.UrlFile("https://models.example/x/a%20b.gguf?download=1", SHA)
    assert url.target.endswith("/a_b.gguf")
    assert sources.parse("http://models.example/a.gguf") == sources.UrlFile("http://models.example/a.gguf", None)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("org/model", "absolute path"),
        ("../a.gguf", "leads out of the node's folder of models"),
        ("./a/../../b", "leads out of the node's folder of models"),
        ("./", "names no file"),
        ("././/", "names no file"),
        ("pypi://model/a.gguf", "one exact version"),
        ("pypi://model>=1/a.gguf", "one exact version"),
        ("pypi://model==1", "a file inside the wheel"),
        ("pypi://model==1/../../etc/passwd", "a file inside the wheel"),
        ("pypi://model==1/a.gguf", "wheel_sha256="),
        (f"pypi://model==1/a.gguf?wheel_sha256={SHA}&sha256=12", "needs sha256="),
        ("https://", "the address of one file"),
        ("https://models.example/dir/", "the address of one file"),
        ("https://[bad/a.gguf", "is not an address"),
        ("https://me:secret@models.example/a.gguf", "user name or password"),
        ("https://models.example/a.gguf#sha256=12", "64 hexadecimal digits"),
    ],
)
def test_a_source_that_cannot_be_used_says_what_is_wrong(source: str, says: str) -> None:
    with pytest.raises(sources.SourceError, match=says) as refused:
        sources.parse(source)
    assert "secret" not in str(refused.value)


@given(st.text(max_size=60))
def test_no_source_leads_out_of_the_store(name: str) -> None:
    try:
        found = sources.parse(f"https://models.example/{name}")
    except sources.SourceError:
        return
    assert isinstance(found, sources.UrlFile)
    parts = found.target.split("/")
    assert len(parts) == 3
    assert not {"", ".", ".."} & set(parts)


# --- validation ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": "vllm"}, "engine"),
        ({"tp": 0}, "tp"),
        ({"slots": 0}, "slots"),
        ({"tp": 2}, "tp"),
        ({"pp": 2}, "pp"),
        ({"nodes": 2}, "nodes"),
        ({"rank": 1}, "rank"),
        ({"gpus": ("GPU-1",)}, "gpus"),
        ({"source": "org/model"}, "source"),
    ],
)
def test_a_refusal_names_the_field(changes: dict[str, object], field: str) -> None:
    one = msgspec.structs.replace(spec("/m/a.gguf"), **changes)
    assert str(validate.refusal(one, HOST)).startswith(f"{field}: ")


def test_a_machine_without_a_build_refuses_unless_the_operator_named_a_binary() -> None:
    strange = Host("a", "riscv64")
    assert str(validate.refusal(spec("/m/a.gguf"), strange)).startswith("engine: no build of llamacpp runs here")
    assert validate.refusal(spec("/m/a.gguf"), strange, has_binary=True) is None
    assert validate.refusal(spec("/m/a.gguf"), HOST) is None


def test_weights_must_be_a_gguf_file() -> None:
    assert "is not a file" in str(validate.weights_refusal("llamacpp", "/m", is_file=False, head=b""))
    assert "is not a GGUF file" in str(validate.weights_refusal("llamacpp", "/m", is_file=True, head=b"<htm"))
    assert validate.weights_refusal("llamacpp", "/m", is_file=True, head=b"GGUF") is None


# --- ports -----------------------------------------------------------------------------------------------------------
def _choose(after: int | None, used: set[int], released: dict[int, float], free: set[int]) -> int | None:
    return ports.choose(
        10, 14, after=after, used=used, released_at=released, quarantine_s=60, now=100.0, is_free=free.__contains__
    )


def test_ports_go_round_and_skip_what_is_used_taken_or_lately_released() -> None:
    everything = set(range(10, 15))
    assert _choose(None, set(), {}, everything) == 10
    assert _choose(12, set(), {}, everything) == 13
    assert _choose(14, set(), {}, everything) == 10
    assert _choose(9999, set(), {}, everything) == 10
    assert _choose(10, {11}, {12: 50.0}, {10, 14}) == 14
    assert _choose(11, set(), {12: 40.0}, everything) == 12
    assert _choose(None, everything, {}, everything) is None


@given(
    st.none() | st.integers(5, 20),
    st.sets(st.integers(10, 14)),
    st.dictionaries(st.integers(10, 14), st.floats(0, 100)),
    st.sets(st.integers(10, 14)),
)
def test_a_port_is_never_one_in_use_or_quarantine_and_found_when_there_is_one(
    after: int | None, used: set[int], released: dict[int, float], free: set[int]
) -> None:
    good = {port for port in free - used if 100.0 - released.get(port, 0.0) >= 60}
    port = _choose(after, used, released, free)
    assert (port in good) if good else (port is None)


# --- backoff ---------------------------------------------------------------------------------------------------------
def longest(low: float, high: float) -> float:
    return high


def test_refusals_double_the_ceiling_up_to_the_cap_until_a_healthy_stream() -> None:
    backoff = Backoff(longest, base_s=1, cap_s=10)
    assert [backoff.wait_s(reached=True) for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    backoff.healthy()
    assert backoff.wait_s(reached=True) == 1
    assert backoff.wait_s(reached=True, at_least_s=30) == 32


def test_the_ceiling_of_an_outage_follows_its_length_up_to_the_cap_until_a_healthy_stream() -> None:
    backoff = Backoff(longest, base_s=1, cap_s=10)
    assert [backoff.wait_s(reached=False) for _ in range(7)] == [0.5, 0.5, 1, 2, 4, 8, 10]
    backoff.healthy()
    assert [backoff.wait_s(reached=False, tried_s=3) for _ in range(2)] == [3, 9]


def test_an_outage_does_not_count_as_a_refusal() -> None:
    backoff = Backoff(longest)
    for _ in range(20):
        backoff.wait_s(reached=False)
    assert [backoff.wait_s(reached=True) for _ in range(2)] == [1, 2]


def back_after_s(backoff: Backoff, outage_s: float) -> float:
    """When an agent has its stream again, if attempts fail at once while the outage lasts."""
    now = 0.0
    while now < outage_s:
        now += backoff.wait_s(reached=False)
    return now


@given(st.integers(0, 2**32), st.floats(0.01, 7200))
def test_an_outage_is_over_for_an_agent_soon_after_it_is_over(seed: int, outage_s: float) -> None:
    backoff = Backoff(random.Random(seed).uniform)
    assert back_after_s(backoff, outage_s) <= outage_s + min(60.0, max(2.0, outage_s))
    assert back_after_s(Backoff(longest), outage_s) <= outage_s + min(60.0, max(2.0, outage_s))


@given(st.integers(0, 2**32), st.lists(st.tuples(st.booleans(), st.floats(0, 60)), min_size=1, max_size=100))
def test_a_wait_is_never_over_the_cap(seed: int, attempts: list[tuple[bool, float]]) -> None:
    backoff = Backoff(random.Random(seed).uniform, base_s=1, cap_s=60)
    assert all(0 <= backoff.wait_s(reached=reached, tried_s=tried_s) <= 60 for reached, tried_s in attempts)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 60)), min_size=1, max_size=100))
def test_jitter_is_full(attempts: list[tuple[bool, float]]) -> None:
    lows: list[float] = []

    def shortest(low: float, high: float) -> float:
        lows.append(low)
        return high

    backoff = Backoff(shortest)
    for reached, tried_s in attempts:
        backoff.wait_s(reached=reached, tried_s=tried_s)
    assert set(lows) == {0.0}


@pytest.mark.parametrize("outage_s", [8, 30, 600])
def test_300_agents_do_not_come_back_in_lockstep(outage_s: float) -> None:
    chance = random.Random(1)
    back = [back_after_s(Backoff(chance.uniform), outage_s) - outage_s for _ in range(300)]
    busiest = max(sum(second <= time < second + 0.1 for time in back) for second in (n / 10 for n in range(600)))
    assert busiest < 30
    assert max(back) > min(60, outage_s) / 2


def test_300_agents_that_are_refused_do_not_come_back_in_lockstep() -> None:
    chance = random.Random(1)
    fleet = [Backoff(chance.uniform) for _ in range(300)]
    for _ in range(4):
        times = [one.wait_s(reached=True) for one in fleet]
    assert max(sum(second <= time < second + 0.1 for time in times) for second in (n / 10 for n in range(80))) < 30


# --- answers ---------------------------------------------------------------------------------------------------------
def test_a_command_is_carried_out_once_and_answered_the_same_every_time() -> None:
    done: list[Command] = []

    def carry_out(command: Command) -> str:
        done.append(command)
        return "no" if command.id == 2 else ""

    answers = Answers(carry_out)
    first = Command(id=1, body=StopShard(replica="a"))
    assert answers.answer(first) == answers.answer(first)
    assert answers.answer(first).ok
    assert len(done) == 1
    refused = answers.answer(Command(id=2, body=StopShard(replica="a")))
    assert (refused.ok, refused.error) == (False, "no")
    # A fresh store counts from one again: the same number is another command.
    answers.answer(Command(id=1, body=StopShard(replica="b")))
    assert len(done) == 3


def test_answers_are_remembered_in_bounds() -> None:
    done: list[int] = []

    def carry_out(command: Command) -> str:
        done.append(command.id)
        return ""

    answers = Answers(carry_out)
    for number in range(REMEMBERED + 1):
        answers.answer(Command(id=number, body=StopShard(replica="a")))
    answers.answer(Command(id=0, body=StopShard(replica="a")))
    answers.answer(Command(id=REMEMBERED, body=StopShard(replica="a")))
    assert done[-2:] == [REMEMBERED, 0]
