"""The pass as a Celery task: asked for by the schedule and by pokes, run under the lease of whoever leads."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.db import DatabaseError

from llmgw.core import lease
from llmgw.core.store_clock import STORE_CLOCK
from nodes import passes, tidying
from nodes.poke import RECONCILE

log = logging.getLogger(__name__)

MOST_PASSES = 20
"""Passes that follow each other in one task while each of them acts; the schedule goes on from there."""


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
    try:
        for _ in range(MOST_PASSES):
            held = lease.current(lease.LEADER)
            if held is None or not passes.run_pass(held.at, held=held):
                return
    except DatabaseError as error:
        log.error("A pass failed, as the store cannot be used (%s); the next one runs within %g s", error, period_s)
    except Exception:
        log.exception("A pass failed; the next one runs within %g s", period_s)


@shared_task(name="nodes.tasks.tidy", ignore_result=True)
def tidy() -> None:
    """Drop old events and answered commands."""
    nodes = settings.LLMGW.nodes
    try:
        gone = tidying.tidy(STORE_CLOCK.now(), keep_events=timedelta(days=nodes.keep_events_days))
        if gone:
            log.info("%d old rows of events, commands and loads were dropped", gone)
    except DatabaseError as error:
        log.error("Old rows were not dropped, as the store cannot be used (%s); the next try is within the hour", error)
    except Exception:
        log.exception("Old rows were not dropped; the next try is within the hour")
