"""Fetches and installations that commands ask for, beside what shards need: begun at once, told in heartbeats."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from agent import tellable
from agent.host import Host
from agent.installer import Installer, InstallError
from agent.protocol import Errand, Fetch, InstallEngine, Progress
from agent.weights import FetchError, Weights

log = logging.getLogger(__name__)

AT_ONCE = 4
KEPT = 16
"""Errands that are told of, those that ended included."""


class Errands:
    """The newest KEPT by the number of their command. `host` is asked for at each installation."""

    def __init__(self, weights: Weights, installer: Installer, host: Callable[[], Host]) -> None:
        self._weights, self._installer, self._host = weights, installer, host
        self._told: OrderedDict[int, Errand] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def told(self) -> tuple[Errand, ...]:
        """What a heartbeat carries."""
        return tuple(self._told.values())

    def begin(self, number: int, body: Fetch | InstallEngine) -> str:
        """Begin an errand; the answer is empty, or why not. One that is under way for another command is joined."""
        if len(self._tasks) >= AT_ONCE:
            return f"{AT_ONCE} fetches and installations are under way on this node; ask again when one has ended."
        what = body.source if isinstance(body, Fetch) else body.engine
        if len(what) > tellable.MAX_SOURCE or not what.isprintable():
            return f"what is asked for is not one line of at most {tellable.MAX_SOURCE} characters."
        self._told[number] = Errand(command=number, what=what)
        while len(self._told) > KEPT:
            self._told.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._do(number, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ""

    async def close(self) -> None:
        """End what is under way. What has been fetched of a file is kept."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)

    async def _do(self, number: int, body: Fetch | InstallEngine) -> None:
        try:
            if isinstance(body, Fetch):
                await self._weights.ensure(body.source, lambda progress: self._change(number, progress=progress))
            else:
                await self._installer.ensure(body.engine, self._host())
        except (FetchError, InstallError) as error:
            log.warning("Command %d did not end well: %s", number, error)
            self._change(number, state="failed", reason=str(error))
        except Exception as error:  # the agent's boundary: a fault of ours fails one errand only
            log.exception("A fault of the agent's fails command %d", number)
            self._change(number, state="failed", reason=f"the agent itself failed: {type(error).__name__}: {error}")
        else:
            self._change(number, state="done")

    def _change(self, number: int, **fields: str | Progress) -> None:
        if number in self._told:
            self._told[number] = msgspec.structs.replace(self._told[number], **fields)
