"""How a request's coroutine runs without a task: its waits, its end, and its cancellation in every state."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from routing.run import Run, Signal

Said = list[str]


def start(coroutine: Coroutine[Any, Any, None], said: Said) -> Run:
    """A run that says `end` when it is over."""
    run = Run(coroutine, lambda _: said.append("end"))
    run.start()
    return run


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def waits(signal: Any, said: Said) -> None:
    said.append("waits")
    try:
        await signal
    except asyncio.CancelledError:
        said.append("cancelled")
        raise
    said.append("goes on")


# --- waits -----------------------------------------------------------------------------------------------------------
async def test_it_runs_at_once_and_goes_on_within_the_very_call_that_it_waited_for() -> None:
    said: Said = []
    signal = Signal()
    run = start(waits(signal, said), said)
    assert said == ["waits"]
    assert not run.ended
    signal.set()
    assert said == ["waits", "goes on", "end"]
    assert run.ended


async def test_a_signal_without_a_waiter_is_lost_and_one_that_was_set_can_be_waited_for_again() -> None:
    said: Said = []
    signal = Signal()
    signal.set()

    async def twice() -> None:
        await waits(signal, said)
        await waits(signal, said)

    start(twice(), said)
    assert said == ["waits"]
    signal.set()
    assert said == ["waits", "goes on", "waits"]
    signal.set()
    signal.set()
    assert said == ["waits", "goes on", "waits", "goes on", "end"]


async def test_what_asyncio_awaits_can_be_awaited_too() -> None:
    said: Said = []

    async def several() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert await asyncio.create_task(asyncio.sleep(0, "of a task")) == "of a task"
        assert await asyncio.to_thread(lambda: "of a thread") == "of a thread"
        assert sum(await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))) == 3
        event = asyncio.Event()
        asyncio.get_running_loop().call_soon(event.set)
        await event.wait()
        said.append("all")

    ended = asyncio.Event()
    Run(several(), lambda _: ended.set()).start()
    async with asyncio.timeout(20):
        await ended.wait()
    assert said == ["all"]


async def test_a_failed_future_raises_where_it_is_awaited() -> None:
    said: Said = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def catches() -> None:
        with pytest.raises(KeyError, match="lost"):
            await future
        said.append("caught")

    start(catches(), said)
    future.set_exception(KeyError("lost"))
    await rounds()
    assert said == ["caught", "end"]


async def test_a_run_may_wake_another_which_may_wake_the_first() -> None:
    said: Said = []
    ping, pong = Signal(), Signal()

    async def first() -> None:
        await ping
        said.append("ping")
        pong.set()
        said.append("first goes on")
        await ping
        said.append("ping again")

    async def second() -> None:
        await pong
        said.append("pong")
        ping.set()  # nobody waits for it now: the first one is busy waking this one
        said.append("second goes on")

    start(second(), said)
    start(first(), said)
    ping.set()
    assert said == ["ping", "pong", "second goes on", "end", "first goes on"]
    ping.set()
    assert said[-2:] == ["ping again", "end"]


async def test_a_run_starts_another_within_itself() -> None:
    said: Said = []
    inner_waits, outer_waits = Signal(), Signal()

    async def outer() -> None:
        start(waits(inner_waits, said), said)
        await outer_waits
        said.append("outer")

    start(outer(), said)
    outer_waits.set()
    inner_waits.set()
    assert said == ["waits", "outer", "end", "goes on", "end"]


async def test_a_task_waits_for_a_signal_as_well() -> None:
    said: Said = []
    signal = Signal()
    task = asyncio.create_task(waits(signal, said))
    await rounds()
    signal.set()
    signal.set()
    assert said == ["waits"]
    await task
    assert said == ["waits", "goes on"]
    signal.set()
    cancelled = asyncio.create_task(waits(signal, said))
    await rounds()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    signal.set()
    assert said == ["waits", "goes on", "waits", "cancelled"]


async def test_a_task_that_a_run_starts_waits_as_a_task() -> None:
    said: Said = []
    signal = Signal()

    async def outer() -> None:
        task = asyncio.create_task(waits(signal, said))
        await asyncio.sleep(0)
        await task

    start(outer(), said)
    await rounds()
    signal.set()
    await rounds()
    assert said == ["waits", "goes on", "end"]


# --- cancellation ----------------------------------------------------------------------------------------------------
async def test_cancelled_while_it_waits_for_a_signal_it_is_told_so_once_and_soon() -> None:
    said: Said = []
    signal = Signal()
    run = start(waits(signal, said), said)
    assert run.cancel()
    assert said == ["waits"]
    signal.set()  # too late to be heard
    await rounds()
    assert said == ["waits", "cancelled", "end"]
    assert not run.cancel()
    await rounds()
    assert said == ["waits", "cancelled", "end"]


async def test_cancelled_while_it_waits_for_a_future_the_future_is_cancelled_too() -> None:
    said: Said = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    run = start(waits(future, said), said)
    assert run.cancel()
    await rounds()
    assert future.cancelled()
    assert said == ["waits", "cancelled", "end"]


async def test_cancelled_while_it_waits_for_a_task_the_task_is_cancelled_too() -> None:
    said: Said = []
    inner: Said = []
    task = asyncio.create_task(waits(asyncio.sleep(60), inner))
    run = start(waits(task, said), said)
    await rounds()
    run.cancel()
    await rounds()
    assert (inner, said) == (["waits", "cancelled"], ["waits", "cancelled", "end"])


@pytest.mark.parametrize("awaited", ["a future that is done", "a bare yield"])
async def test_cancelled_while_it_is_about_to_go_on_it_is_cancelled_all_the_same(awaited: str) -> None:
    said: Said = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    run = start(waits(future if awaited == "a future that is done" else asyncio.sleep(0), said), said)
    if not future.done():
        future.set_result(None)
    assert run.cancel()
    await rounds()
    assert said == ["waits", "cancelled", "end"]


async def test_cancelled_before_it_started_it_never_starts() -> None:
    said: Said = []
    run = Run(waits(Signal(), said), lambda _: said.append("end"))
    assert run.cancel()
    run.start()
    assert said == ["end"]


@pytest.mark.parametrize("what", ["signal", "future", "nothing"])
async def test_cancelled_from_within_it_ends_at_its_next_wait(what: str) -> None:
    said: Said = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    awaited = {"signal": Signal(), "future": future, "nothing": None}[what]

    async def cancels() -> None:
        run.cancel()
        said.append("until its next wait")
        if awaited is not None:
            await waits(awaited, said)

    run = Run(cancels(), lambda _: said.append("end"))
    run.start()
    await rounds()
    told = ["waits", "cancelled"] if awaited is not None else []
    assert said == ["until its next wait", *told, "end"]


async def test_one_that_catches_its_cancellation_goes_on_and_can_be_cancelled_again() -> None:
    said: Said = []
    signal = Signal()

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await signal
            except asyncio.CancelledError:
                said.append("no")
        await signal
        said.append("done")

    run = start(stubborn(), said)
    for _ in range(2):
        run.cancel()
        await rounds()
    assert said == ["no", "no"]
    signal.set()
    assert said == ["no", "no", "done", "end"]


async def test_cancelled_twice_before_it_hears_of_it_it_is_cancelled_once() -> None:
    said: Said = []
    signal, cleaned = Signal(), Signal()

    async def cleans_up() -> None:
        try:
            await waits(signal, said)
        finally:
            await waits(cleaned, said)

    run = start(cleans_up(), said)
    run.cancel()
    run.cancel()
    await rounds()
    cleaned.set()
    assert said == ["waits", "cancelled", "waits", "goes on", "end"]


async def test_cleaning_up_after_a_cancellation_may_wait() -> None:
    said: Said = []
    signal, cleaned = Signal(), Signal()

    async def cleans_up() -> None:
        try:
            await signal
        finally:
            await cleaned
            said.append("cleaned")

    run = start(cleans_up(), said)
    run.cancel()
    await rounds()
    assert said == []
    cleaned.set()
    assert said == ["cleaned", "end"]


# --- failures --------------------------------------------------------------------------------------------------------
async def test_what_leaves_the_coroutine_reaches_the_loops_handler_and_nobody_else() -> None:
    said: Said = []
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    signal = Signal()

    async def fails() -> None:
        await signal
        raise KeyError("broken")

    start(fails(), said)
    signal.set()
    assert said == ["end"]
    assert isinstance(failures[0]["exception"], KeyError)


async def test_an_order_to_end_the_process_passes_through() -> None:
    said: Said = []
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    async def ends() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        start(ends(), said)
    assert (said, len(failures)) == (["end"], 1)
    signal = Signal()
    start(waits(signal, said), said)  # and the next one runs as ever
    signal.set()
    assert said[-2:] == ["goes on", "end"]


async def test_what_was_awaited_within_a_run_does_not_change_who_runs() -> None:
    """After a failure inside, a task's wait for a signal is still a task's."""
    said: Said = []
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    async def fails() -> None:
        raise KeyError

    start(fails(), said)
    signal = Signal()
    task = asyncio.create_task(waits(signal, said))
    await rounds()
    signal.set()
    await task
    assert said == ["end", "waits", "goes on"]
