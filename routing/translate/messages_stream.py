"""What a Messages answer is made of, whole and as events. Pure."""

from __future__ import annotations

import msgspec

from routing.openai import Refusal
from routing.translate.chat import ITEM_BYTES, KEEP_ALIVE, End, Writer
from routing.translate.fields import Object

_encoder = msgspec.json.Encoder()
_any = msgspec.json.Decoder()
_REASONS = {
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
}


def tool_input(arguments: str) -> Object:
    """What a model wrote as arguments. What is no JSON object goes to the tool under a name that no schema has, so
    that whoever checks the input can tell the model."""
    if not arguments.strip():
        return {}
    try:
        found = _any.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"invalid_arguments": arguments}


class Shape:
    """The message of one request."""

    def __init__(self, request_id: str, model: str, *, shows_thinking: bool) -> None:
        self._request_id, self.model, self.shows_thinking = request_id, model, shows_thinking

    def message(self, model: str) -> Object:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},  # not known yet, and the shape has no other word for it
        }

    def tool_block(self, number: int, call_id: str | None, name: str) -> Object:
        return {
            "type": "tool_use",
            "id": call_id or f"toolu_{self._request_id}_{number}",
            "name": name,
            "input": {},
        }

    def ended(self, end: End, *, called: bool, refused: bool) -> Object:
        reason = _REASONS.get(end.reason)
        if reason is None or (reason == "tool_use" and not called):
            reason = "tool_use" if called else "refusal" if refused else "stop_sequence" if end.stop else "end_turn"
        stop = end.stop if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop, "usage": _usage(end)}


def _usage(end: End) -> Object:
    """Anthropic counts what was read from the cache apart from the rest of the prompt."""
    tokens = end.tokens
    if tokens is None:
        return {"input_tokens": 0, "output_tokens": 0}
    made: Object = {
        "input_tokens": (tokens.prompt or 0) - (tokens.cached or 0),
        "output_tokens": tokens.completion or 0,
    }
    if tokens.cached is not None:
        made["cache_read_input_tokens"] = tokens.cached
    return made


class _Held:
    """A block that waits for the one that is open to end."""

    __slots__ = ("block", "text")

    def __init__(self, block: Object) -> None:
        self.block, self.text = block, bytearray()


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessagesWriter(Writer):
    """Blocks come one after the other here. The first call is passed on as it comes and stays open to the end, since
    calls may alternate; what begins after it waits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self._index = -1
        self._open = ""
        """The type of the block that is open."""
        self._held: list[_Held] = []
        self._calls: dict[int, _Held] = {}
        self._refused = self._called = False

    def opened(self, model: str, created: int) -> None:
        self._say("message_start", {"message": self._shape.message(model)})

    def thought(self, text: str) -> None:
        if self._shape.shows_thinking:
            self._more("thinking", text)
        else:
            self.out.append(KEEP_ALIVE)

    def said(self, text: str) -> None:
        self._more("text", text)

    def refused(self, text: str) -> None:
        self._refused = True
        self._more("text", text)

    def called(self, number: int, call_id: str | None, name: str) -> None:
        self._called = True
        block = self._shape.tool_block(number, call_id, name)
        if self._open == "tool_use":
            self._calls[number] = self._hold(block)
        else:
            self._begin(block)

    def argued(self, number: int, text: str) -> None:
        held = self._calls.get(number)
        if held is None:
            self._delta(text)
        else:
            self._extend(held, text)

    def finished(self, end: End) -> None:
        for held in self._held:
            self._begin(held.block)
            if held.text:
                self._delta(held.text.decode())
        self._stop()
        ended = self._shape.ended(end, called=self._called, refused=self._refused)
        usage = ended.pop("usage")
        self._say("message_delta", {"delta": ended, "usage": usage})
        self._say("message_stop", {})

    def failed(self, refusal: Refusal) -> None:
        self._say("error", {"error": {"type": "api_error", "message": refusal.message}})

    def _more(self, kind: str, text: str) -> None:
        if self._open == "tool_use":
            last = self._held[-1] if self._held else None
            if last is None or last.block["type"] != kind:
                last = self._hold(_block(kind))
            self._extend(last, text)
            return
        if self._open != kind:
            self._begin(_block(kind))
        self._delta(text)

    def _hold(self, block: Object) -> _Held:
        self.keep(ITEM_BYTES)
        held = _Held(block)
        self._held.append(held)
        return held

    def _extend(self, held: _Held, text: str) -> None:
        data = text.encode()
        self.keep(len(data))
        held.text += data

    def _begin(self, block: Object) -> None:
        self._stop()
        self._index += 1
        self._open = block["type"]
        self._say("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, text: str) -> None:
        kind, field = _DELTAS[self._open]
        self._say("content_block_delta", {"index": self._index, "delta": {"type": kind, field: text}})

    def _stop(self) -> None:
        if self._open:
            self._open = ""
            self._say("content_block_stop", {"index": self._index})

    def _say(self, kind: str, more: Object) -> None:
        self.out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encoder.encode({"type": kind, **more})))


def _block(kind: str) -> Object:
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}
