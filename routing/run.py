"""How a request's coroutine runs: at once, and on again within the very callback that it waited for.

A task of asyncio would wait for the event loop's next round at its start and after each wait, behind all others of that
round (docs/adr/0006-runs-instead-of-tasks.md). Everything else of asyncio can be awaited too, but for what asks for the
current task: `asyncio.timeout` and its like need a task of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final


class _Now:
    """What is being run; an attribute of one object, which compiled code reaches faster than a global."""

    __slots__ = ("run",)

    def __init__(self) -> None:
        self.run: Run | None = None


_now: Final = _Now()
_OVER: Final[Any] = object()
_next: Final = next
"""A name of `builtins` that the compiler does not know is looked up there each time."""


class Signal:
    """What one coroutine waits for at a time. `set` without a waiter is lost: look at the state before you wait."""

    __slots__ = ("_future", "_run")

    def __init__(self) -> None:
        self._run: Run | None = None
        self._future: asyncio.Future[None] | None = None

    def __await__(self) -> Generator[Any, None, None]:
        if _now.run is not None:
            yield self
            return
        self._future = asyncio.get_running_loop().create_future()
        try:
            yield from self._future
        finally:
            self._future = None

    def set(self) -> None:
        run = self._run
        if run is not None:
            self._run = None
            run._step(None)
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)


class Run:
    """One coroutine on its way. `on_end` is called once, when it is over; an exception that leaves the coroutine
    reaches the event loop's handler. The loop is asked for where it is needed: with Python 3.11 that is a system call.
    """

    __slots__ = ("_cancelling", "_steps", "_waits", "on_end")

    def __init__(self, coroutine: Coroutine[Any, Any, None], on_end: Callable[[Run], None]) -> None:
        self._steps: Generator[Any, Any, None] | None = coroutine.__await__()
        self._waits: Signal | asyncio.Future[Any] | None = None
        self._cancelling = False
        self.on_end = on_end

    def start(self) -> None:
        self._step(None)

    @property
    def ended(self) -> bool:
        return self._steps is None

    def cancel(self, msg: object = None) -> bool:
        """As a task's: CancelledError is raised where it waits, soon. False when it is over."""
        if self._steps is None:
            return False
        waits = self._waits
        if isinstance(waits, Signal):
            waits._run = self._waits = None
            asyncio.get_running_loop().call_soon(self._step, asyncio.CancelledError())
        elif waits is None or not waits.cancel():
            self._cancelling = True
        return True

    def _step(self, error: BaseException | None) -> None:
        steps = self._steps
        if steps is None:
            return
        self._waits = None
        outer, _now.run = _now.run, self
        try:
            if self._cancelling:
                self._cancelling = False
                error = asyncio.CancelledError()
            # An end that is no exception costs less, and each request has one.
            waits = _next(steps, _OVER) if error is None else steps.throw(error)
        except (StopIteration, asyncio.CancelledError):
            self._over()
        except BaseException as failure:
            self._over()
            loop = asyncio.get_running_loop()
            loop.call_exception_handler({"message": "a request's coroutine failed", "exception": failure})
            if not isinstance(failure, Exception):
                raise
        else:
            if waits is _OVER:
                self._over()
                return
            if self._steps is None:
                return  # it ended within: only possible when a callback of its own closed it
            self._waits = waits
            if type(waits) is Signal:
                waits._run = self
            elif waits is None:  # a bare yield: asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(self._step, None)
            else:
                waits._asyncio_future_blocking = False
                waits.add_done_callback(self._future_done)
            if self._cancelling:  # from within, before it waited
                self._cancelling = False
                self.cancel()
        finally:
            _now.run = outer

    def _future_done(self, future: asyncio.Future[Any]) -> None:
        self._step(None)

    def _over(self) -> None:
        self._steps = None
        self.on_end(self)
