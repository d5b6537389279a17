"""Reading engines' metrics pages: found by name, not line by line, and never waited for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import spec
from llmgw.config import Settings
from routing import measures, scrape
from routing.mappings import VLLM, Load, read
from routing.plane import Plane
from routing.table import Target, build
from tests.bench.engine import page
from tests.routing.gateways import contents, endpoint
from tests.stubs.mock_engine import MockEngine, plain

NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
OTHERS = ("vllm:num_requests_running_total", "x_vllm:num_requests_running", "vllm:num_requests", "other")


@st.composite
def pages(draw: st.DrawFn) -> tuple[str, dict[str, list[int]]]:
    """Metrics in any order, each with its samples together, and what those of a name say."""
    said: dict[str, list[int]] = {}
    lines: list[str] = []
    for name in draw(st.permutations((*NAMES, *OTHERS))):
        values = draw(st.lists(st.integers(0, 9), max_size=3))
        if draw(st.booleans()):
            lines += [f"# HELP {name} {name} 7", f"# TYPE {name} gauge"]
        said[name] = values
        lines += [f'{name}{{engine="{number}",note="{draw(st.sampled_from(NAMES))} 5"}} {value}.0'
                  for number, value in enumerate(values)]  # fmt: skip
    ends = draw(st.sampled_from(("\n", "\r\n")))
    return ends.join(lines) + draw(st.sampled_from(("", "\n"))), said


@given(pages())
def test_a_page_is_read_by_whole_names_at_the_beginning_of_lines(drawn: tuple[str, dict[str, list[int]]]) -> None:
    text, said = drawn
    running, waiting, kv = (said[name] for name in NAMES)
    expected = Load(
        running=sum(running) if running else None,
        waiting=sum(waiting) if waiting else None,
        kv_used=min(1.0, max(kv)) if kv else None,
    )
    assert read(text, VLLM) == expected


def test_a_sample_without_a_number_does_not_hide_the_next_one() -> None:
    assert read('vllm:num_requests_running{a="1"} NaN\nvllm:num_requests_running{a="2"} 3\n', VLLM).running == 3


# --- over a real port ------------------------------------------------------------------------------------------------
async def scraped(tmp_path: Path, *ports: int, models: Sequence[spec.Model] = ()) -> tuple[Target, ...]:
    """What is known of each engine after two rounds."""
    plane = Plane(Settings(data_dir=tmp_path))
    places = (endpoint(port, f"m-{number}", engine="vllm") for number, port in enumerate(ports))
    plane.table = build(contents(*places, models=models), plane.table)
    try:
        for _ in range(2):
            await scrape.scrape_all(plane)
    finally:
        await plane.pools.close()
        plane.journal.close()
    return plane.table.targets


async def test_a_page_of_many_reads_gives_its_figures_over_one_kept_connection(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        engine.metrics = page() * 4
        (target,) = await scraped(tmp_path, engine.port)
        assert engine.accepted == 1
    assert (target.running, target.waiting, target.kv_used) == (0, 0, 0.0)
    assert target.scraped_at is not None


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()


async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(plain(b"vllm:num_requests_running 1", b"text/plain", b"501 Not Implemented"))
    writer.close()


async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"vllm:num_requests_running 1\n" * 10_000)
            await writer.drain()


@pytest.mark.parametrize("engine", [silent, resets, refuses, never_ends])
async def test_an_engine_that_cannot_be_read_is_unknown_and_the_others_are_known(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.5 if engine is silent else 20.0)
    monkeypatch.setattr(scrape, "AT_ONCE", 1)
    failures = measures.SCRAPE_FAILURES.of("m-0").value
    bad = await asyncio.start_server(engine, "127.0.0.1", 0)
    async with bad, MockEngine() as good:
        good.metrics = page()
        first, second = await scraped(tmp_path, bad.sockets[0].getsockname()[1], good.port)
    assert (first.running, first.waiting, first.kv_used, first.scraped_at) == (None, None, None, None)
    assert second.running == 0
    assert measures.SCRAPE_FAILURES.of("m-0").value == failures + 2


async def test_a_profile_says_how_its_engine_calls_its_load(tmp_path: Path) -> None:
    named = spec.Metrics(running=("busy",), kv_used=("cache",))
    model = spec.Model(name="m", profiles=(spec.Profile(name=endpoint(1).profile, metrics=named),))
    async with MockEngine() as engine:
        engine.metrics = b"busy 7\ncache 0.5\nvllm:num_requests_running 1\nvllm:num_requests_waiting 3\n"
        (told,) = await scraped(tmp_path, engine.port, models=[model])
        (usual,) = await scraped(tmp_path, engine.port)
    assert (told.running, told.waiting, told.kv_used) == (7, None, 0.5)
    assert (usual.running, usual.waiting, usual.kv_used) == (1, 3, None)
