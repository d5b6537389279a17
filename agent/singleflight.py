"""Many ask for one thing at once, and it is made once (CAT-30). Nobody left waiting ends the making."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    def __init__(self) -> None:
        self._flights: dict[Hashable, tuple[asyncio.Task[T], list[int]]] = {}

    async def get(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The result of the flight of `key`, started with `make` when there is none."""
        flight = self._flights.get(key)
        if flight is None:
            flight = (asyncio.ensure_future(self._fly(key, make)), [0])
            self._flights[key] = flight
        task, waiting = flight
        waiting[0] += 1
        try:
            return await asyncio.shield(task)
        finally:
            waiting[0] -= 1
            if not waiting[0] and not task.done():
                self._land(key, task)
                task.cancel()

    async def _fly(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        try:
            return await make()
        finally:
            self._land(key, asyncio.current_task())

    def _land(self, key: Hashable, task: asyncio.Task[T] | None) -> None:
        # A new flight of the same key may have begun since this one was cancelled.
        if key in self._flights and self._flights[key][0] is task:
            del self._flights[key]
