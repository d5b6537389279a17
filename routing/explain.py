"""Why a request went where it went (GW-46): a small record beside its usage row, and the story it tells. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from tenants.figures import milliseconds, number
from tenants.money import text


class Considered(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One endpoint as the choice saw it. `score`: lower is better, None unknown; `note`: why it could not be taken."""

    replica: str
    score: float | None = None
    note: str = ""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One try; `failed` empty: it answered, which need not be written. Milliseconds since the request's headers."""

    replica: str
    at_ms: float
    failed: str = ""


class Skipped(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A model of the fallback chain that did not serve, and the code that says why."""

    model: str
    code: str


class Explained(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What was decided. Lists are cut to what fits a page: 16 candidates, 10 attempts, 10 models."""

    asked: str = ""
    """The name that the client wrote, when it is not the model's."""
    band: str = ""
    routing_profile: str = ""
    queued: bool = False
    position: int = 0
    """Place in the queue when it began to wait; 0 when it did not."""
    loading: bool = False
    """Whether it waited for a replica to become ready."""
    reserved_tokens: int = 0
    affinity: str = ""
    """hit, miss or saturated, when the model's requests follow their prefixes."""
    considered: tuple[Considered, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    skipped: tuple[Skipped, ...] = ()


# --- in words --------------------------------------------------------------------------------------------------------
class Ended(Protocol):
    """What is told of a finished request: a row of tenants.models.Usage, or the gateway's own record."""

    @property
    def model(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    @property
    def replica(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def error_code(self) -> str: ...
    @property
    def streamed(self) -> bool: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int | None: ...
    @property
    def completion_tokens(self) -> int | None: ...
    @property
    def reasoning_tokens(self) -> int | None: ...
    @property
    def estimated(self) -> bool: ...
    @property
    def queue_ms(self) -> float: ...
    @property
    def first_token_ms(self) -> float | None: ...
    @property
    def total_ms(self) -> float: ...
    @property
    def cost(self) -> int | None: ...
    @property
    def band(self) -> str: ...


REFUSED_FROM, LEFT, FAILED_FROM = 400, 499, 500
MEANINGS = {
    "request_malformed": "it was not HTTP as it should be",
    "headers_too_large": "its headers were too long",
    "headers_too_slow": "its headers came too slowly",
    "body_invalid": "its body could not be understood",
    "encoding_unsupported": "its body was compressed in a way that is not known here",
    "body_too_large": "its body was larger than the gateway allows",
    "body_too_slow": "its body came too slowly",
    "key_missing": "no key was sent",
    "key_unknown": "the key does not exist, has expired or was revoked",
    "model_forbidden": "its key may not use this model",
    "origin_forbidden": "pages of its origin may not call the gateway",
    "model_unknown": "there is no such model that its key may see",
    "route_unknown": "there is no such address",
    "method_not_allowed": "the address does not take this method",
    "rate_limited": "a limit of requests, tokens or concurrency was reached",
    "quota_exceeded": "a token quota was used up",
    "budget_exceeded": "a budget was used up",
    "client_left": "the client went away before the answer was complete",
    "gateway_failed": "the gateway itself failed; its log says how",
    "engine_refused": "the engine refused it, as another engine would have",
    "engine_failed": "the engine failed while it worked on it",
    "no_endpoint": "no replica served the model and none was on its way",
    "model_loading": "no replica of the model was ready in time",
    "engine_down": "the model's engines did not answer and were left alone for a moment",
    "engine_busy": "every place was taken and the queue was full or too slow",
    "store_unreachable": "the gateway did not know the keys, as the store could not be reached",
    "gateway_stopping": "the gateway was being restarted",
    "engine_silent": "the engine sent nothing for too long",
}
"""What each code of the gateway says of a request, to follow a colon."""
_REFUSED_BEFORE = frozenset(
    {
        *("body_invalid", "body_too_large", "body_too_slow", "encoding_unsupported"),
        *("model_forbidden", "origin_forbidden", "route_unknown", "method_not_allowed"),
        *("rate_limited", "quota_exceeded", "budget_exceeded", "store_unreachable"),
    }
)
"""Codes of requests that are turned away while no replica was looked for yet."""
_CHOSEN = {
    "hit": "it held the beginning of this prompt already",
    "miss": "no replica was known to hold the beginning of this prompt",
    "saturated": "the replica that holds the beginning of this prompt was full",
}
_TURNS = {"round_robin": "it was its turn", "weighted": "it was its turn by weight"}


def read(stored: object) -> Explained | None:
    """As routing.store keeps it; None when it was removed, or is not what this version writes."""
    if stored is None:
        return None
    try:
        return msgspec.convert(stored, Explained)
    except msgspec.ValidationError:
        return None


def in_words(ended: Ended, why: Explained | None, currency: str) -> tuple[str, ...]:
    """The story of one request in sentences, in the order in which it happened. Without `why` only what is counted."""
    return (
        *_asked(ended, why),
        *(() if why is None else _skipped(ended, why)),
        *_waited(ended, why),
        *(() if why is None else (*_considered(ended, why), *_attempts(why))),
        *_answered(ended),
        *_used(ended, currency),
    )


def _asked(ended: Ended, why: Explained | None) -> Iterator[str]:
    skipped = () if why is None else why.skipped
    asked = "" if why is None else why.asked
    first = skipped[0].model if skipped else ended.model
    adapter = f" with adapter {ended.adapter}" if ended.adapter else ""
    if not first:
        yield f"It asked for {asked}, which is no model here." if asked else "It named no model."
    elif asked and asked != first:
        yield f"It asked for {asked}, which is model {first}{adapter}."
    else:
        yield f"It asked for model {first}{adapter}."
    band = (why.band if why is not None else "") or ended.band
    reserved = 0 if why is None else why.reserved_tokens
    if reserved:
        of_band = f"It went in band {band}; " if band else ""
        kept = (
            f"{_tokens(reserved)} {'was' if reserved == 1 else 'were'} set aside for it until its real use was known."
        )
        yield of_band + kept
    elif band:
        yield f"It went in band {band}."


def _skipped(ended: Ended, why: Explained) -> Iterator[str]:
    for other in why.skipped:
        yield f"Model {other.model} did not serve: {_meaning(other.code)}."
    if not why.skipped or not ended.replica:
        return
    if ended.model not in {other.model for other in why.skipped}:
        yield f"So its fallback, model {ended.model}, got it."
    elif ended.status < REFUSED_FROM:
        yield f"No fallback did, so model {ended.model} was waited for."


def _waited(ended: Ended, why: Explained | None) -> Iterator[str]:
    length = milliseconds(ended.queue_ms)
    if why is None:
        if ended.queue_ms:
            yield f"It waited {length} in the queue."
        return
    place = f", from place {why.position}" if why.position else ""
    if why.loading:
        queue = f" in the queue{place}," if why.queued else ""
        ready = "which was not ready in time" if ended.error_code == "model_loading" else "which then was ready"
        yield f"It waited {length}{queue} for the model to load, {ready}."
    elif why.queued:
        yield f"It waited {length} in the queue{place}."
    elif ended.replica:
        yield "It did not wait: there was room at once."


def was_looked_for(model: str, replica: str, error_code: str) -> bool:
    """Whether a replica was looked for, so that there may be more to say than is kept; else it was refused before."""
    return bool(replica) or (bool(model) and error_code not in _REFUSED_BEFORE)


def first_choice(ended: Ended, why: Explained) -> str:
    """The replica that was tried first; empty: none was."""
    return why.attempts[0].replica if why.attempts else ended.replica


def _considered(ended: Ended, why: Explained) -> Iterator[str]:
    open_ones = [each for each in why.considered if not each.note]
    first = first_choice(ended, why)
    if first and len(open_ones) == 1 and open_ones[0].replica == first:
        yield f"Only {first} could take it."
    elif first and open_ones:
        others = ", ".join(f"{each.replica} {_score(each.score)}" for each in open_ones)
        yield f"Of {len(open_ones)} replicas {first} was chosen: {_reason(why, open_ones, first)} ({others})."
    for each in why.considered:
        if each.note:
            yield f"{each.replica} could not take it: {each.note}."


def _reason(why: Explained, open_ones: Sequence[Considered], first: str) -> str:
    if why.affinity in _CHOSEN:
        return _CHOSEN[why.affinity]
    if why.routing_profile in _TURNS:
        return _TURNS[why.routing_profile]
    scores = {each.replica: each.score for each in open_ones}
    own, known = scores.get(first), [score for score in scores.values() if score is not None]
    if own is None or own > min(known):
        return "by what was known of their load then"
    return "its load was the lowest" if known.count(own) == 1 else "it was its turn among the least loaded"


def _score(score: float | None) -> str:
    return "unknown" if score is None else number(score, 2)


def _attempts(why: Explained) -> Iterator[str]:
    for each in why.attempts:
        if each.failed:
            yield f"After {milliseconds(each.at_ms)} it was sent to {each.replica}, where it failed: {each.failed}."
        elif len(why.attempts) > 1:
            yield f"After {milliseconds(each.at_ms)} it was sent to {each.replica}."


def _meaning(code: str) -> str:
    return f"{MEANINGS[code]} ({code})" if code in MEANINGS else code or "the reason is not known"


def _answered(ended: Ended) -> Iterator[str]:
    where = f"{ended.replica} on {ended.node}" if ended.node else ended.replica
    length = milliseconds(ended.total_ms)
    if ended.status < REFUSED_FROM:
        by = f" by {where}" if where else ""
        first = ended.first_token_ms
        begun = f", the first token after {milliseconds(first)}" if ended.streamed and first is not None else ""
        yield f"It was answered{by} in {length}{begun} (HTTP {ended.status})."
        return
    meaning = MEANINGS.get(ended.error_code)
    code = f", {ended.error_code}" if ended.error_code else ""
    at = f" at {where}" if where else ""
    if ended.status == LEFT:
        yield f"After {length} it was over{at}: {MEANINGS['client_left']} (logged as HTTP 499)."
        return
    how = "it was refused" if ended.status < FAILED_FROM else "it failed"
    yield f"After {length} {how}{at}{': ' + meaning if meaning else ''} (HTTP {ended.status}{code})."


def _used(ended: Ended, currency: str) -> Iterator[str]:
    read_, written = ended.prompt_tokens, ended.completion_tokens
    worked = ended.status < REFUSED_FROM or bool(ended.replica)
    if read_ is None and written is None:
        if worked:
            yield "How many tokens it used is not known."
    else:
        yield f"It {_and_wrote(ended)}."
        if ended.estimated:
            yield "These counts are estimates: the engine did not report all of them."
    if ended.cost is not None:
        yield f"It cost {text(ended.cost, currency)}." if ended.cost else "It cost nothing."
    elif read_ or written:
        yield f"It counts against no budget of money: model {ended.model} had no price then."


def _tokens(count: int | None) -> str:
    return "1 token" if count == 1 else f"{number(count)} tokens"


def _and_wrote(ended: Ended) -> str:
    cached, reasoning = ended.cached_tokens, ended.reasoning_tokens
    of_cache = "" if cached is None else f", {number(cached)} of them from the cache,"
    of_reasoning = f", {number(reasoning)} of them reasoning" if reasoning else ""
    if ended.completion_tokens is None:
        return f"read {_tokens(ended.prompt_tokens)}{of_cache.rstrip(',')}; how many it wrote is not known"
    if ended.prompt_tokens is None:
        return f"wrote {_tokens(ended.completion_tokens)}{of_reasoning}; how many it read is not known"
    written = f"wrote {number(ended.completion_tokens)}{of_reasoning}"
    return f"read {_tokens(ended.prompt_tokens)}{of_cache} and {written}"
