"""The pass as a Celery task: run by the schedule and by pokes, by whoever holds the lead."""

from __future__ import annotations

import logging
from datetime import timedelta

from celery import shared_task
from celery.signals import worker_shutdown
from django.conf import settings
from django.db import DatabaseError

from llmgw.core import lease
from llmgw.core.clock import SystemClock
from nodes import passes, tidying
from nodes.poke import RECONCILE

log = logging.getLogger(__name__)

MOST_PASSES = 20
"""Passes that follow each other in one task while each of them acts; the schedule goes on from there."""


@shared_task(name=RECONCILE, ignore_result=True)
def reconcile() -> None:
    """Bring the fleet nearer to the catalog until nothing is left to do now."""
    nodes = settings.LLMGW.nodes
    clock = SystemClock()
    try:
        for _ in range(MOST_PASSES):
            held = lease.acquire(lease.LEADER, ttl_s=nodes.lease_ttl_s)
            if held is None or not passes.run_pass(clock.now(), held=held):
                return
    except DatabaseError as error:
        log.error(
            "A pass failed, as the store cannot be used (%s); the next one runs within %g s", error, nodes.reconcile_s
        )
    except Exception:
        log.exception("A pass failed; the next one runs within %g s", nodes.reconcile_s)


@shared_task(name="nodes.tasks.tidy", ignore_result=True)
def tidy() -> None:
    """Drop old events and answered commands."""
    nodes = settings.LLMGW.nodes
    try:
        gone = tidying.tidy(SystemClock().now(), keep_events=timedelta(days=nodes.keep_events_days))
        if gone:
            log.info("%d old rows of events, commands and loads were dropped", gone)
    except DatabaseError as error:
        log.error("Old rows were not dropped, as the store cannot be used (%s); the next try is within the hour", error)
    except Exception:
        log.exception("Old rows were not dropped; the next try is within the hour")


@worker_shutdown.connect  # type: ignore[untyped-decorator]
def hand_over(**_: object) -> None:
    """A clean stop lets the next control plane lead at once."""
    try:
        lease.release(lease.LEADER)
    except DatabaseError as error:
        log.warning("The lead was not handed over (%s); it ends in %g s", error, settings.LLMGW.nodes.lease_ttl_s)
