"""One look a second finds the commands that every stream of this process should send."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from channels.db import database_sync_to_async
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
