"""Finished requests on local disk before their answers end, from where they move to the store (GW-51).

A segment is one file of JSON lines, locked (flock) by the process that writes it and named so only once it is locked.
Whoever gets the lock of a segment whose process died replays it. A request's id is unique in the store, so a record
that was written twice counts once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from routing.now import monotonic
from routing.shapes import Record

log = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 8 * 1024 * 1024
KEPT_SEGMENTS: Final = 2
MEMORY_RECORDS: Final = 20_000
"""How many records are kept in memory while the disk takes none."""
SAY_AGAIN_S: Final = 60.0
SUFFIX: Final = ".jsonl"


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Record).decode


class Journal:
    """The segments of one process. Only the event loop's thread appends and rotates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._count = 0
        self._handle: int | None = None
        self._path: Path | None = None
        self._size = 0
        self._fresh: list[Record] = []
        """What the open segment holds, so that it need not be read again."""
        self._closed: list[tuple[int, Path, list[Record]]] = []
        self._memory: list[Record] = []
        self._say_again_at = 0.0
        self.lost = 0
        """Records that neither disk nor memory could take."""

    def append(self, record: Record) -> None:
        """Write one record. A full disk is said once, and the record stays in memory for the next flush."""
        line = _encode(record) + b"\n"
        try:
            if self._handle is None or self._size > SEGMENT_BYTES:
                self._rotate()
                self._open()
            assert self._handle is not None
            written = os.write(self._handle, line)
            if written == len(line):
                self._size += written
                self._fresh.append(record)
                return
            self._cut()
            raise OSError("the disk took only part of a record")
        except OSError as error:
            self._remember(record, error)

    def _cut(self) -> None:
        """Take half a line away again: it would spoil the next one."""
        assert self._handle is not None
        try:
            os.ftruncate(self._handle, self._size)
        except OSError:
            self._rotate()

    def _remember(self, record: Record, error: OSError) -> None:
        now = monotonic()
        if not self._memory and not self.lost and now >= self._say_again_at:
            self._say_again_at = now + SAY_AGAIN_S  # the store may empty the memory each second
            log.error(
                "Usage cannot be written to %s (%s). It is kept in memory for now; free space on that disk.",
                self.folder,
                error.strerror or error,
            )
        if len(self._memory) < MEMORY_RECORDS:
            self._memory.append(record)
        else:
            self.lost += 1

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._count += 1
        path = self.folder / f"{self._mark}-{self._count:08d}{SUFFIX}"
        scratch = path.with_suffix(".new")
        handle = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            scratch.rename(path)
        except OSError:  # as each record's would, until no file can be opened any more
            os.close(handle)
            scratch.unlink(missing_ok=True)
            raise
        self._handle, self._path, self._size = handle, path, 0

    def _rotate(self) -> None:
        if self._handle is not None and self._path is not None:
            # Of segments that the store does not take only a bounded part stays in memory; the rest is read again.
            kept = self._fresh if len(self._closed) < KEPT_SEGMENTS else []
            self._closed.append((self._handle, self._path, kept))
            self._handle = self._path = None
            self._size, self._fresh = 0, []

    @property
    def in_memory(self) -> int:
        return len(self._memory)

    def pending_bytes(self) -> int:
        """What waits on disk for the store, of all processes."""
        return sum(size for size in map(_size, self._paths()) if size is not None)

    # --- towards the store -------------------------------------------------------------------------------------------
    def batches(self) -> list[Batch]:
        """Everything this process has to hand over now, oldest first. `done` each once the store has it."""
        if self._size:
            self._rotate()
        batches: list[Batch] = [Segment(self, *closed) for closed in self._closed]
        if self._memory:
            batches.append(Memory(self, tuple(self._memory)))
        return batches

    def orphans(self) -> Iterator[Batch]:
        """Segments of processes that died, each locked by us when it is yielded."""
        own = {path for _, path, _ in self._closed} | ({self._path} if self._path else set())
        for path in self._paths():
            if path in own:
                continue
            try:
                handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                still_there = path.exists()
            except OSError:
                still_there = False
            if still_there:
                yield Segment(None, handle, path, [])
            else:
                os.close(handle)

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == SUFFIX)
        except OSError:
            return []

    def close(self) -> None:
        """Give up the locks; what is left in the files is replayed by whoever comes next."""
        self._rotate()
        for handle, path, _ in self._closed:
            if os.fstat(handle).st_size == 0:
                path.unlink(missing_ok=True)
            os.close(handle)
        self._closed.clear()

    def _forget(self, handle: int) -> None:
        self._closed = [each for each in self._closed if each[0] != handle]

    def _written(self, records: tuple[Record, ...]) -> None:
        del self._memory[: len(records)]


class Batch(Protocol):
    """Records on their way to the store."""

    def records(self) -> list[Record]: ...

    def done(self) -> None:
        """The store has committed them."""

    def give_up(self) -> None:
        """The store did not take them: leave them for another time."""


class Segment:
    def __init__(self, owner: Journal | None, handle: int, path: Path, kept: list[Record]) -> None:
        """`kept`: what was written to it, where that is at hand."""
        self.owner, self.handle, self.path, self.kept = owner, handle, path, kept

    def records(self) -> list[Record]:
        if self.kept:
            return list(self.kept)
        size = os.fstat(self.handle).st_size
        lines = os.pread(self.handle, size, 0).split(b"\n")
        torn = lines.pop()  # empty unless the process died while it wrote
        records, bad = [], 0
        for line in lines:
            try:
                records.append(_decode(line))
            except msgspec.DecodeError:
                bad += 1
        if bad:
            log.error("%d lines of the journal %s cannot be read and are skipped", bad, self.path.name)
        if torn:
            log.info("The journal %s ends inside a line: its process died there", self.path.name)
        return records

    def done(self) -> None:
        self.path.unlink(missing_ok=True)
        if self.owner is not None:
            self.owner._forget(self.handle)
        os.close(self.handle)

    def give_up(self) -> None:
        if self.owner is None:
            os.close(self.handle)


class Memory:
    def __init__(self, owner: Journal, kept: tuple[Record, ...]) -> None:
        self.owner, self.kept = owner, kept

    def records(self) -> list[Record]:
        return list(self.kept)

    def done(self) -> None:
        self.owner._written(self.kept)

    def give_up(self) -> None:
        """They stay where they are."""


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
