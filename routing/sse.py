"""What the gateway does to a stream on its way: nothing, but for taking out the usage chunk that it asked for itself.

Bytes pass as they come. While the extra chunk is to be removed, the bytes of an event that has not ended yet wait for
its end, since half an event is of no use to anybody; beyond HOLD_BYTES it is no usage chunk and passes too. Pure.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

import msgspec

from routing.accounting import TAIL_BYTES
from routing.shapes import UsageChunk

HOLD_BYTES: Final = 16 * 1024
EVENT_LIMIT_BYTES: Final = 16 * 1024 * 1024
"""A stream whose event does not end within this is cut."""
HEAD_BYTES: Final = 4 * 1024
KEPT_BYTES: Final = 4 * 1024
"""How much of the end is kept for its usage, besides the last read."""

# A lone CR at the end of what was read may be the first half of CRLF, so it ends nothing yet.
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r(?=[^\n]))")
_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
_DATA: Final = re.compile(rb"^data:[ ]?(.*?)\r?$", re.MULTILINE)


_chunk: Final = msgspec.json.Decoder(UsageChunk)


class Stream:
    """Fed what the engine sends; `feed` returns what the client gets now.

    `done`: the stream said `[DONE]`. `cut`: an event grew past the limit, nothing more may be passed.
    `mid_event`: what was passed so far stops inside an event.
    """

    __slots__ = (
        "_held",
        "_last",
        "_open",
        "_passing",
        "_tail",
        "_tail_bytes",
        "cut",
        "done",
        "events",
        "head",
        "removing",
    )

    def __init__(self, *, removing: bool) -> None:
        self.removing = removing
        self.events = 0
        self.done = self.cut = False
        self.head = b""
        self._held = b""
        self._last = b""
        self._open = 0
        self._passing = not removing
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def feed(self, data: bytes) -> bytes:
        tail = self._tail
        tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(tail[0]) >= KEPT_BYTES:
            self._tail_bytes -= len(tail.popleft())
        if len(self.head) < HEAD_BYTES:
            self.head += data[: HEAD_BYTES - len(self.head)]
        self.events += data.count(b"data:")
        whole = not self._open and not self._held and data.endswith(b"\n\n")
        if whole and not (self.removing and b'"usage"' in data):
            self.done = self.done or data.endswith(b"[DONE]\n\n")
            return data
        if not self.removing:
            self._follow(data)
            return data
        return self._without_usage(data)

    def flush(self) -> bytes:
        """What was held back when the engine ended its stream inside an event."""
        held, self._held = self._held, b""
        self._open += len(held)
        return b"" if _is_usage(held) else held

    @property
    def mid_event(self) -> bool:
        return self._open > 0

    @property
    def holding(self) -> bool:
        """Whether the beginning of an event waits for its end."""
        return bool(self._held)

    @property
    def tail(self) -> bytes:
        return b"".join(self._tail)[-TAIL_BYTES:]

    def _follow(self, data: bytes) -> None:
        """Note whether the event that `data` belongs to, passed on, has ended. Ends may be split over reads."""
        joined = self._last + data
        self._last = joined[-3:]
        ended = max(joined.rfind(end) + len(end) if end in joined else -1 for end in _ENDS)
        self._open = len(joined) - ended if ended >= 0 else self._open + len(data)
        if not self._open:
            self._last = b""
        self.cut = self._open > EVENT_LIMIT_BYTES
        if ended >= 0 and b"[DONE]" in self.tail[-64:]:
            self.done = True

    def _without_usage(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        if self._passing:
            ended = _EVENT_END.search(self._last + data)
            if ended is None:
                self._follow(data)
                self._passing = self._open > 0
                return data
            at = max(0, ended.end() - len(self._last))
            passed.append(data[:at])
            data, self._passing, self._open, self._last = data[at:], False, 0, b""
        buffer, at = self._held + data, 0
        for ended in _EVENT_END.finditer(buffer):
            event = buffer[at : ended.end()]
            at = ended.end()
            self.done = self.done or event.rstrip().endswith(b"[DONE]")
            if b'"usage"' not in event or not _is_usage(event):
                passed.append(event)
        rest = buffer[at:]
        if len(rest) > HOLD_BYTES:
            passed.append(rest)
            self._held, self._passing = b"", True
            self._open, self._last = len(rest), rest[-3:]
        else:
            self._held = rest
        return b"".join(passed)


def _is_usage(event: bytes) -> bool:
    """Whether this is the chunk that carries usage and no choice: what include_usage adds to a stream."""
    try:
        return not _chunk.decode(b"\n".join(_DATA.findall(event))).choices
    except (msgspec.DecodeError, RecursionError):
        return False
