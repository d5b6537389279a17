from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.routing.gateways import EDGES, Running, contents, endpoint, key_of, running
from tests.stubs.mock_engine import MockEngine

Start = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture(params=EDGES, ids=["direct", "asgi"])
def edge(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def start(tmp_path: Path, edge: str) -> Start:
    """`async with start(contents, **settings) as gateway`, over both ways in."""
    return partial(running, tmp_path, http_protocol=edge)


@pytest.fixture
async def engine() -> AsyncIterator[MockEngine]:
    async with MockEngine(key=key_of("m-1")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: MockEngine, start: Start) -> AsyncIterator[Running]:
    """A gateway with one model `m` on one replica `m-1`."""
    async with start(contents(endpoint(engine.port))) as gateway:
        yield gateway
