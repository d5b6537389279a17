"""Reads each engine's load off its metrics page, over the gateway's own client."""

from __future__ import annotations

import asyncio
import contextlib
import time

from routing import mappings, measures
from routing.plane import Plane
from routing.pools import Pool
from routing.table import Target
from routing.upstream import Connection, UpstreamError

AT_ONCE = 32
TIMEOUT_S = 3.0


class Unreadable(Exception):
    """The page is no metrics page; the message says why."""


async def scrape_all(plane: Plane) -> None:
    """One round over every endpoint. What cannot be read becomes unknown, never zero."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(target: Target) -> None:
        async with room:
            await _scrape(plane.pools.of(target), target)

    await asyncio.gather(*(one(target) for target in plane.table.targets))


async def _scrape(pool: Pool, target: Target) -> None:
    target.scraping()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            text = await _get(pool, target, b"/metrics")
    except (TimeoutError, UpstreamError, Unreadable):
        measures.SCRAPE_FAILURES.of(target.replica).value += 1
        target.scraped(mappings.UNKNOWN, None)
        return
    target.scraped(mappings.read(text, mappings.mapping_for(target.engine)), time.monotonic())


async def _get(pool: Pool, target: Target, path: bytes) -> str:
    connection = pool.idle()
    if connection is not None:
        with contextlib.suppress(UpstreamError):  # the engine had closed it: once more on a fresh one
            return await _ask(connection, target, path)
    connection = pool.open()
    try:
        await connection.connected()
    except BaseException:
        connection.release()
        raise
    return await _ask(connection, target, path)


async def _ask(connection: Connection, target: Target, path: bytes) -> str:
    try:
        connection.send(b"GET " + path + target.request_head + b"accept: text/plain\r\n\r\n", b"")
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
        connection.release()
