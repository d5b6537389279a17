"""Looks for commands on behalf of every agent's stream of an event loop at once: one query a second, however many.

A ring wakes a stream earlier; this finds what rings cannot tell of: another process without Redis, and commands that
are due again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from weakref import WeakKeyDictionary

from channels.db import database_sync_to_async
from django.db import Error

from llmgw.core import doorbell
from llmgw.core.outages import Outage
from nodes import commands

log = logging.getLogger(__name__)

POLL_S = 1.0

_outage = Outage(
    log,
    "Commands to agents cannot be looked for (%s); it is tried again every %g s",
    "Commands to agents are looked for again",
)
_polls: WeakKeyDictionary[asyncio.AbstractEventLoop, Poll] = WeakKeyDictionary()


class Poll:
    """Runs while any stream is open. `join` before a stream first looks itself, `leave` at its end."""

    def __init__(self) -> None:
        self.streams = 0
        self.task: asyncio.Task[None] | None = None

    def join(self, now: Callable[[], datetime]) -> None:
        self.streams += 1
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run(now))

    def leave(self) -> None:
        self.streams -= 1
        if self.streams == 0 and self.task:
            self.task.cancel()
            self.task = None

    async def _run(self, now: Callable[[], datetime]) -> None:
        look = database_sync_to_async(lambda: commands.nodes_with_due(now()))
        while True:
            await asyncio.sleep(POLL_S)
            try:
                for node in await look():
                    doorbell.ring_here(doorbell.commands_for(node))
                _outage.works()
            except Error as error:
                _outage.fails(error, POLL_S)


def here() -> Poll:
    """The poll of the running event loop."""
    return _polls.setdefault(asyncio.get_running_loop(), Poll())
