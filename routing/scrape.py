"""Reads each engine's load off its metrics page, over the gateway's own client."""

from __future__ import annotations

import asyncio
import contextlib
import time

from routing import mappings, measures
from routing.failures import Broken, Silent, UpstreamError
from routing.plane import Plane
from routing.pools import Pool
from routing.table import Target
from routing.upstream import Connection

AT_ONCE = 32
TIMEOUT_S = 3.0


class Unreadable(Exception):
    """The page is no metrics page; the message says why."""


async def scrape_all(plane: Plane) -> None:
    """One round over every endpoint but providers. What cannot be read becomes unknown, never zero."""
    targets = [each for each in plane.table.targets if each.outside is None or each.outside.own]
    left = iter(targets)

    async def some() -> None:
        for target in left:
            await _scrape(plane.pools.of(target), target)

    await asyncio.gather(*(some() for _ in range(min(AT_ONCE, len(targets)))))


async def _scrape(pool: Pool, target: Target) -> None:
    target.scraping()
    try:
        load = await _load(pool, target)
    except (UpstreamError, Unreadable):
        measures.SCRAPE_FAILURES.of(target.replica).value += 1
        target.scraped(mappings.UNKNOWN, None)
        return
    target.scraped(load, time.monotonic())


async def _load(pool: Pool, target: Target) -> mappings.Load:
    """From the lines that are wanted, where the engine gives those alone; else from its whole page, and so from then on
    when only that says it."""
    mapping = mappings.mapping_for(target.engine, target.metrics)
    if target.asked_by_name:
        with contextlib.suppress(Unreadable):
            load = mappings.read(await _get(pool, target, mappings.by_name(mapping)), mapping)
            if load.running is not None:
                return load
    path = b"/metrics" if target.outside is None else target.outside.metrics_path.encode()
    load = mappings.read(await _get(pool, target, path), mapping)
    if load.running is not None:
        target.asked_by_name = False
    return load


async def _get(pool: Pool, target: Target, path: bytes) -> str:
    connection = pool.idle()
    if connection is not None:
        with contextlib.suppress(Broken):  # the engine had closed it: once more on a fresh one
            return await _ask(connection, target, path)
    return await _ask(pool.open(), target, path)


async def _ask(connection: Connection, target: Target, path: bytes) -> str:
    # A timer that fails the connection costs a tenth of asyncio.timeout, and there may be hundreds a second.
    silent = Silent(f"nothing for {TIMEOUT_S:g} s")
    timer = asyncio.get_running_loop().call_later(TIMEOUT_S, connection.fail, silent)
    try:
        await connection.connected()
        connection.fed = True  # its head is no answer's: not to be remembered in their place
        head = target.request_head if target.outside is None else target.outside.lines()
        connection.send(b"GET " + path + head + b"accept: text/plain\r\n\r\n", b"")
        await connection.head()
        if connection.status != 200:
            raise Unreadable(f"it answered {connection.status}")
        parts, size = [], 0
        while await connection.more():
            parts.append(connection.take())
            size += len(parts[-1])
            if size > mappings.MAX_BYTES:
                raise Unreadable(f"it is longer than {mappings.MAX_BYTES:,} bytes")
        return b"".join(parts).decode("utf-8", "replace")
    finally:
        timer.cancel()
        connection.release()
