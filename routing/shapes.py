"""What the gateway reads and writes as JSON, and passes on as plain values.

Apart from the code that uses it: msgspec reads these annotations, and compiled modules do not keep them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from routing.explain import Explained

MAX_TOKENS = 100_000_000
Span = tuple[int, int]


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Token counts; None is unknown. `cached` is part of `prompt`, `reasoning` part of `completion`."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None
    estimated: bool = False
    odd: bool = False


class PlainUsage(msgspec.Struct):
    """What nearly every answer says; anything else is read with more care."""

    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    total_tokens: int
    prompt_tokens_details: dict[str, object] | None = None
    completion_tokens_details: dict[str, object] | None = None
    cache_read_input_tokens: object = None


class PlainAnswer(msgspec.Struct):
    usage: PlainUsage


class AnyAnswer(msgspec.Struct):
    usage: object = None
    timings: object = None


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Envelope(msgspec.Struct):
    error: ErrorBody


class Said(msgspec.Struct):
    error: object = None
    message: object = None
    detail: object = None


class Peek(msgspec.Struct, frozen=True):
    """What a JSON body says at its top level. Spans are byte ranges of values in the body; None: not there."""

    model: str
    model_span: Span
    stream: bool
    options_span: Span | None
    asks_usage: bool
    max_tokens: int | None
    insert_at: int
    """Where a new first member can be put."""
    choices: int = 1
    """How many answers are asked for (`n`)."""
    prompt_span: Span | None = None
    spans: Mapping[str, Span] = {}
    """Of every value at the top level."""


class Card(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str


class Cards(msgspec.Struct):
    object: str
    data: list[Card]


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """One finished request, with the fields of tenants.models.Usage. Times in epoch seconds or milliseconds; None is
    unknown; texts no longer than their columns."""

    request_id: str
    at: float
    project: int | None = None
    key: int | None = None
    user: int | None = None
    route: str
    model: str = ""
    replica: str = ""
    node: str = ""
    status: int
    error_code: str = ""
    streamed: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    estimated: bool = False
    queue_ms: float = 0.0
    first_token_ms: float | None = None
    total_ms: float
    adapter: str = ""
    cost: int | None = None
    band: str = ""
    explained: Explained | None = None


class Stage(msgspec.Struct, omit_defaults=True):
    """What a waiting client is told. Seconds; `expected_s` from now on, left out while nothing says so."""

    stage: str
    position: int
    elapsed_s: float
    expected_s: float | None = None


class UsageChunk(msgspec.Struct):
    usage: dict[str, object]
    choices: list[object] | None = None
