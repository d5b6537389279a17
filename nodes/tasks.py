"""The pass as a Celery task: asked for by the schedule and by pokes, run under the lease of whoever leads."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from celery import shared_task
from django.conf import settings

from llmgw.core import lease
from llmgw.core.outages import Job
from llmgw.core.store_clock import STORE_CLOCK
from nodes import passes, tidying
from nodes.poke import RECONCILE

log = logging.getLogger(__name__)

MOST_PASSES = 20
"""Passes that follow each other in one task while each of them acts; the schedule goes on from there."""

_passes = Job(log, "A pass failed", "Passes succeed again")
_tidying = Job(log, "Old rows were not dropped", "Old rows are dropped again")
_running, _waiting = threading.Lock(), threading.Lock()


@shared_task(name=RECONCILE, ignore_result=True)
def reconcile() -> None:
    """Bring the fleet nearer to the catalog until nothing is left to do now.

    One at a time in a process. Of those that are asked for meanwhile one waits, and sees all that they would have.
    """
    if not _waiting.acquire(blocking=False):
        return
    try:
        _running.acquire()
    finally:
        _waiting.release()
    try:
        _run_passes()
    finally:
        _running.release()


def _run_passes() -> None:
    period_s = settings.LLMGW.nodes.reconcile_s
    with _passes.guarded(f"the next one runs within {period_s:g} s"):
        for _ in range(MOST_PASSES):
            held = lease.current(lease.LEADER)
            if held is None or not passes.run_pass(held.at, held=held):
                return


@shared_task(name="nodes.tasks.tidy", ignore_result=True)
def tidy() -> None:
    """Drop old events and answered commands."""
    nodes = settings.LLMGW.nodes
    with _tidying.guarded("the next try is within the hour"):
        gone = tidying.tidy(STORE_CLOCK.now(), keep_events=timedelta(days=nodes.keep_events_days))
        if gone:
            log.info("%d old rows of events, commands and loads were dropped", gone)
