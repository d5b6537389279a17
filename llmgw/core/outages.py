"""What is away for a while is said once when that begins and once when it is over, however often it is tried."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import Error as StoreError


class Outage:
    """Of one thing, as this process sees it. Threads may share it."""

    def __init__(self, log: logging.Logger, begun: str, over: str) -> None:
        """`begun` and `over` are the lines, for the arguments of `fails` and `works`."""
        self.log, self.begun, self.over = log, begun, over
        self._kind: object = None
        self._lock = threading.Lock()

    def _turned(self, kind: object) -> bool:
        with self._lock:
            before, self._kind = self._kind, kind
        return before != kind

    def fails(self, *what: object) -> None:
        if self.begins():
            self.log.warning(self.begun, *what)

    def works(self, *what: object) -> None:
        if self._turned(None):
            self.log.info(self.over, *what)

    def begins(self, kind: object = "away") -> bool:
        """Whether it is news that it fails, or fails in this way. For those who say so themselves."""
        return self._turned(kind)


class Job:
    """What the schedule runs again and again. `failed` and `over` begin and make the lines that tell of failures."""

    def __init__(self, log: logging.Logger, failed: str, over: str) -> None:
        self.log, self.failed = log, failed
        self.outage = Outage(log, failed, over)

    @contextmanager
    def guarded(self, again: str) -> Iterator[None]:
        """Around each run: what goes wrong ends that one alone. `again`: when the next one is."""
        try:
            yield
        except StoreError as error:
            if self.outage.begins(StoreError):
                self.log.error("%s, as the store cannot be used (%s); %s", self.failed, error, again)
        except Exception as error:
            if self.outage.begins(type(error)):
                self.log.exception("%s; %s", self.failed, again)
        else:
            self.outage.works()
