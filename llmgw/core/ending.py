"""How tasks are ended: cancelled until they are over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 0.5
MOST_TIMES = 20


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these and wait. Once may not do: with Python 3.11 `asyncio.wait_for`, which libraries use as well, loses a
    cancellation that comes as what it waits for is done."""
    whole = tuple(tasks)
    left: set[asyncio.Task[Any]] = {task for task in whole if not task.done()}
    for _ in range(MOST_TIMES):
        if not left:
            break
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
    if left:
        log.error("Left behind, since they do not end: %s", ", ".join(sorted(task.get_name() for task in left)))
    await asyncio.gather(*(task for task in whole if task.done()), return_exceptions=True)
