"""Rings that wake waiting loops early. A ring carries nothing and may be lost: every loop also runs on a period.

Inside one process rings travel by asyncio events; between processes by Redis pub/sub where `redis.url` is set, and
by nothing at all (the period alone) where it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import transaction

from llmgw.core.ending import end
from llmgw.core.models import Revision
from llmgw.core.outages import Outage

if TYPE_CHECKING:
    import redis

# Redis's client is imported where it is used: it takes a third of a second, and most installations have no Redis.

log = logging.getLogger(__name__)

TABLE = "table"
"""Keys, catalog or endpoints changed: gateways reload their table."""
PREFIX = "llmgw:bell:"


def commands_for(node: str) -> str:
    """The topic that tells a node's stream that a command is waiting."""
    return f"commands:{node}"


class _Bells:
    def __init__(self) -> None:
        self.waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = defaultdict(set)
        self.lock = threading.Lock()

    def ring(self, topic: str) -> None:
        with self.lock:
            waiting = list(self.waiting.get(topic, ()))
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(event.set)


def _outage(verb: str) -> Outage:
    return Outage(log, f"Redis does not {verb} rings (%s); polling goes on", f"Redis {verb}s rings again")


_bells = _Bells()
_out = _outage("take")
_client: redis.Redis | None = None
_away_until = 0.0
AWAY_S = 2.0
"""For so long after Redis failed it is not tried again, so that its absence holds nobody up."""


def ring(topic: str) -> None:
    """Wake whoever waits for `topic`, here and (with Redis) elsewhere. Never fails: a lost ring costs one period."""
    _bells.ring(topic)
    if settings.LLMGW.redis.url:
        _publish(topic, settings.LLMGW.redis.url)


def ring_here(topic: str) -> None:
    """Wake whoever waits for `topic` in this process alone."""
    _bells.ring(topic)


def _publish(topic: str, url: str) -> None:
    global _client, _away_until
    if time.monotonic() < _away_until:
        return
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        if _client is None:
            # Tried once more, for a connection that went stale; by itself it would pause for seconds in between.
            once_more = Retry(NoBackoff(), 1)
            _client = redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1, retry=once_more)
        _client.publish(PREFIX + topic, b"1")
        _out.works()
    except redis.RedisError as error:
        _away_until = time.monotonic() + AWAY_S
        _out.fails(error)


def forget_redis() -> None:
    """Close the connection that rings go out on; the next ring opens one to where the settings point then."""
    global _client, _away_until, _out
    _away_until, _out = 0.0, _outage("take")
    if _client is not None:
        _client.close()
        _client = None


def ring_on_commit(*topics: str) -> None:
    for topic in topics:
        transaction.on_commit(lambda topic=topic: ring(topic))  # type: ignore[misc]


def table_changed() -> None:
    """Count a change that gateways must see and ring for it on commit. Call inside the transaction."""
    Revision.bump()
    ring_on_commit(TABLE)


class Listener:
    """`await listener.wait(5)` returns on a ring for one of its topics, or after 5 s. Close it when done."""

    def __init__(self, topics: Iterable[str]) -> None:
        self.topics = tuple(topics)
        self.event = asyncio.Event()
        self.mark = (asyncio.get_running_loop(), self.event)
        with _bells.lock:
            for topic in self.topics:
                _bells.waiting[topic].add(self.mark)

    async def wait(self, timeout_s: float) -> bool:
        """True when rung, False when the time passed."""
        try:
            await asyncio.wait_for(self.event.wait(), timeout_s)
        except TimeoutError:
            return False
        self.event.clear()
        return True

    def close(self) -> None:
        with _bells.lock:
            for topic in self.topics:
                _bells.waiting[topic].discard(self.mark)
                if not _bells.waiting[topic]:
                    del _bells.waiting[topic]


@contextlib.asynccontextmanager
async def relayed() -> AsyncIterator[None]:
    """Around the life of a process that has listeners: they hear what other processes ring for."""
    relay = asyncio.create_task(relay_redis())
    try:
        yield
    finally:
        await end([relay])


async def relay_redis() -> None:
    """Pass rings that other processes publish on to the listeners of this one. Runs for the process's life."""
    url = settings.LLMGW.redis.url
    if not url:
        return
    import redis.asyncio

    arriving = _outage("deliver")
    while True:
        try:
            async with redis.asyncio.Redis.from_url(url, socket_connect_timeout=2) as client, client.pubsub() as pubsub:
                await pubsub.psubscribe(PREFIX + "*")
                arriving.works()
                async for message in pubsub.listen():
                    if message["type"] == "pmessage":
                        _bells.ring(message["channel"].decode().removeprefix(PREFIX))
        except (redis.RedisError, OSError) as error:
            arriving.fails(error)
        await asyncio.sleep(AWAY_S)
