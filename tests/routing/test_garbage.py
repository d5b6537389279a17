"""A request that is over leaves nothing for the garbage collector: its memory is used again by the next one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.routing.gateways import CHAT, Running

OURS = {"Exchange", "DirectClient", "Run", "Signal", "Peek", "Hold", "Stream", "Connection", "Head"}
REQUESTS = 40
KEPT = 8
"""What open connections hold of their last request, whichever they are."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive() -> Counter[str]:
    return Counter(name for each in gc.get_objects() if (name := type(each).__name__) in OURS)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 200), ({"stream": True, "max_tokens": 3}, 200), ({"model": "q"}, 404), ({"stream": 1}, 400)],
    ids=["whole", "streamed", "unknown model", "refused body"],
)
async def test_requests_that_ended_are_gone_without_a_collection(
    gateway: Running, body: dict[str, Any], status: int
) -> None:
    async def ask() -> None:
        answer = await gateway.chat({**CHAT, **body})
        assert answer.status_code == status, answer.text

    for _ in range(5):
        await ask()
    before = alive()
    for _ in range(REQUESTS):
        await ask()
    grown = alive() - before
    assert {name: count for name, count in grown.items() if count > KEPT} == {}
