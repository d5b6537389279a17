"""Tasks that are told to end do, also those that lose a cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from llmgw.core import ending


async def deaf(times: int) -> None:
    """Loses so many cancellations."""
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            times -= 1
            if times < 0:
                raise


async def broken() -> None:
    raise ValueError("on its way out")


async def test_tasks_are_over_when_they_have_been_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "AGAIN_S", 0.01)
    tasks = [asyncio.create_task(work) for work in (deaf(0), deaf(3), broken(), asyncio.sleep(0))]
    await asyncio.sleep(0.01)
    await ending.end(tasks)
    assert all(task.done() for task in tasks)
    assert [task.cancelled() for task in tasks] == [True, True, False, False]
    await ending.end(())


async def test_a_task_that_never_ends_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ending, "AGAIN_S", 0.001)
    task = asyncio.create_task(deaf(ending.MOST_TIMES), name="stubborn")
    await asyncio.sleep(0)
    await ending.end([task])
    assert "do not end: stubborn" in caplog.text
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
