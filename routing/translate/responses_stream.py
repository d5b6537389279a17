"""What a Responses answer is made of, whole and as events. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from routing.openai import Refusal
from routing.translate.chat import ITEM_BYTES, End, Writer
from routing.translate.fields import Object

_encoder = msgspec.json.Encoder()
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PREFIXES = {"reasoning": "rs", "text": "msg", "refusal": "msg", "call": "fc"}
_NAMES = {
    "reasoning": ("response.reasoning_text", "text"),
    "text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "call": ("response.function_call_arguments", "arguments"),
}
"""Per kind of item: how its events begin, and the field of the last one that has the whole text."""


class Item:
    """One item of the output, with one part of content: reasoning, text, refusal or call."""

    __slots__ = ("_call_id", "_name", "id", "index", "kind", "place", "text")

    def __init__(self, kind: str, request_id: str, index: int, call_id: str | None = None, name: str = "") -> None:
        self.kind, self.index, self.text = kind, index, bytearray()
        self.id = f"{_PREFIXES[kind]}_{request_id}_{index}"
        self._call_id, self._name = call_id or f"call_{request_id}_{index}", name
        self.place: Object = {"item_id": self.id, "output_index": index}
        if kind != "call":
            self.place["content_index"] = 0

    def part(self) -> Object:
        text = self.text.decode()
        match self.kind:
            case "reasoning":
                return {"type": "reasoning_text", "text": text}
            case "refusal":
                return {"type": "refusal", "refusal": text}
            case _:
                return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shown(self, status: str) -> Object:
        said: Object = {"id": self.id, "status": status}
        if self.kind == "call":
            arguments = self.text.decode()
            return {
                **said,
                "type": "function_call",
                "call_id": self._call_id,
                "name": self._name,
                "arguments": arguments,
            }
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return {**said, "type": "reasoning", "summary": [], "content": content}
        return {**said, "type": "message", "role": "assistant", "content": content}


class Shape:
    """The Response object of one request."""

    def __init__(self, request_id: str, model: str, echo: Object) -> None:
        self.request_id, self.model, self.created = request_id, model, 0
        self._echo = echo

    def response(self, status: str, **more: Any) -> Object:
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self._echo,
            **more,
        }

    def ended(self, items: list[Item], end: End) -> Object:
        """Where the answer was cut, only its last item can be incomplete."""
        reason = _INCOMPLETE.get(end.reason)
        status = "incomplete" if reason else "completed"
        return self.response(
            status,
            incomplete_details={"reason": reason} if reason else None,
            output=[item.shown("completed") for item in items[:-1]] + [item.shown(status) for item in items[-1:]],
            usage=_usage(end),
        )


def _usage(end: End) -> Object | None:
    tokens = end.tokens
    if tokens is None or tokens.prompt is None or tokens.completion is None:
        return None
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached or 0, "cache_write_tokens": 0},
        "output_tokens": tokens.completion,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning or 0},
        "total_tokens": tokens.prompt + tokens.completion,
    }


class ResponsesWriter(Writer):
    """Calls may alternate, so they stay open to the end; of the other kinds one is open at a time."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self._sequence = 0
        self._items: list[Item] = []
        self._open: Item | None = None
        self._calls: list[Item] = []
        self._started = False

    def opened(self, model: str, created: int) -> None:
        self._shape.model, self._shape.created = model, created
        self._start()

    def _start(self) -> None:
        self._started = True
        for kind in ("response.created", "response.in_progress"):
            self._say(kind, {"response": self._shape.response("in_progress")})

    def thought(self, text: str) -> None:
        self._more("reasoning", text)

    def said(self, text: str) -> None:
        self._more("text", text)

    def refused(self, text: str) -> None:
        self._more("refusal", text)

    def called(self, number: int, call_id: str | None, name: str) -> None:
        self._close("completed")
        self._calls.append(self._add(Item("call", self._shape.request_id, len(self._items), call_id, name)))

    def argued(self, number: int, text: str) -> None:
        self._extend(self._calls[number], text)

    def finished(self, end: End) -> None:
        status = "incomplete" if end.reason in _INCOMPLETE else "completed"
        last = self._items[-1] if self._items else None
        self._close(status)
        for item in self._calls:
            self._done(item, status if item is last else "completed")
        self._say(f"response.{status}", {"response": self._shape.ended(self._items, end)})

    def failed(self, refusal: Refusal) -> None:
        if not self._started:
            self._start()
        error = {"code": "server_error", "message": refusal.message}
        self._say("response.failed", {"response": self._shape.response("failed", error=error)})

    def _more(self, kind: str, text: str) -> None:
        item = self._open
        if item is None or item.kind != kind:
            self._close("completed")
            self.keep(ITEM_BYTES)
            self._open = item = self._add(Item(kind, self._shape.request_id, len(self._items)))
        self._extend(item, text)

    def _add(self, item: Item) -> Item:
        self._items.append(item)
        self._say("response.output_item.added", {"output_index": item.index, "item": item.shown("in_progress")})
        if item.kind != "call":
            self._say("response.content_part.added", {**item.place, "part": item.part()})
        return item

    def _extend(self, item: Item, text: str) -> None:
        data = text.encode()
        self.keep(len(data))
        item.text += data
        more = {**item.place, "delta": text}
        if item.kind == "text":
            more["logprobs"] = []
        self._say(_NAMES[item.kind][0] + ".delta", more)

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is not None:
            self._done(item, status)

    def _done(self, item: Item, status: str) -> None:
        name, field = _NAMES[item.kind]
        more = {**item.place, field: item.text.decode()}
        if item.kind == "text":
            more["logprobs"] = []
        self._say(name + ".done", more)
        if item.kind != "call":
            self._say("response.content_part.done", {**item.place, "part": item.part()})
        self._say("response.output_item.done", {"output_index": item.index, "item": item.shown(status)})

    def _say(self, kind: str, more: Object) -> None:
        data = _encoder.encode({"type": kind, "sequence_number": self._sequence, **more})
        self._sequence += 1
        self.out.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
