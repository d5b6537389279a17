"""Rings wake who waits, cost nothing when lost, and travel between processes over a real Redis."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest
import redis
from django.conf import settings
from django.db import transaction

from llmgw import config
from llmgw.core import doorbell
from llmgw.core.models import Revision
from tests.services import free_port, redis_server


async def test_a_ring_from_another_thread_wakes_a_listener_at_once() -> None:
    listener = doorbell.Listener([doorbell.TABLE])
    threading.Timer(0.05, doorbell.ring, [doorbell.TABLE]).start()
    async with asyncio.timeout(30):  # long before its own limit
        assert await listener.wait(3600) is True
    listener.close()


async def test_waiting_ends_by_itself_when_nobody_rings() -> None:
    listener = doorbell.Listener(["quiet"])
    assert await listener.wait(0.02) is False
    listener.close()


async def test_a_closed_listener_is_forgotten_and_other_topics_do_not_wake_it() -> None:
    listener = doorbell.Listener(["one"])
    doorbell.ring("two")
    assert await listener.wait(0.02) is False
    listener.close()
    doorbell.ring("one")
    assert await listener.wait(0.02) is False


@pytest.mark.django_db(transaction=True)
async def test_a_change_rings_only_once_it_is_committed_and_counts_one_revision() -> None:
    from asgiref.sync import sync_to_async

    listener = doorbell.Listener([doorbell.TABLE])
    seen: list[bool] = []

    def change() -> int:
        before = Revision.current()
        with transaction.atomic():
            doorbell.table_changed()
            seen.append(listener.event.is_set())
        return Revision.current() - before

    assert await sync_to_async(change)() == 1
    assert seen == [False]
    assert await listener.wait(20) is True
    listener.close()


async def test_rings_cross_processes_over_redis_and_its_loss_is_survived(settings: Any) -> None:
    with redis_server() as url:
        settings.LLMGW = config.Settings(redis=config.Redis(url=url))
        relay = asyncio.create_task(doorbell.relay_redis())
        listener = doorbell.Listener(["far"])
        with redis.Redis.from_url(url) as other_process:
            for _ in range(1000):
                if other_process.pubsub_numpat():
                    break
                await asyncio.sleep(0.02)
            other_process.publish(doorbell.PREFIX + "far", b"1")
            assert await listener.wait(20) is True
    # Redis is gone now: a ring is lost, not an error, and who is in this process still hears it.
    await asyncio.to_thread(doorbell.ring, "far")
    assert await listener.wait(20) is True
    relay.cancel()
    listener.close()
    doorbell.forget_redis()


async def test_its_absence_is_said_once_when_it_begins_and_once_when_it_is_over(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(doorbell, "AWAY_S", 0.0)
    port = free_port()
    settings.LLMGW = config.Settings(redis=config.Redis(url=f"redis://127.0.0.1:{port}/0"))
    asked = []

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.close()

    doorbell.forget_redis()
    async with await asyncio.start_server(refuse, "127.0.0.1", port), asyncio.timeout(100):
        relay = asyncio.create_task(doorbell.relay_redis())
        while len(asked) < 20 or len(caplog.messages) < 2:
            await asyncio.to_thread(doorbell.ring, "far")
            await asyncio.sleep(0.01)
    away = sorted(message.partition(" (")[0] for message in caplog.messages)
    assert away == ["Redis does not deliver rings", "Redis does not take rings"], "however often it is tried"
    caplog.clear()
    with redis_server(port):
        async with asyncio.timeout(100):
            while len(caplog.messages) < 2:
                await asyncio.to_thread(doorbell.ring, "far")
                await asyncio.sleep(0.01)
        assert sorted(caplog.messages) == ["Redis delivers rings again", "Redis takes rings again"]
    relay.cancel()
    doorbell.forget_redis()


def test_settings_hold_the_typed_tree() -> None:
    assert isinstance(settings.LLMGW, config.Settings)


def test_a_redis_that_is_away_is_asked_rarely_and_found_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server() as url:
        monkeypatch.setattr(settings, "LLMGW", settings.LLMGW.model_copy(update={"redis": config.Redis(url=url)}))
        doorbell.forget_redis()
        doorbell.ring(doorbell.TABLE)
        assert caplog.text == ""
    for _ in range(1000):
        doorbell.ring(doorbell.TABLE)
    assert caplog.text.count("Redis does not take rings") == 1, "each try may take a second"
    with redis_server() as url, redis.Redis.from_url(url) as client, client.pubsub() as heard:
        monkeypatch.setattr(settings, "LLMGW", settings.LLMGW.model_copy(update={"redis": config.Redis(url=url)}))
        doorbell.forget_redis()
        heard.subscribe(doorbell.PREFIX + doorbell.TABLE)
        doorbell.ring(doorbell.TABLE)
        doorbell.forget_redis()
        kinds = [message["type"] for message in (heard.get_message(timeout=30) for _ in range(2)) if message]
        assert kinds == ["subscribe", "message"]
