"""The schedule, run by the one control plane that holds the lead (ND-40, ND-50).

Any number of them tick; those without the lead only ask for it. What the leader enqueues any worker may run: a pass
goes by the lease as it stands then, and writes nothing once that has changed.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from celery import Celery, schedules
from celery.beat import ScheduleEntry, Scheduler, SchedulingError, Service
from celery.signals import worker_ready, worker_shutdown, worker_shutting_down
from django.conf import settings
from django.db import Error as StoreError
from django.db import close_old_connections, connections

from llmgw.core import lease
from llmgw.core.outages import Outage
from nodes import tasks, timeline
from nodes.poke import RECONCILE

log = logging.getLogger(__name__)

STOPS_WITHIN_S = 10.0


class LeadScheduler(Scheduler):
    """Ticks while this process leads. Whenever it begins to, every periodic job is due at once."""

    producer = None
    """Jobs go out over the app's pool, which waits for no broker."""

    def __init__(self, app: Celery, *args: Any, keeper: lease.Keeper | None = None, **kwargs: Any) -> None:
        self.keeper = keeper or lease.Keeper(lease.LEADER, ttl_s=settings.LLMGW.nodes.lease_ttl_s)
        self._fence = 0
        self._said = ""
        self._queue = Outage(log, "%s; passes are run here until the queue is back", "The queue takes jobs again")
        super().__init__(app, *args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do the next thing; how long to wait for the one after it, in seconds."""
        close_old_connections()
        held = self.keeper.look()
        self._tell(held)
        if held is None:
            return self.keeper.ask_s
        if held.fence != self._fence:
            self._begin(held)
        wait_s: float = super().tick(*args, **kwargs)
        return min(wait_s, self.keeper.ask_s)

    def _begin(self, held: lease.Held) -> None:
        self._fence = held.fence
        for entry in self.schedule.values():
            if isinstance(entry.schedule, schedules.schedule):
                entry.last_run_at -= timedelta(seconds=entry.schedule.run_every.total_seconds())
        self._heap = None
        host, pid, _ = held.holder.rsplit(":", 2)
        with suppress(StoreError):  # the next look says what is wrong
            timeline.note("lead", f"the control plane on {host} (process {pid}) leads now", at=held.at)

    def _tell(self, held: lease.Held | None) -> None:
        """Say who does the work, when that changes."""
        if self.keeper.fault:
            told = f"The lead cannot be asked for, as the store cannot be used ({self.keeper.fault})"
        elif held:
            told = "This control plane leads: it runs the schedule"
        else:
            told = "Another control plane leads; this one stands by"
        if told != self._said:
            log.log(logging.ERROR if self.keeper.fault else logging.INFO, "%s", told)
            self._said = told

    def apply_async(self, entry: ScheduleEntry, **kwargs: Any) -> Any:
        """Enqueue a job. A queue that takes none must not stop passes: the leader runs them itself then."""
        try:
            enqueued = super().apply_async(entry, **kwargs)
        except SchedulingError as error:
            if entry.task != RECONCILE:
                raise
            self._queue.fails(error)
            return tasks.reconcile()
        self._queue.works()
        return enqueued

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            log.error("%s; it is due again in its time", error)

    def close(self) -> None:
        """A clean stop lets the next control plane lead at once."""
        super().close()
        try:
            if self.keeper.give_back():
                log.info("The lead is handed over")
        except StoreError as error:
            log.warning("The lead was not handed over (%s); it ends in %g s", error, self.keeper.hold_s)


class Beat:
    """The schedule in a thread of its own, so that nothing else that the process does holds it up."""

    def __init__(self, app: Celery, make: Callable[..., LeadScheduler] = LeadScheduler) -> None:
        self.service = Service(app, scheduler_cls=make)
        self.thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def _run(self) -> None:
        try:
            self.service.start()
        finally:
            connections.close_all()

    def start(self) -> None:
        self.thread.start()

    def ask_to_stop(self, *_: object, **__: object) -> None:
        """Does not wait, so that signals may do it."""
        self.service.stop()

    def join(self, *_: object, **__: object) -> None:
        self.thread.join(STOPS_WITHIN_S)


def run(app: Celery) -> int:
    """`llmgw server run beat`: until told to stop."""
    app.finalize()
    app.loader.import_default_modules()
    beat = Beat(app)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, beat.ask_to_stop)
    beat.start()
    while beat.thread.is_alive():
        beat.thread.join(1.0)
    return 0


def beside_worker(app: Celery) -> None:
    """Run the schedule in the worker that this process becomes. It stops first, so that the lead is free at once."""
    beat = Beat(app)
    worker_ready.connect(lambda **_: beat.start(), weak=False)
    worker_shutting_down.connect(beat.ask_to_stop, weak=False)
    worker_shutdown.connect(beat.join, weak=False)
