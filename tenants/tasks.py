"""What the schedule does to the rows of tenants."""

from __future__ import annotations

import logging
from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.db import DatabaseError

from llmgw.core.clock import SystemClock
from tenants import tidying

log = logging.getLogger(__name__)


@shared_task(name="tenants.tasks.tidy_usage", ignore_result=True)
def tidy_usage() -> None:
    """Drop usage, and what explains it, that is older than the settings say."""
    kept = settings.LLMGW.usage
    try:
        gone = tidying.tidy(
            SystemClock().now(),
            keep_rows=timedelta(days=kept.keep_days),
            keep_explained=timedelta(days=kept.keep_explained_days),
        )
        if gone.rows or gone.explanations:
            log.info("%d old records of usage and %d explanations were dropped", gone.rows, gone.explanations)
    except DatabaseError as error:
        log.error("Old usage was not dropped, as the store cannot be used (%s); the next try is in 10 min", error)
    except Exception:
        log.exception("Old usage was not dropped; the next try is in 10 min")
