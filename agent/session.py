"""Keeps one stream to some control plane, for ever: which one, when again, and when to leave a silent one (ND-5)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from time import monotonic

from agent import stream
from agent.backoff import Backoff
from agent.config import AgentSettings
from agent.credentials import Credentials
from agent.protocol import Heartbeat, ShardStatus
from agent.stream import Ended, Node, Stream

log = logging.getLogger(__name__)

HEALTHY_S = 60.0
"""How long a stream must hold before earlier failures are forgiven."""
PING_S = 3.0
"""One that stands still is found, with `stream.QUIET_S`, and another taken before the node counts as unreachable."""
ALONE_PING_S = 20.0
"""Where there is no other control plane to go to."""


class Session:
    def __init__(
        self,
        settings: AgentSettings,
        node: Node,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
        base_s: float = 1.0,
        healthy_s: float = HEALTHY_S,
    ) -> None:
        self._addresses = settings.control_plane
        self._has_others = len(set(settings.control_plane)) > 1
        self._credentials = Credentials(settings)
        self._node = node
        self._backoff = Backoff(uniform, base_s=base_s)
        self._healthy_s = healthy_s
        self._turn = 0
        self._streams: list[Stream] = []
        self._event = asyncio.Event()

    def publish(self, news: ShardStatus | Heartbeat) -> None:
        """Send it at once; without a stream it is not kept, because every register tells the whole truth anew."""
        for each in self._streams:
            each.put(news)

    async def flush(self, limit_s: float) -> None:
        """Wait until all that was put is sent, as far as it goes in this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for each in list(self._streams):
                    if not each.silent:
                        await each.sent()

    async def run(self) -> None:
        """Keep one stream open until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            one = self._open(tasks)
            while True:
                if one.ended:
                    await asyncio.sleep(self._wait_s(one, one.ended))
                    one = self._open(tasks)
                elif one.silent and self._has_others:
                    one = await self._move(one, tasks)
                else:
                    await self._change()

    async def _move(self, old: Stream, tasks: asyncio.TaskGroup) -> Stream:
        """Ask the others while `old` is silent. It is kept until one of them takes us: it may only be busy."""
        log.warning("%s has not answered for %g s. Asking another control plane", old.address, stream.QUIET_S)
        while old.silent and not old.ended:
            new = self._open(tasks, but=old.address)
            while old.silent and not (old.ended or new.ended or new.welcomed_at):
                await self._change()
            if new.ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_s(new, new.ended)):
                        while old.silent and not old.ended:
                            await self._change()
            elif new.welcomed_at:
                old.leave("another control plane answers sooner")
                return new
            elif old.ended:
                log.warning("No stream to %s: %s", old.address, old.ended)
                return new
            else:
                new.leave("the control plane before answers again")
        return old

    def _open(self, tasks: asyncio.TaskGroup, *, but: str = "") -> Stream:
        """A stream to the next control plane, `but` not this one."""
        address = but
        while address == but:
            address = self._addresses[self._turn % len(self._addresses)]
            self._turn += 1
        ping_s = PING_S if self._has_others else ALONE_PING_S
        one = Stream(address, self._node, self._credentials, ping_s=ping_s, changed=self._event.set)
        self._streams.append(one)
        one.task = tasks.create_task(one.run())
        one.task.add_done_callback(lambda _: self._streams.remove(one))
        return one

    def _wait_s(self, one: Stream, ended: Ended) -> float:
        """How long to wait after a stream that ended, and why, said in the log."""
        now = monotonic()
        began, stood_at = one.began, one.welcomed_at or now
        if now - stood_at >= self._healthy_s:
            self._backoff.healthy()
            began = stood_at
        wait_s = self._backoff.wait_s(reached=ended.reached, tried_s=stood_at - began, at_least_s=ended.retry_after_s)
        level = logging.INFO if ended.clean else logging.WARNING
        again = f"in {wait_s:.1f} s" if wait_s >= 0.05 else "at once"
        log.log(level, "No stream to %s: %s. Trying again %s", one.address, ended, again)
        return wait_s

    async def _change(self) -> None:
        """Until a stream is in another state than when it was looked at last."""
        self._event.clear()
        await self._event.wait()
