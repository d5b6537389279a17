"""Reading chat completions: a whole answer, or a stream whose bytes may be split anywhere. Pure.

ChatStream tells a Writer what the model says, thinks and calls, and guards it: bounded memory, and an end that is
either `finished`, once the stream said `[DONE]`, or `failed`, never both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from routing import accounting, openai
from routing.openai import Refusal
from routing.shapes import Tokens

LIMIT_BYTES = 4 * 1024 * 1024
"""What one stream may make us keep: of an event that has not ended, and of what must be said again at the end."""
ITEM_BYTES = 512
"""What an item or a call costs beside its text."""
KEEP_ALIVE = b": keep-alive\n\n"
GIVEN_UP = frozenset(("abort", "error"))
"""Finish reasons of answers that are none."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: object = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    content: object = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None
    stop_reason: object = None
    matched_stop: object = None


class _Chat(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: object = None
    model: object = None
    created: object = None


_chat = msgspec.json.Decoder(_Chat)


class End(NamedTuple):
    """How an answer ended. `stop`: the client's stop text that did it, where the engine says so."""

    reason: str = "stop"
    stop: str | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Called:
    id: str | None
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole chat answer; empty texts are not there."""

    model: str
    created: int
    thought: str
    said: str
    refused: str
    calls: tuple[Called, ...]
    end: End


def read_answer(body: bytes, model: str) -> Answer:
    """`model` is what was asked, for an answer that does not say. Raises Refusal (502)."""
    try:
        chat = _chat.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise _no_answer("is not one") from None
    if not chat.choices:
        raise _no_answer(f"has no choice: {openai.error_text(body)[:300]}" if chat.error else "has no choice")
    choice = chat.choices[0]
    if choice.finish_reason in GIVEN_UP:
        raise given_up()
    said = choice.message or _Said()
    calls = [(each.id, each.function) for each in said.tool_calls or () if each.function]
    return Answer(
        model=_model(chat, model),
        created=_created(chat),
        thought=said.reasoning_content or said.reasoning or "",
        said=_text(said.content),
        refused=said.refusal or "",
        calls=tuple(Called(call_id, each.name, _arguments(each)) for call_id, each in calls if each.name),
        end=End(choice.finish_reason or "stop", _stop(choice), accounting.of_usage(chat.usage) if chat.usage else None),
    )


def _no_answer(why: str) -> Refusal:
    return Refusal("engine_failed", f"The engine's answer cannot be translated: it {why}. Try again.")


def given_up() -> Refusal:
    return Refusal("engine_failed", "The engine gave up in the middle of its answer. Try again.")


def _model(chat: _Chat, asked: str) -> str:
    return chat.model if isinstance(chat.model, str) and chat.model else asked


def _created(chat: _Chat) -> int:
    return int(chat.created) if isinstance(chat.created, int | float) else 0


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(each for each in texts if isinstance(each, str))
    return ""


def _arguments(function: _Function) -> str:
    """Some engines send an object where its text belongs."""
    said = function.arguments
    if said is None or isinstance(said, str):
        return said or ""
    return msgspec.json.encode(said).decode()


def _stop(choice: _Choice) -> str | None:
    found = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
    return found if isinstance(found, str) else None


# --- streams ---------------------------------------------------------------------------------------------------------
class Writer(ABC):
    """Says a chat answer in another protocol. What it says gathers in `out`; what it keeps is counted by `keep`."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._kept = 0

    def keep(self, size: int) -> None:
        """Raises Refusal when the stream has grown past the limit."""
        self._kept += size
        if self._kept > LIMIT_BYTES:
            raise too_long()

    @abstractmethod
    def opened(self, model: str, created: int) -> None: ...
    @abstractmethod
    def thought(self, text: str) -> None: ...
    @abstractmethod
    def said(self, text: str) -> None: ...
    @abstractmethod
    def refused(self, text: str) -> None: ...
    @abstractmethod
    def called(self, number: int, call_id: str | None, name: str) -> None:
        """A new call; they are numbered from 0 as they come."""

    @abstractmethod
    def argued(self, number: int, text: str) -> None:
        """More of a call's arguments; those of several calls may alternate."""

    @abstractmethod
    def finished(self, end: End) -> None: ...
    @abstractmethod
    def failed(self, refusal: Refusal) -> None: ...


def too_long() -> Refusal:
    return Refusal(
        "engine_failed", f"The engine's answer is longer than the {LIMIT_BYTES:,} bytes that can be translated."
    )


class ChatStream:
    """`done`: it has said its end, nothing more will come. `failure`: why it ended badly."""

    def __init__(self, writer: Writer, model: str) -> None:
        self.done = False
        self.failure: Refusal | None = None
        self._writer, self._model = writer, model
        self._events = Events()
        self._opened = False
        self._reason: str | None = None
        self._stop: str | None = None
        self._tokens: Tokens | None = None
        self._numbers: dict[int | None, int] = {}
        self._ids: list[str | None] = []

    def feed(self, data: bytes) -> bytes:
        if self.done:
            return b""
        for event in self._events.feed(data):
            try:
                self._read(*event)
            except Refusal as refusal:
                self._fail(refusal)
            if self.done:
                break
        if self._events.cut and not self.done:
            self._fail(too_long())
        return self._said()

    def end(self) -> bytes:
        """The engine's stream ended; before `[DONE]` that is half an answer."""
        return self.fail(Refusal("engine_failed", "The engine broke off in the middle of its answer. Try again."))

    def fail(self, refusal: Refusal) -> bytes:
        """The last bytes of a stream that broke; none when it has said its end already."""
        if not self.done:
            self._fail(refusal)
        return self._said()

    def _said(self) -> bytes:
        out = self._writer.out
        said = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return said

    def _fail(self, refusal: Refusal) -> None:
        self.done, self.failure = True, refusal
        self._writer.failed(refusal)

    def _read(self, name: bytes, data: bytes) -> None:
        if name == b"error":
            raise _reported(data)
        if not data:
            self._writer.out.append(KEEP_ALIVE)
            return
        if data == b"[DONE]":
            self._finish()
            return
        try:
            chat = _chat.decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise Refusal("engine_failed", "The engine sent an event that is no chat completion. Try again.") from None
        if chat.error is not None:
            raise _reported(data)
        if not self._opened:
            self._opened = True
            self._writer.opened(_model(chat, self._model), _created(chat))
        if chat.usage is not None:
            self._tokens = accounting.of_usage(chat.usage) or self._tokens
        for choice in chat.choices or ():
            if choice.index == 0:
                self._choose(choice)

    def _choose(self, choice: _Choice) -> None:
        said, writer = choice.delta, self._writer
        if said is not None:
            if thought := said.reasoning_content or said.reasoning:
                writer.thought(thought)
            if text := _text(said.content):
                writer.said(text)
            if said.refusal:
                writer.refused(said.refusal)
            for call in said.tool_calls or ():
                self._call(call)
        if choice.finish_reason is not None:
            self._reason, self._stop = choice.finish_reason, _stop(choice)

    def _call(self, call: _Call) -> None:
        if call.function is None:
            return
        name, arguments = call.function.name, _arguments(call.function)
        number = self._numbers.get(call.index)
        # Some engines give every call the same index, or none: another name with another id is another call.
        if number is None or (name and call.id and call.id != self._ids[number]):
            if not name:
                if arguments:
                    raise Refusal("engine_failed", "The engine called a tool without naming it. Try again.")
                return
            number = len(self._ids)
            self._numbers[call.index] = number
            self._ids.append(call.id)
            self._writer.keep(ITEM_BYTES + len(name) + len(call.id or ""))
            self._writer.called(number, call.id, name)
        if arguments:
            self._writer.argued(number, arguments)

    def _finish(self) -> None:
        if self._reason in GIVEN_UP:
            raise given_up()
        if not self._opened:
            raise Refusal("engine_failed", "The engine ended its stream without an answer. Try again.")
        self.done = True
        self._writer.finished(End(self._reason or "stop", self._stop, self._tokens))


def _reported(data: bytes) -> Refusal:
    said = " ".join(openai.error_text(data[:4096]).split())[:500]
    return Refusal("engine_failed", f"The engine broke off in the middle of its answer: {said or 'no reason given'}")


class Events:
    """Server-sent events out of bytes: lines may end in LF, CRLF or CR. `cut`: one grew past the limit."""

    __slots__ = ("_after_cr", "_held", "cut")

    def __init__(self) -> None:
        self.cut = False
        self._held = bytearray()
        self._after_cr = False

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The name and the data of each event that ended; both empty for a comment."""
        if self._after_cr and data:
            self._after_cr = False
            if data[0] == 10:
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        held = self._held
        start = max(0, len(held) - 1)
        held += data
        if held.find(b"\n\n", start) < 0:
            self.cut = self.cut or len(held) > LIMIT_BYTES
            return []
        *whole, rest = bytes(held).split(b"\n\n")
        self._held = bytearray(rest)
        events: list[tuple[bytes, bytes]] = []
        for event in whole:
            if len(event) > LIMIT_BYTES:
                self.cut = True
                return events
            if event:
                events.append(_event(event))
        self.cut = self.cut or len(rest) > LIMIT_BYTES
        return events


def _event(lines: bytes) -> tuple[bytes, bytes]:
    if lines.startswith(b"data: ") and b"\n" not in lines:
        return b"", lines[6:]
    name, data = b"", []
    for line in lines.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.strip()
    return name, b"\n".join(data)
