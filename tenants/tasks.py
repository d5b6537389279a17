"""What the schedule does to the rows of tenants."""

from __future__ import annotations

import logging
from datetime import timedelta

from celery import shared_task
from django.conf import settings

from llmgw.core.clock import SystemClock
from llmgw.core.outages import Job
from tenants import tidying

log = logging.getLogger(__name__)

_tidying = Job(log, "Old usage was not dropped", "Old usage is dropped again")


@shared_task(name="tenants.tasks.tidy_usage", ignore_result=True)
def tidy_usage() -> None:
    """Drop usage, and what explains it, that is older than the settings say."""
    kept = settings.LLMGW.usage
    with _tidying.guarded("the next try is in 10 min"):
        gone = tidying.tidy(
            SystemClock().now(),
            keep_rows=timedelta(days=kept.keep_days),
            keep_explained=timedelta(days=kept.keep_explained_days),
        )
        if gone.rows or gone.explanations:
            log.info("%d old records of usage and %d explanations were dropped", gone.rows, gone.explanations)
