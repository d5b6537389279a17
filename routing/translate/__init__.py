"""Responses and Messages for endpoints that speak only chat completions (GW-1): requests there, answers back. Pure.

One Translation belongs to one request: `request` (again for each endpoint tried), then `answer` or `stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from routing.openai import Refusal
from routing.translate.chat import ChatStream
from routing.translate.messages import Messages
from routing.translate.responses import Responses


class Translation(Protocol):
    def request(self, body: bytes, model: str, request_id: str) -> bytes:
        """The chat completion request that asks `model` the same. Raises Refusal (400) naming what cannot be said."""

    def answer(self, body: bytes) -> bytes:
        """A whole chat answer (status 200) as this protocol says it. Raises Refusal (502) when it is none."""

    def error(self, envelope: bytes, status: int) -> bytes:
        """OpenAI's error object as this protocol says it."""

    def stream(self) -> ChatStream:
        """Fed the bytes of a chat stream, gives those of this protocol's."""


_ROUTES: dict[str, Callable[[], Translation]] = {"/v1/responses": Responses, "/v1/messages": Messages}


def for_route(path: str) -> Translation | None:
    """None: requests to `path` are never translated."""
    made = _ROUTES.get(path)
    return None if made is None else made()


MESSAGES: Translation = Messages()
"""For the errors of a route of Anthropic's, translated or not."""

_NEEDED = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
_ELSEWHERE = {
    "/v1/chat/completions": (("input", "/v1/responses"), ("prompt", "/v1/completions")),
    "/v1/completions": (("messages", "/v1/chat/completions"), ("input", "/v1/responses")),
    "/v1/responses": (("messages", "/v1/chat/completions"),),
    "/v1/messages": (("input", "/v1/responses"), ("prompt", "/v1/completions")),
}


def misplaced(path: str, members: Container[str]) -> Refusal | None:
    """What to tell a client whose body is meant for another route; `members` are the names at its top level."""
    needed = _NEEDED.get(path)
    if needed is None or needed in members:
        return None
    for name, route in _ELSEWHERE[path]:
        if name in members:
            text = f"`{needed}` is missing, and `{name}` is not for {path}: post this body to {route}."
            return Refusal("body_invalid", text, param=needed)
    return None
