"""Asks for a pass at once. A poke carries nothing and may be lost: passes also run on a period."""

from __future__ import annotations

import logging

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string
from kombu.exceptions import ChannelError, OperationalError

from llmgw.core.outages import Outage

log = logging.getLogger(__name__)

RECONCILE = "nodes.tasks.reconcile"
ASKED_FOR_S = 60.0
"""A worker that was away drops passes that were asked for longer ago. Celery compares the clocks of whoever asks and
whoever runs it: hosts whose clocks are further apart lose passes."""
APP = "llmgw.celery.app"
"""By name: every process may poke, and only few have reason to load Celery before they do."""

_outage = Outage(
    log, "The queue does not take a pass (%s); passes run every %g s meanwhile", "The queue takes passes again"
)


def poke() -> None:
    """Enqueue a pass when the transaction commits. A broker that is away costs at most one period."""
    transaction.on_commit(_enqueue)


def _enqueue() -> None:
    period_s = settings.LLMGW.nodes.reconcile_s
    try:
        import_string(APP).send_task(RECONCILE, expires=ASKED_FOR_S, ignore_result=True, retry=False)
        _outage.works()
    except (OperationalError, ChannelError, OSError) as error:
        _outage.fails(error, period_s)
