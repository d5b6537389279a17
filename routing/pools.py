"""The connections to each endpoint: kept alive for the next request, bounded in number, closed before engines do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from math import inf
from typing import Final, cast

from llmgw.core.ending import end
from routing.dialing import Line
from routing.failures import Broken, ConnectFailed, Full, UpstreamError
from routing.heads import Known
from routing.now import monotonic
from routing.table import Target
from routing.upstream import Answer, Connection

IDLE_S: Final = 4.0
"""Engines close kept-alive connections after 5 s or more; ours go first."""
MAX_IDLE: Final = 256
MAX_CONNECTIONS: Final = 2048
"""Per endpoint."""


class Pool:
    """Connections to one endpoint, the most recently used first."""

    __slots__ = ("_all", "_idle", "_line", "_most_idle", "_opening", "host", "known", "port")

    def __init__(self, host: str, port: int, line: Line | None = None) -> None:
        """`line`: the way there, when it is an endpoint outside."""
        self.host, self.port, self._line = host, port, line
        self._idle: deque[Connection] = deque()
        self._most_idle = MAX_IDLE
        self._all: set[Connection] = set()
        self._opening: dict[Connection, asyncio.Task[None]] = {}
        self.known: tuple[Known, Answer] | None = None
        """The last head of an answer from here that came with its body, to be recognised."""

    @property
    def opening(self) -> int:
        """How many are on their way."""
        return len(self._opening)

    def idle(self) -> Connection | None:
        """One that is open already."""
        while self._idle:
            connection = self._idle.pop()
            connection.idle = False
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        return None

    def open(self) -> Connection:
        """A fresh one, on its way: wait for `connected()`. Raises Full."""
        if len(self._all) >= MAX_CONNECTIONS:
            raise Full(f"{MAX_CONNECTIONS} connections to it are in use")
        connection = Connection(self)
        self._all.add(connection)
        task = self._opening[connection] = asyncio.get_running_loop().create_task(self._connect(connection))
        task.add_done_callback(lambda _: self._opening.pop(connection, None))
        return connection

    async def _connect(self, connection: Connection) -> None:
        try:
            if self._line is None:
                protocol = cast(asyncio.Protocol, connection)
                await asyncio.get_running_loop().create_connection(lambda: protocol, self.host, self.port)
            else:
                await self._line.connect(cast(asyncio.Protocol, connection))
        except (OSError, UpstreamError) as error:
            failure = error if isinstance(error, UpstreamError) else ConnectFailed(error.strerror or str(error))
            self._opening.pop(connection, None)
            connection.fail(failure)
            self.closed(connection)

    def put(self, connection: Connection) -> None:
        if len(self._idle) >= self._most_idle:
            assert connection.transport is not None
            connection.transport.close()
            return
        connection.idle, connection.idle_since = True, monotonic()
        self._idle.append(connection)

    def closed(self, connection: Connection) -> None:
        self._all.discard(connection)
        opening = self._opening.pop(connection, None)
        if opening is not None and connection.transport is None:
            opening.cancel()  # nobody waits for it any more, and a host that is gone may never say so
        if connection.idle:
            connection.idle = False
            self._idle.remove(connection)

    def prune(self, now: float) -> None:
        """Close what has not been used for a while."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            connection = self._idle.popleft()
            connection.idle = False
            if connection.transport is not None:
                connection.transport.close()

    def retire(self) -> None:
        """Nothing is sent there any more: close what is idle, and what is in use as soon as it is."""
        self._most_idle = 0
        self.prune(inf)

    async def close(self) -> None:
        opening = tuple(self._opening.values())
        for connection in tuple(self._all):
            connection.idle = False
            connection.fail(Broken("the gateway stops"))
        self._idle.clear()
        self._all.clear()
        await end(opening)


class Pools:
    """The pool of each endpoint; those of endpoints that are gone are dropped."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, Pool] = {}

    def of(self, target: Target) -> Pool:
        pool = self._pools.get(target.address)
        if pool is None:
            line = target.outside.line() if target.outside is not None else None
            pool = self._pools[target.address] = Pool(target.host, target.port, line)
        return pool

    def prune(self, now: float) -> None:
        for pool in self._pools.values():
            pool.prune(now)

    def keep(self, targets: tuple[Target, ...]) -> None:
        """Forget the pools of endpoints that are no more; requests still on them end on their own."""
        known = {target.address for target in targets}
        for address in [each for each in self._pools if each not in known]:
            self._pools.pop(address).retire()

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
