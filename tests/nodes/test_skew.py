"""Hosts whose clocks differ: what agents' streams write down is in the database's time, which passes go by (ND-10)."""

from __future__ import annotations

import contextlib
from datetime import datetime, timedelta
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agent import protocol
from llmgw.core import lease, store_clock
from llmgw.core.clock import SystemClock
from llmgw.core.models import Secret
from llmgw.core.store_clock import StoreClock
from nodes import actions, commands, consumers, passes
from nodes.engine_keys import SECRET_NAME
from nodes.models import Command, Event, Node, Replica, Shard
from tenants.audit import SYSTEM
from tests.nodes.test_stream import SECRET, a_register, connected, full_register, heard, tell, until

pytestmark = pytest.mark.django_db(transaction=True)
APART = timedelta(seconds=10)
"""Times of one clock are nearer to each other than that, and those of the wrong ones an hour and more away."""


class WrongHost(SystemClock):
    """A host whose clock is off, and which was started at another time than ours."""

    def __init__(self, off: timedelta) -> None:
        self.off = off

    def now(self) -> datetime:
        return super().now() + self.off

    def monotonic(self) -> float:
        return super().monotonic() + self.off.total_seconds()


class Hand(SystemClock):
    """A monotonic clock that moves when told."""

    def __init__(self) -> None:
        self.at = 100.0
        self.steps: list[float] = []

    def monotonic(self) -> float:
        if self.steps:
            self.at += self.steps.pop(0)
        return self.at


def of_the_store() -> datetime:
    held = lease.acquire("looked at", ttl_s=60) and lease.current("looked at")
    assert held
    return held.at


async def of_the_store_now() -> datetime:
    now: datetime = await database_sync_to_async(of_the_store)()
    return now


@pytest.fixture(params=[timedelta(hours=1), timedelta(hours=-1)], ids=["fast", "slow"])
def off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> timedelta:
    """This process is one of a host whose clock is wrong: only the database says what time it is."""
    off: timedelta = request.param
    right = timezone.now
    monkeypatch.setattr(timezone, "now", lambda: right() + off)
    monkeypatch.setattr(consumers.AgentStream, "clock", StoreClock(WrongHost(off)))
    return off


def ready(**more: Any) -> protocol.ShardState:
    return protocol.ShardState(replica="r", port=9001, **{"state": "ready", **more})


async def test_all_that_a_stream_writes_is_in_the_databases_time(off: timedelta) -> None:
    began = await of_the_store_now()
    await Secret.objects.acreate(name=SECRET_NAME, value=SECRET.hex())
    _, token = await database_sync_to_async(actions.make_node)(name="one", actor=SYSTEM)
    async with connected(token) as link:
        await tell(link, full_register())
        await heard(link)
        await tell(link, protocol.ShardStatus(status=ready()))
        row = await database_sync_to_async(commands.store)(node="one", body=protocol.StopShard(replica="r"), now=began)
        await heard(link)
        await tell(link, protocol.Ack(id=row.pk, ok=False, error="no"))
        await until(Command.objects.exclude(acknowledged_at=None).aexists)
        before = (await Node.objects.aget()).last_seen_at
        await tell(link, protocol.Heartbeat(load=protocol.NodeLoad(load_1m=7.0), shards=(ready(pid=5),)))
        await until(Node.objects.filter(load={"load_1m": 7.0}).aexists)
        await until(Shard.objects.filter(pid=5).aexists)
    node, replica, shard = await Node.objects.aget(), await Replica.objects.aget(), await Shard.objects.aget()
    command = await Command.objects.aget()
    assert node.last_seen_at is not None
    assert before is not None
    assert node.last_seen_at > before
    written = [
        *(node.registered_at, node.last_seen_at, replica.wanted_at, replica.state_at),
        *(replica.ready_at, shard.changed_at, command.sent_at, command.acknowledged_at),
        *[at async for at in Event.objects.exclude(kind="made").values_list("at", flat=True)],
    ]
    ended = await of_the_store_now()
    assert all(at is not None and began - APART < at < ended + APART for at in written), written


async def test_the_silence_of_nodes_is_the_same_whichever_host_heard_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was heard by a host an hour ahead, and one by a host an hour behind."""
    async with contextlib.AsyncExitStack() as links:
        for name, off in (("one", timedelta(hours=1)), ("two", timedelta(hours=-1))):
            monkeypatch.setattr(consumers.AgentStream, "clock", StoreClock(WrongHost(off)))
            _, token = await database_sync_to_async(actions.make_node)(name=name, actor=SYSTEM)
            link = await links.enter_async_context(connected(token))
            await tell(link, a_register(name))
            await heard(link)
        now = await of_the_store_now()
        for silence_s, state in ((0, "ready"), (20, "unreachable"), (310, "lost")):
            await database_sync_to_async(passes.run_pass)(now + timedelta(seconds=silence_s))
            assert [node.state async for node in Node.objects.order_by("name")] == [state, state]


@pytest.mark.parametrize("off_s", [-3600, 0, 3600])
def test_it_is_the_databases_whatever_the_hosts_clock_says(off_s: int) -> None:
    clock = StoreClock(WrongHost(timedelta(seconds=off_s)))
    for _ in range(3):
        assert abs(clock.now() - of_the_store()) < APART


def test_it_is_asked_for_every_few_seconds_however_often_it_is_read() -> None:
    hand = Hand()
    clock = StoreClock(hand)
    with CaptureQueriesContext(connection) as asked:
        first = clock.now()
        for _ in range(1000):
            clock.now()
        hand.at += store_clock.REFRESH_S * 0.9
        assert clock.now() - first == timedelta(seconds=store_clock.REFRESH_S * 0.9)
    assert len(asked) == 1
    hand.at += store_clock.REFRESH_S * 0.2
    with CaptureQueriesContext(connection) as asked:
        again = clock.now()
    assert len(asked) == 1
    assert abs(again - of_the_store()) < APART


def test_an_answer_that_took_long_is_asked_for_again() -> None:
    """A process that stood still between the question and the answer knows little of the time."""
    hand = Hand()
    clock = StoreClock(hand)
    hand.steps = [0.0, 60.0]
    clock.now()
    with CaptureQueriesContext(connection) as asked:
        again = clock.now()
        clock.now()
    assert len(asked) == 1
    assert abs(again - of_the_store()) < APART
