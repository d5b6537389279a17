"""What a Celery worker says of its queue: once that it is away and once that it is back, instead of at each try."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

from celery import Celery, bootsteps
from celery.exceptions import CPendingDeprecationWarning
from celery.platforms import SecurityWarning
from celery.signals import setup_logging, worker_ready
from celery.worker.consumer.connection import Connection
from celery.worker.consumer.consumer import CONNECTION_ERROR, CONNECTION_RETRY

from llmgw.core.outages import Outage

log = logging.getLogger(__name__)
_queue = Outage(
    log,
    "The queue does not answer (%s); jobs wait there, and it is tried again",
    "The queue answers again; jobs are taken",
)


def run(app: Celery, queue: str) -> None:
    """Until told to stop. `queue`: where jobs wait, as the log may tell it."""
    # Jobs are our own JSON messages, never pickles, so running as root adds nothing that root did not have.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    setup_logging.connect(lambda **_: None, weak=False)  # by itself Celery would silence all below its own level
    worker_ready.connect(partial(_ready, queue), weak=False)
    logging.getLogger("celery.worker.consumer.consumer").addFilter(_said_otherwise)
    app.steps["consumer"].add(_Connected)
    # Threads: the jobs wait on the store and on nodes, and one process is easier to see than a pool of them.
    pool = ["--pool", "threads", "--concurrency", "4"]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "WARNING"]
    app.worker_main(["--quiet", "worker", *pool, *quiet])


def _ready(queue: str, **_: Any) -> None:
    # Celery has turned these on meanwhile: at each loss of its queue it would tell of a default to come.
    warnings.filterwarnings("ignore", category=CPendingDeprecationWarning)
    log.info("Takes jobs from %s", queue)


def _said_otherwise(record: logging.LogRecord) -> bool:
    """Whether Celery may say this itself."""
    match record.args:
        case (_, Exception() as error, _) if record.msg == CONNECTION_ERROR:
            _queue.fails(error)
        case (text, Exception() as error) if text == CONNECTION_RETRY:
            _queue.fails(error)
        case _:
            return True
    return False


class _Connected(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts whenever there is a connection to the queue."""

    requires = (Connection,)

    def start(self, parent: Any) -> None:
        _queue.works()
