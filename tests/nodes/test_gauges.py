"""Metrics of nodes, from what agents tell over their streams to what Prometheus reads (ND-22)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agent import protocol
from llmgw.asgi import application
from nodes import actions, gauges
from tenants.audit import SYSTEM
from tests.nodes.test_stream import a_register, connected, heard, in_db, tell, until


@pytest.fixture(autouse=True)
def no_nodes() -> Iterator[None]:
    yield
    assert gauges.NVLINK_PEERS.source
    assert list(gauges.NVLINK_PEERS.source()) == []


def gpu(index: int, peers: tuple[str, ...] | None, **fields: Any) -> protocol.Gpu:
    return protocol.Gpu(
        uuid=f"GPU-{index}", index=index, name="NVIDIA H100", gpu_class="h100-80g", peers=peers, **fields
    )


async def scraped() -> dict[tuple[str, str], float]:
    """By node and card."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url="http://web") as client:
        text = (await client.get("/metrics")).text
    assert "# HELP llmgw_gpu_nvlink_peers " in text
    assert "Zero on every card of a fleet means that nothing is known" in text
    found = re.findall(r'llmgw_gpu_nvlink_peers\{gpu="(\d+)",gpu_class="h100-80g",node="(\w+)"\} (\S+)', text)
    return {(node, index): float(value) for index, node, value in found}


@pytest.mark.django_db(transaction=True)
async def test_nvlink_peers_are_published_while_a_nodes_stream_lasts_and_unknown_ones_are_left_out() -> None:
    _, token = await in_db(actions.make_node, name="one", actor=SYSTEM)
    cards = (gpu(0, ("GPU-1",)), gpu(1, ()), gpu(2, None), gpu(3, (), slice_of="GPU-9"))
    told = protocol.Inventory(hostname="box", gpus=cards)
    async with connected(token) as link:
        await tell(link, a_register(inventory=told))
        await heard(link)
        assert await scraped() == {("one", "0"): 1, ("one", "1"): 0}
        fewer = protocol.Inventory(hostname="box", gpus=cards[1:])
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(), inventory=fewer))

        async def is_told() -> bool:
            return await scraped() == {("one", "1"): 0}

        await until(is_told)
    assert await scraped() == {}


def test_a_stream_that_was_replaced_forgets_nothing_of_the_newer_one() -> None:
    gauges.tell_cards("one", "first", (gpu(0, ()),))
    gauges.tell_cards("one", "second", (gpu(0, ("GPU-1",)),))
    gauges.forget_cards("one", "first")
    assert list(gauges.NVLINK_PEERS.source()) == [(("one", "0", "h100-80g"), 1)]
    gauges.forget_cards("one", "second")
    gauges.forget_cards("one", "second")
