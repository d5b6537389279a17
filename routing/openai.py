"""What the gateway understands of a request body, what it changes in it, and how it says no. Pure.

A body is looked at by its top-level members alone: their values stay the bytes that the client wrote.
"""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from routing.shapes import MAX_TOKENS, Card, Cards, Envelope, ErrorBody, Peek, Said, Span

INCLUDE_USAGE: Final = b'{"include_usage":true}'
USAGE_ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Routes whose streams carry usage only when `stream_options` asks for it."""
KNOWN_ROUTES: Final = USAGE_ROUTES | {
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
}
GENERATING_ROUTES: Final = USAGE_ROUTES | {"/v1/responses", "/v1/messages"}
"""Routes whose answers are as long as their requests allow."""
ENGINE_ADMIN: Final = re.compile(r"^/v1/(load_lora_adapter|unload_lora_adapter|adapters|streams?)(/|$)")
"""Routes of engines that change the engine or show other people's requests; never passed on."""
SUGGEST_AMONG: Final = 200
"""Names that a wrong one is compared with; that takes longer than all else in a request."""
SAID_CHARACTERS: Final = 4096
COMPRESSED: Final = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""How gzip and zstd begin."""
UTF8_SLICE: Final = 1 << 20


BUSY_RETRY_S: Final = 2.0
"""When somebody whom there was no room for may ask again."""


# --- errors ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Kind:
    status: int
    type: str
    retry: bool = False
    """Whether the answer carries Retry-After."""


ERRORS: Final[dict[str, Kind]] = {
    "request_malformed": Kind(400, "invalid_request_error"),
    "headers_too_large": Kind(431, "invalid_request_error"),
    "headers_too_slow": Kind(408, "invalid_request_error"),
    "body_invalid": Kind(400, "invalid_request_error"),
    "encoding_unsupported": Kind(415, "invalid_request_error"),
    "body_too_large": Kind(413, "invalid_request_error"),
    "body_too_slow": Kind(408, "invalid_request_error"),
    "key_missing": Kind(401, "authentication_error"),
    "key_unknown": Kind(401, "authentication_error"),
    "model_forbidden": Kind(403, "permission_error"),
    "origin_forbidden": Kind(403, "permission_error"),
    "model_unknown": Kind(404, "invalid_request_error"),
    "route_unknown": Kind(404, "invalid_request_error"),
    "method_not_allowed": Kind(405, "invalid_request_error"),
    "rate_limited": Kind(429, "rate_limit_error", retry=True),
    "quota_exceeded": Kind(429, "insufficient_quota", retry=True),
    "budget_exceeded": Kind(429, "insufficient_quota", retry=True),
    "client_left": Kind(499, "client_error"),
    "gateway_failed": Kind(500, "server_error"),
    "engine_failed": Kind(502, "server_error"),
    "no_endpoint": Kind(503, "server_error", retry=True),
    "model_loading": Kind(503, "server_error", retry=True),
    "engine_down": Kind(503, "server_error", retry=True),
    "engine_busy": Kind(503, "server_error", retry=True),
    "store_unreachable": Kind(503, "server_error", retry=True),
    "gateway_stopping": Kind(503, "server_error", retry=True),
    "engine_silent": Kind(504, "server_error"),
}
"""Every code that a client can get from the gateway itself (GW-3)."""


class Refusal(Exception):
    """The request ends here with an error of the table. `retry_after_s` only where the table says so."""

    def __init__(
        self, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.kind = ERRORS[code]
        self.retry_after_s = max(1, round(retry_after_s or 1)) if self.kind.retry else None


_encoder: Final = msgspec.json.Encoder()


def envelope(refusal: Refusal) -> bytes:
    """OpenAI's error object."""
    return _encoder.encode(Envelope(ErrorBody(refusal.message, refusal.kind.type, refusal.param, refusal.code)))


def error_event(refusal: Refusal, *, mid_event: bool) -> bytes:
    """The last SSE event of a stream that broke; `mid_event` ends a half-sent event first."""
    return (b"\n\n" if mid_event else b"") + b"event: error\ndata: " + envelope(refusal) + b"\n\n"


def stopping() -> Refusal:
    return Refusal("gateway_stopping", "This gateway is being restarted. Try again in a moment.", retry_after_s=1)


_said: Final = msgspec.json.Decoder(Said)


