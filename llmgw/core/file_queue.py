"""Celery's queue as files, for control planes without Redis: a job is in it whole or not at all.

kombu's own leaves an empty file behind where the disk takes no more, and each of those ends the worker that reads it.
"""

# mypy: disable-error-code="no-untyped-call, override, misc"

from __future__ import annotations

import logging
import os
from pathlib import Path
from queue import Empty
from time import monotonic_ns
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError
from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps, loads

log = logging.getLogger(__name__)

SCHEME = "wholefiles"
TRANSPORT_ALIASES[SCHEME] = f"{__name__}:Transport"


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: object, **_: object) -> None:
        name = f"{monotonic_ns()}_{uuid4()}.{queue}.msg"
        target = Path(self.data_folder_out) / name
        scratch = target.with_name(f".{name}.writing")
        try:
            scratch.write_text(dumps(payload), encoding="utf-8")
            scratch.replace(target)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise ChannelError(f"{target.parent} takes no file: {error.strerror}") from error

    def _get(self, queue: str) -> Any:
        folder = Path(self.data_folder_in)
        for name in sorted(os.listdir(folder)):
            if name.partition(".")[2] != f"{queue}.msg":
                continue
            taken = folder / f".{name}.taken"
            try:
                (folder / name).rename(taken)
                text = taken.read_bytes()
                taken.unlink()
            except OSError:  # another worker was faster
                continue
            try:
                return loads(text)
            except ValueError:
                log.warning("A job in %s was not stored whole and is passed over; the schedule repeats it", folder)
        raise Empty

    def get_table(self, exchange: str) -> Any:
        try:
            return super().get_table(exchange)
        except ValueError:
            return []

    def _queue_bind(self, exchange: str, *binding: Any) -> None:
        try:
            super()._queue_bind(exchange, *binding)
        except ValueError:  # a full disk had cut the table, which is made anew
            self._exchange_file(exchange).unlink(missing_ok=True)
            super()._queue_bind(exchange, *binding)


class Transport(filesystem.Transport):
    Channel = Channel
