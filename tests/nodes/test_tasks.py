"""Passes as jobs: however many are asked for at once, few are run, and each that is asked for is answered by one."""

from __future__ import annotations

import threading

import pytest

from nodes import tasks
from tests.services import wait_until


def test_a_storm_of_pokes_costs_one_pass_more_than_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a whole fleet registers: what comes later is seen by the one that waits."""
    began: list[int] = []
    go_on = threading.Event()

    def run() -> None:
        began.append(1)
        go_on.wait(60)

    monkeypatch.setattr(tasks, "_run_passes", run)
    first = threading.Thread(target=tasks.reconcile)
    first.start()
    wait_until("the first pass runs", lambda: began, 60)
    waiting = threading.Thread(target=tasks.reconcile)
    waiting.start()
    wait_until("another one waits", tasks._waiting.locked, 60)
    for _ in range(1000):
        tasks.reconcile()  # returns at once
    assert len(began) == 1
    go_on.set()
    for thread in (first, waiting):
        thread.join(60)
    assert len(began) == 2
    tasks.reconcile()
    assert len(began) == 3


def test_a_pass_that_broke_leaves_the_turn_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(tasks, "_run_passes", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            tasks.reconcile()
    assert not tasks._running.locked()
    assert not tasks._waiting.locked()
