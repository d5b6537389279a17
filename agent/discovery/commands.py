"""Runs a short command that may hang, never end, or never stop printing. Blocking: for a prober's thread only."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from time import monotonic

from agent.discovery.prober import ProbeError

MAX_BYTES = 8 * 1024 * 1024
SILENT_S = 0.5
"""How long output is still read once the command has ended: a child of its may hold the pipe open for ever."""
POLL_S = 0.02
REAP_S = 1.0


class CommandError(ProbeError):
    """`str()` says which command, and what it did."""


class Runner:
    """Remembers what could not be ended: while it is there, nothing is started besides."""

    def __init__(self, *, limit_s: float = 30.0, max_bytes: int = MAX_BYTES) -> None:
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._left: subprocess.Popen[bytes] | None = None

    def run(self, argv: Sequence[str]) -> str:
        """What it prints. Raises CommandError; FileNotFoundError when there is no such program."""
        shown = os.path.basename(argv[0])
        if self._left is not None:
            if self._left.poll() is None:
                raise CommandError(f"{shown} of before cannot be ended (process {self._left.pid}); restart the machine")
            self._left = None
        command = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        try:
            output = self._read(command, shown)
            code = _status(command.pid)
        finally:
            self._end(command)
        if code:
            said = output.decode(errors="replace").strip()[:200]
            raise CommandError(f"{shown} failed with status {code}" + (f": {said}" if said else ""))
        return output.decode(errors="replace")

    def _read(self, command: subprocess.Popen[bytes], shown: str) -> bytes:
        assert command.stdout
        deadline = monotonic() + self._limit_s
        output = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(command.stdout, selectors.EVENT_READ)
            while True:
                left = deadline - monotonic()
                if left <= 0:
                    raise CommandError(f"{shown} has not answered in {self._limit_s:g} s")
                if not selector.select(min(left, SILENT_S)):
                    if _ended(command.pid):
                        return bytes(output)
                    continue
                read = os.read(command.stdout.fileno(), 65536)
                if not read:
                    selector.unregister(command.stdout)
                    while not _ended(command.pid) and monotonic() < deadline:
                        selector.select(POLL_S)
                    return bytes(output)
                output += read
                if len(output) > self._max_bytes:
                    raise CommandError(f"{shown} printed more than {self._max_bytes // 2**20} MiB")

    def _end(self, command: subprocess.Popen[bytes]) -> None:
        """It and its children, if anything is left. What sits in the kernel for good is left there and remembered."""
        # Not yet reaped, so its number cannot be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(command.pid, signal.SIGKILL)
        assert command.stdout
        command.stdout.close()
        try:
            command.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self._left = command


def _ended(pid: int) -> bool:
    """Without collecting it."""
    return _status(pid) is not None


def _status(pid: int) -> int | None:
    """Its exit status, or the signal that ended it; None while it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended.si_status if ended else None
