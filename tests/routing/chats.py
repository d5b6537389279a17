"""What endpoints that speak chat completions answer, whole and as streams, for the tests of translations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

from hypothesis import strategies as st

from routing.translate import Translation, for_route
from routing.translate.chat import ChatStream

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 9,
    "total_tokens": 29,
    "prompt_tokens_details": {"cached_tokens": 16},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
DONE = b"data: [DONE]\n\n"
BASE = {"id": "chatcmpl-1", "created": 7, "model": "served"}


def event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish, **more}
    return event({**BASE, "object": "chat.completion.chunk", "choices": [choice]})


def usage_chunk(usage: dict[str, Any] | None = None) -> bytes:
    return event({**BASE, "choices": [], "usage": usage or USAGE})


def calling(index: int | None, arguments: str | None = None, *, call_id: str | None = None, name: Any = None) -> bytes:
    function = {"name": name, "arguments": arguments}
    return chunk({"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]})


@dataclass
class Talk:
    """One answer: what a model thought, said and called, in pieces."""

    thought: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    """The pieces of the arguments of each call."""
    alternating: bool = False
    finish: str = "stop"

    def stream(self) -> bytes:
        parts = [chunk({"role": "assistant", "content": ""})]
        parts += [chunk({"reasoning_content": text}) for text in self.thought]
        parts += [chunk({"content": text}) for text in self.said]
        heads = [calling(n, "", call_id=f"call_{n}", name=f"tool_{n}") for n in range(len(self.calls))]
        if self.alternating:
            parts += heads
            for step in range(max((len(pieces) for pieces in self.calls), default=0)):
                parts += [calling(n, pieces[step]) for n, pieces in enumerate(self.calls) if step < len(pieces)]
        else:
            for n, pieces in enumerate(self.calls):
                parts += [heads[n], *(calling(n, piece) for piece in pieces)]
        return b"".join([*parts, chunk({}, self.finish), usage_chunk(), DONE])

    def whole(self) -> bytes:
        calls = [
            {"id": f"call_{n}", "type": "function", "function": {"name": f"tool_{n}", "arguments": "".join(pieces)}}
            for n, pieces in enumerate(self.calls)
        ]
        message = {
            "role": "assistant",
            "content": "".join(self.said) or None,
            "reasoning_content": "".join(self.thought) or None,
            "tool_calls": calls or None,
        }
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        return json.dumps({**BASE, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
arguments = st.dictionaries(
    texts, st.one_of(texts, st.integers(-9, 9), st.none(), st.lists(texts, max_size=2)), max_size=2
)


@st.composite
def call_pieces(draw: st.DrawFn) -> list[str]:
    said = json.dumps(draw(arguments), ensure_ascii=draw(st.booleans()))
    at = draw(st.integers(0, len(said)))
    return [said[:at], said[at:]]


talks = st.builds(
    Talk,
    thought=st.lists(texts, max_size=3),
    said=st.lists(texts, max_size=3),
    calls=st.lists(call_pieces(), max_size=3),
    alternating=st.booleans(),
    finish=st.sampled_from(["stop", "length", "tool_calls", "content_filter", "eos"]),
)


def through(stream: ChatStream, *pieces: bytes) -> bytes:
    return b"".join([stream.feed(piece) for piece in pieces]) + stream.end()


def read(out: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each must be named as its data says."""
    found = []
    for each in out.decode().split("\n\n")[:-1]:
        if each.startswith(":"):
            continue
        name, data = each.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def asked(translation: Translation, body: dict[str, Any], request_id: str = "req-1") -> dict[str, Any]:
    """The chat completion request that `body` becomes."""
    found = json.loads(translation.request(json.dumps(body).encode(), "real", request_id))
    assert isinstance(found, dict)
    return found


@contextmanager
def translating(answer: bytes, kind: str = "json", status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server whose requests become a chat endpoint's and get `answer`, translated: where it is and what it asked."""
    seen: list[dict[str, Any]] = []

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            translation = for_route(self.path)
            assert translation is not None
            body = self.rfile.read(int(self.headers["content-length"]))
            seen.append(json.loads(translation.request(body, "real", "req-1")))
            if status != 200:
                out = translation.error(answer, status)
            elif kind == "json":
                out = translation.answer(answer)
            else:
                out = through(translation.stream(), answer)
            self.send_response(status)
            self.send_header("content-type", "application/json" if kind == "json" else "text/event-stream")
            self.send_header("content-length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Door) as server:
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()