def is_error(body: bytes) -> bool:
    """Whether an engine's refusal has OpenAI's shape already."""
    try:
        return isinstance(_said.decode(body).error, dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def error_text(body: bytes) -> str:
    """What an engine's error says, whatever its shape. Characters that steer terminals, or that databases do not take,
    are left out."""
    text = _error_text(body)[:SAID_CHARACTERS]
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def _error_text(body: bytes) -> str:
    try:
        said = _said.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body.decode("utf-8", "replace")
    inner = said.error.get("message") if isinstance(said.error, dict) else said.error
    found = next((each for each in (inner, said.message, said.detail) if each), "")
    return found if isinstance(found, str) else msgspec.json.encode(found).decode()


def engine_refusal(body: bytes, status: int) -> bytes:
    """An engine's refusal that is not OpenAI's error object, made one."""
    said = " ".join(error_text(body[:4096]).split())[:500]
    code = "route_unknown" if status == 404 else "engine_refused"
    text = f"The model's engine refused this: {said or f'status {status}'}"
    return _encoder.encode(Envelope(ErrorBody(text, "invalid_request_error", None, code)))


def model_unknown(name: str, visible: Iterable[str]) -> Refusal:
    """`visible` are the names that this key may use; nothing else is suggested."""
    some = [each for each, _ in zip(visible, range(SUGGEST_AMONG), strict=False)]
    close = difflib.get_close_matches(name[:200], some, n=1)
    shown = name if len(name) <= 100 else name[:99] + "…"
    if close:
        text = f"No model {shown}. Did you mean {close[0]}?"
    elif some:
        text = f"No model {shown}. GET /v1/models lists what this key may use."
    else:
        text = f"No model {shown}: this key may use none yet. Ask an operator to publish one."
    return Refusal("model_unknown", text, param="model")


# --- bodies ----------------------------------------------------------------------------------------------------------
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: Final = msgspec.json.Decoder()
_STRING: Final = msgspec.json.Decoder(str)
_MEMBER: Final = re.compile(rb'[ \t\n\r]*"((?:[^"\\]|\\.)*)"[ \t\n\r]*:[ \t\n\r]*', re.DOTALL)
_SPACE: Final = re.compile(rb"[ \t\n\r]*")


def peek(body: bytes, path: str = "") -> Peek:
    """Read a JSON body's model, stream, stream_options and, by a name that counts on `path`, its token bound. Raises
    Refusal (400) naming the field."""
    members = _members(body)
    spans = _spans(body, members)
    model = _value(members, "model")
    if not isinstance(model, str) or not model:
        raise Refusal("body_invalid", "`model` must be the name of a model; GET /v1/models lists them.", param="model")
    stream = _value(members, "stream") if "stream" in members else None
    if stream is not None and not isinstance(stream, bool):
        raise Refusal("body_invalid", "`stream` must be true or false, not a string or a number.", param="stream")
    options = _value(members, "stream_options") if "stream_options" in members else None
    bound: object = None
    for name in BOUNDS.get(path, ()):
        if bound is None and name in members:
            bound = _value(members, name)
    choices = _value(members, "n") if "n" in members else 1
    return Peek(
        model=model,
        model_span=spans["model"],
        stream=stream is True,
        options_span=spans.get("stream_options"),
        asks_usage=isinstance(options, dict) and options.get("include_usage") is True,
        # No answer counts for more, and what numbers of any length would be added to has an end.
        max_tokens=min(bound, MAX_TOKENS)
        if isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0
        else None,
        insert_at=body.index(b"{") + 1,
        choices=min(choices, MAX_CHOICES) if isinstance(choices, int) and choices > 1 else 1,
        prompt_span=spans.get("messages") or spans.get("prompt") or spans.get("input"),
        spans=spans,
    )


_KEYS: Final = {
    name: b'"' + name.encode() + b'":'
    for name in (
        *("model", "messages", "prompt", "input", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "response_format", "user"),
    )
}
"""Names that nearly every body has, as they stand in it."""
MAX_CHOICES: Final = 128
MAX_MEMBERS: Final = 1000
MAX_MEMBER_NAME: Final = 1000
MAX_VALUE_BYTES: Final = 16 * 1024
"""Characters. Longer names and more members than these would take the time of everybody's requests to look at."""
BOUNDS: Final[dict[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""What bounds an answer, by route: engines pass over the names of other routes."""


def _value(members: dict[str, msgspec.Raw], name: str) -> object:
    raw = members.get(name)
    if raw is None:
        return None
    if len(raw) > MAX_VALUE_BYTES:
        raise Refusal("body_invalid", f"`{name}` is longer than {MAX_VALUE_BYTES:,} bytes.", param=name)
    try:
        return _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # as JSON goes it is none too bad
        raise Refusal("body_invalid", f"`{name}` has a number that is out of range.", param=name) from None


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        members = _MEMBERS.decode(body)
        if not body.isascii():
            _check_utf8(body)
    except RecursionError:
        raise Refusal("body_invalid", "The body nests too deeply; send a flatter JSON object.") from None
    except msgspec.ValidationError:
        raise Refusal("body_invalid", 'The body must be a JSON object, like {"model": "…"}.') from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not body or body.isspace():
            raise Refusal("body_invalid", "The body is empty; send a JSON object with at least `model`.") from None
        hint = " It starts with a byte order mark; send it without." if body.startswith(codecs.BOM_UTF8) else ""
        if body.startswith(COMPRESSED):
            hint = " It looks compressed: say so in Content-Encoding (gzip or deflate), or send it plain."
        raise Refusal("body_invalid", f"The body is not valid JSON: {_reason(error)}.{hint}") from None
    return members


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error).removeprefix("JSON is malformed: ")


def _check_utf8(body: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), UTF8_SLICE):
        decoder.decode(body[start : start + UTF8_SLICE])
    decoder.decode(b"", final=True)


def _spans(body: bytes, members: dict[str, msgspec.Raw]) -> dict[str, Span]:
    """Walk the members of a valid object. A mapping keeps only the last of two members with one name, so a walk
    that meets a name twice, or a value that is not the kept one, has found a duplicate."""
    if len(members) > MAX_MEMBERS or any(len(name) > MAX_MEMBER_NAME for name in members):
        text = f"The body has more than {MAX_MEMBERS:,} fields, or a name longer than {MAX_MEMBER_NAME:,} characters."
        raise Refusal("body_invalid", text)
    spans: dict[str, Span] = {}
    at = 1 if body[0] == 123 else body.index(b"{") + 1
    end = at
    for name, raw in members.items():  # in the order of the body, as nearly everybody writes it
        if body[at] == 32:
            at += 1
        key = _KEYS.get(name) or b'"' + name.encode() + b'":'
        start = at + len(key)
        if body[at:start] != key:
            break
        at = start
        if body[at] == 32:
            at += 1
        value = bytes(raw)
        end = at + len(value)
        if body[at:end] != value if len(value) < MAX_VALUE_BYTES else not body.startswith(value, at):
            break  # a short one is cut out at less cost than the call; of a long one that would be a second copy
        spans[name] = (at, end)
        if body[end] != 44:  # a comma
            break
        at = end + 1
    if len(spans) == len(members) and body[end] == 125:
        return spans
    return _careful_spans(body, members)


def _careful_spans(body: bytes, members: dict[str, msgspec.Raw]) -> dict[str, Span]:
    """The same, whatever stands between the members. Raises Refusal (400) naming a duplicate."""
    spans: dict[str, Span] = {}
    at = body.index(b"{") + 1
    more = bool(members)
    while more:
        found = _MEMBER.match(body, at)
        assert found is not None, "the decoder has accepted this object"
        key = found[1]
        name = _STRING.decode(b'"' + key + b'"') if b"\\" in key else key.decode()
        value, start = bytes(members[name]), found.end()
        if name in spans or not body.startswith(value, start):
            raise twice(name)
        at = start + len(value)
        spans[name] = (start, at)
        after = body[at]
        if after in b" \t\n\r":
            at = _SPACE.match(body, at).end()  # type: ignore[union-attr]
            after = body[at]
        if after not in b",}":
            raise twice(name)
        at += 1
        more = after == 44  # a comma
    return spans


def twice(name: str) -> Refusal:
    shown = name[:60]
    return Refusal("body_invalid", f"`{shown}` stands twice in the body; send each field once.", param=shown)


def rewrite(body: bytes, seen: Peek, *, model: bytes | None, add_usage: bool) -> bytes:
    """`body` with the model's value replaced by `model` (JSON text) and usage asked for; all else byte for byte."""
    edits: list[tuple[int, int, bytes]] = []
    if model is not None:
        edits.append((*seen.model_span, model))
    if add_usage:
        if seen.options_span is None:
            edits.append((seen.insert_at, seen.insert_at, b'"stream_options":' + INCLUDE_USAGE + b","))
        else:
            edits.append((*seen.options_span, _with_usage(_part(body, seen.options_span))))
    if not edits:
        return body
    edits.sort()
    parts: list[bytes] = []
    at = 0
    for start, end, text in edits:
        parts += (body[at:start], text)
        at = end
    parts.append(body[at:])
    return b"".join(parts)


def _part(body: bytes, span: Span) -> bytes:
    start, end = span
    return body[start:end]


def _with_usage(options: bytes) -> bytes:
    known = msgspec.json.decode(options)
    if known is None or known == {}:
        return INCLUDE_USAGE
    return _encoder.encode({**known, "include_usage": True})


def usage_to_add(path: str, seen: Peek, body: bytes) -> bool:
    """Whether the gateway must ask for usage itself, and so take the extra chunk out of the answer."""
    if not seen.stream or seen.asks_usage or path not in USAGE_ROUTES:
        return False
    if seen.options_span is None:
        return True
    options = _ANY.decode(_part(body, seen.options_span))
    return options is None or isinstance(options, dict)  # anything else is for the engine to refuse


# --- the list of models ----------------------------------------------------------------------------------------------


def model_card(name: str, created: int) -> bytes:
    return _encoder.encode(Card(name, "model", created, "llmgw"))


def model_list(names: Sequence[str], created: int) -> bytes:
    return _encoder.encode(Cards("list", [Card(name, "model", created, "llmgw") for name in names]))
