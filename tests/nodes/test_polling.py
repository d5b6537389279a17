"""One look a second finds the commands that every stream of this process should send."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime, timedelta

import pytest
from channels.db import database_sync_to_async
from django.db import OperationalError
from django.utils import timezone

from agent import protocol
from llmgw.core import doorbell
from nodes import commands, polling
from nodes.models import Command, Node
from tests.factories import make_node

pytestmark = pytest.mark.django_db
STOP = protocol.StopShard(replica="r")


def test_nodes_with_something_to_send_are_found() -> None:
    now = timezone.now()
    for name in ("due", "sent", "again", "answered", "away", "idle"):
        make_node(name)
    Node.objects.exclude(name="away").update(connection="stream")
    for name in ("due", "due", "sent", "again", "answered", "away"):
        commands.store(node=name, body=STOP, now=now)
    Command.objects.filter(node="sent").update(sent_at=now)
    Command.objects.filter(node="again").update(sent_at=now - commands.RESEND_AFTER)
    Command.objects.filter(node="answered").update(acknowledged_at=now)
    Node.objects.filter(name="away").update(connection="")
    assert commands.nodes_with_due(now) == ("again", "due")
    assert "sent" in commands.nodes_with_due(now + timedelta(seconds=10))


@pytest.mark.django_db(transaction=True)
async def test_a_command_that_nobody_rang_for_wakes_its_stream() -> None:
    await database_sync_to_async(make_node)("one")
    await Node.objects.aupdate(connection="stream")
    await Command.objects.acreate(node_id="one", body={"type": "stop_shard", "replica": "r"})
    listener = doorbell.Listener([doorbell.commands_for("one")])
    poll = polling.here()
    poll.join(timezone.now)
    poll.join(timezone.now)
    try:
        assert await listener.wait(30)
    finally:
        poll.leave()
        assert poll.task is not None  # another stream is open
        poll.leave()
        listener.close()
    assert poll.task is None
    await asyncio.sleep(0)


async def test_a_store_that_is_away_is_said_once_and_so_is_its_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    looks = 0
    looked_often = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look(_: datetime) -> tuple[str, ...]:
        nonlocal looks
        looks += 1
        if looks in (2, 3, 4):
            raise OperationalError("the server closed the connection")
        if looks > 6:
            loop.call_soon_threadsafe(looked_often.set)
        return ()

    monkeypatch.setattr(polling, "POLL_S", 0.01)
    monkeypatch.setattr(commands, "nodes_with_due", look)
    poll = polling.here()
    poll.join(timezone.now)
    async with asyncio.timeout(60):
        await looked_often.wait()
    poll.leave()
    assert [line for line in caplog.messages if line.startswith("Commands")] == [
        "Commands to agents cannot be looked for (the server closed the connection); it is tried again every 0.01 s",
        "Commands to agents are looked for again",
    ]
