"""Reading engines' metrics pages: found by name, not line by line, and never waited for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest, make_asgi_app
from prometheus_client.core import GaugeMetricFamily

from catalog import spec
from llmgw.config import Settings
from routing import measures, scrape
from routing.mappings import VLLM, Load, by_name, read
from routing.plane import Plane
from routing.table import Target, build
from tests.bench.engine import page
from tests.routing.gateways import contents, endpoint, served
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


async def test_of_an_engine_that_gives_some_lines_only_those_are_read(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        engine.metrics, engine.gives_by_name = page(), True
        (target,) = await scraped(tmp_path, engine.port)
    assert (target.running, target.waiting, target.kv_used) == (0, 0, 0.0)
    assert list(engine.scrapes) == [by_name(VLLM).decode()] * 2


async def test_an_engine_that_gives_whole_pages_only_is_asked_for_those_from_then_on(tmp_path: Path) -> None:
    async with MockEngine() as engine:
        engine.metrics = page()
        (target,) = await scraped(tmp_path, engine.port)
    assert (target.running, target.asked_by_name) == (0, False)
    assert (list(engine.scrapes), [seen.path for seen in engine.requests]) == (
        ["/metrics"] * 2,
        [by_name(VLLM).decode()],
    )


class Ranks:
    """Metrics of several processes, as prometheus_client collects them: it does not say beforehand which there are."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(NAMES[0], "of all", value=5)


@pytest.mark.parametrize("processes", [1, 2])
async def test_what_vllm_serves_its_metrics_with_is_read_by_name_or_whole(tmp_path: Path, processes: int) -> None:
    registry = CollectorRegistry()
    if processes == 1:
        Gauge(NAMES[0], "running", ["engine"], registry=registry).labels("0").set(5)
        Histogram("vllm:e2e_request_latency_seconds", "other", registry=registry).observe(1)
    else:
        registry.register(Ranks())
    mounted = make_asgi_app(registry=registry)
    sent: list[tuple[str, int]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """As vLLM: the whole page where the slash is missing, the client's own application where it is not."""

        async def note(event: Any) -> None:
            if event["type"] == "http.response.body":
                sent.append((scope["path"], len(event["body"])))
            await send(event)

        if scope["path"] == "/metrics":
            scope = {**scope, "query_string": b""}
        await mounted(scope, receive, note)

    async with served(app, lifespan="off") as (_, port):
        (target,) = await scraped(tmp_path, port)
    assert target.running == 5
    whole = len(generate_latest(registry))
    if processes == 1:
        assert [path for path, _ in sent] == ["/metrics/"] * 2
        assert all(0 < size < whole for _, size in sent)
    else:
        assert [path for path, _ in sent] == ["/metrics/", "/metrics", "/metrics"]


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
