"""How many tokens a request used, from what the engine said or, failing that, from what went by. Pure.

Counts that cannot be are clamped and marked `odd`; completion tokens already contain reasoning tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from routing.shapes import MAX_TOKENS, AnyAnswer, PlainAnswer, Tokens

WHOLE_BYTES: Final = 256 * 1024
"""A JSON answer up to this size is decoded as a whole; of a larger one, and of streams, only the end is looked at."""
TAIL_BYTES: Final = 16 * 1024
BYTES_PER_TOKEN: Final = 4


UNKNOWN: Final = Tokens()


_plain: Final = msgspec.json.Decoder(PlainAnswer)
_answer: Final = msgspec.json.Decoder(AnyAnswer)
_USAGE: Final = re.compile(rb'"(usage|timings)"\s*:\s*(?=\{)')
_text: Final = json.JSONDecoder()


def of_answer(body: bytes) -> Tokens | None:
    """Usage in a whole JSON answer, or in the end of one too long to decode. None: it says nothing of use."""
    if len(body) <= WHOLE_BYTES:
        try:
            plain = _plain.decode(body).usage
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            prompt, completion = plain.prompt_tokens, plain.completion_tokens
            if (
                plain.total_tokens == prompt + completion
                and plain.prompt_tokens_details is plain.completion_tokens_details is None
                and plain.cache_read_input_tokens is None
            ):
                return Tokens(prompt, None, completion)
        try:
            answer = _answer.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return of_tail(body)
        return _of_fields(answer.usage, answer.timings)
    return of_tail(body[-TAIL_BYTES:])


def of_tail(tail: bytes) -> Tokens | None:
    """The last usage object in the end of a stream. Text of the model cannot forge one: its quotes are escaped."""
    found: dict[str, object] = {}
    for match in _USAGE.finditer(tail):
        end = match.end()
        try:
            value, _ = _text.raw_decode(tail[end : end + TAIL_BYTES].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        found[match[1].decode()] = value
    return _of_fields(found.get("usage"), found.get("timings"))


def merge(first: Tokens | None, last: Tokens | None) -> Tokens | None:
    """Anthropic's shape says the prompt in its first event and the completion in its last."""
    if first is None or last is None:
        return last or first
    return Tokens(
        prompt=last.prompt if last.prompt is not None else first.prompt,
        cached=last.cached if last.cached is not None else first.cached,
        completion=last.completion if last.completion is not None else first.completion,
        reasoning=last.reasoning if last.reasoning is not None else first.reasoning,
        odd=first.odd or last.odd,
    )


def completed(known: Tokens | None, *, prompt_bytes: int, events: int, answer_bytes: int, streamed: bool) -> Tokens:
    """`known` with what is missing estimated: a streamed event is about a token, so are four bytes of text."""
    known = known or UNKNOWN
    if known.prompt is not None and known.completion is not None:
        return known
    produced = events if streamed else -(-answer_bytes // BYTES_PER_TOKEN)
    return Tokens(
        prompt=-(-prompt_bytes // BYTES_PER_TOKEN) if known.prompt is None else known.prompt,
        cached=known.cached,
        completion=produced if known.completion is None else known.completion,
        reasoning=known.reasoning,
        estimated=True,
        odd=known.odd,
    )


def _of_fields(usage: object, timings: object) -> Tokens | None:
    if isinstance(usage, dict):
        return of_usage(usage)
    if isinstance(timings, dict):  # llama.cpp, in its last chunk even where nobody asked for usage
        return of_usage(
            {
                "prompt_tokens": _sum(timings.get("prompt_n"), timings.get("cache_n")),
                "completion_tokens": timings.get("predicted_n"),
                "prompt_tokens_details": {"cached_tokens": timings.get("cache_n")},
            }
        )
    return None


def of_usage(usage: Mapping[str, object]) -> Tokens | None:
    """The usage object of OpenAI's chat, completions, embeddings and Responses, or of Anthropic's Messages."""
    count = _Counter()
    total = count.read(usage.get("total_tokens"))
    prompt = count.read(usage.get("prompt_tokens", usage.get("input_tokens")))
    completion = count.read(usage.get("completion_tokens", usage.get("output_tokens")))
    cached = count.read(_inner(usage, ("prompt_tokens_details", "input_tokens_details"), "cached_tokens"))
    reasoning = count.read(_inner(usage, ("completion_tokens_details", "output_tokens_details"), "reasoning_tokens"))
    read = count.read(usage.get("cache_read_input_tokens"))
    written = count.read(usage.get("cache_creation_input_tokens"))
    if prompt is not None and (read is not None or written is not None):  # Anthropic counts these apart
        prompt, cached = prompt + (read or 0) + (written or 0), read
    if completion is None and prompt is not None and (total is not None or "completion_tokens" not in usage):
        if total is not None:
            completion = max(0, total - prompt)  # embeddings, rerank: a prompt and a total
            count.odd |= total < prompt
    elif total is not None and prompt is not None and completion is not None and total != prompt + completion:
        count.odd = True
    if prompt is not None and cached is not None and cached > prompt:
        cached, count.odd = prompt, True
    if completion is not None and reasoning is not None and reasoning > completion:
        reasoning, count.odd = completion, True
    if prompt is None and completion is None:
        return None
    return Tokens(prompt, cached, completion, reasoning, odd=count.odd)


class _Counter:
    """Reads counts that engines write as numbers, floats or text, and remembers whether one was odd."""

    def __init__(self) -> None:
        self.odd = False

    def read(self, value: object) -> int | None:
        if value is None:
            return None
        if isinstance(value, str | float) and not isinstance(value, bool):
            self.odd = True
            try:
                value = int(float(value))
            except (ValueError, OverflowError):
                return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.odd = True
            return None
        if not 0 <= value <= MAX_TOKENS:
            self.odd = True
        return min(max(value, 0), MAX_TOKENS)


def _inner(usage: Mapping[str, object], outer: tuple[str, str], name: str) -> object:
    for each in outer:
        details = usage.get(each)
        if isinstance(details, dict):
            return details.get(name)
    return None


def _sum(one: object, other: object) -> object:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    return one
