from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import accounting
from routing.accounting import completed, merge, of_answer, of_tail, of_usage
from routing.shapes import Tokens

COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens")
ANTHROPIC = ("cache_read_input_tokens", "cache_creation_input_tokens")
odd_counts = (
    st.none() | st.booleans() | st.integers(-(10**19), 10**19) | st.floats() | st.text(max_size=5) | st.just([])
)


def answer(usage: Any, **more: Any) -> bytes:
    return json.dumps({"id": "x", "choices": [], "usage": usage, **more}).encode()


@given(
    st.dictionaries(
        st.sampled_from([*COUNTS, *ANTHROPIC]),
        odd_counts,
    ),
    st.dictionaries(st.sampled_from(["cached_tokens", "reasoning_tokens"]), odd_counts),
)
def test_whatever_an_engine_writes_no_count_is_negative_or_absurd(
    usage: dict[str, Any], details: dict[str, Any]
) -> None:
    tokens = of_usage({**usage, "prompt_tokens_details": details, "completion_tokens_details": details})
    if tokens is None:
        return
    for count in (tokens.prompt, tokens.cached, tokens.completion, tokens.reasoning):
        assert count is None or 0 <= count <= 3 * accounting.MAX_TOKENS
    if tokens.prompt is not None and tokens.cached is not None:
        assert tokens.cached <= tokens.prompt
    if tokens.completion is not None and tokens.reasoning is not None:
        assert tokens.reasoning <= tokens.completion


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_plain_usage_is_taken_as_it_is(prompt: int, completion: int) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    assert of_answer(answer(usage)) == Tokens(prompt, None, completion)
    assert of_usage(usage) == Tokens(prompt, None, completion)


def test_reasoning_is_part_of_completion_and_cached_part_of_prompt() -> None:
    usage = {
        "prompt_tokens": 2008,
        "completion_tokens": 266,
        "total_tokens": 2274,
        "completion_tokens_details": {"reasoning_tokens": 261},
        "prompt_tokens_details": {"cached_tokens": 1500},
    }
    assert of_answer(answer(usage)) == Tokens(2008, 1500, 266, 261)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 5, "total_tokens": 5}, Tokens(5, None, 0)),
        ({"prompt_tokens": 5, "total_tokens": 3}, Tokens(5, None, 0, odd=True)),
        ({"prompt_tokens": 5}, Tokens(5)),
        ({"prompt_tokens": "12", "completion_tokens": 12.0}, Tokens(12, None, 12, odd=True)),
        ({"prompt_tokens": "x", "completion_tokens": 1}, Tokens(None, None, 1, odd=True)),
        ({"prompt_tokens": 5, "completion_tokens": -3}, Tokens(5, None, 0, odd=True)),
        ({"prompt_tokens": 10**18, "completion_tokens": 1}, Tokens(accounting.MAX_TOKENS, None, 1, odd=True)),
        ({"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 11}, Tokens(5, None, 5, odd=True)),
        (
            {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}},
            Tokens(5, 5, 1, odd=True),
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 9}},
            Tokens(5, None, 1, 1, odd=True),
        ),
        ({"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": None}, Tokens(5, None, 1)),
        ({"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 1}}, Tokens(3, 1, 4)),
        ({"input_tokens": 3, "cache_read_input_tokens": 7, "output_tokens": 4}, Tokens(10, 7, 4)),
        ({"input_tokens": 3, "cache_creation_input_tokens": 7, "output_tokens": 4}, Tokens(10, None, 4)),
    ],
)
def test_the_shapes_and_oddities_of_engines_are_read(usage: dict[str, Any], tokens: Tokens) -> None:
    assert of_answer(answer(usage)) == tokens


@pytest.mark.parametrize("body", [answer(None), answer({}), answer("x"), b"{}", b"[]", b"not json", b"[" * 5000])
def test_an_answer_without_usage_says_nothing(body: bytes) -> None:
    assert of_answer(body) is None


def test_llamacpps_timings_stand_in_for_usage() -> None:
    timings = {"cache_n": 4, "prompt_n": 6, "predicted_n": 9}
    assert of_answer(answer(None, timings=timings)) == Tokens(10, 4, 9)
    assert of_answer(answer(None, timings={"prompt_n": 6, "predicted_n": 9})) == Tokens(6, None, 9)


def test_a_long_answer_is_read_from_its_end() -> None:
    body = answer({"prompt_tokens": 1, "completion_tokens": 2}, aaa="x" * accounting.WHOLE_BYTES)
    assert of_answer(body) is None  # usage stands before 256 KiB of something else
    body = json.dumps({"choices": "x" * accounting.WHOLE_BYTES, "usage": {"prompt_tokens": 1}}).encode()
    assert of_answer(body) == Tokens(1)


def test_the_last_usage_of_a_stream_counts_and_text_cannot_forge_one() -> None:
    tail = (
        b'data: {"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
        b'data: {"usage":null,"choices":[{"delta":{"content":"\\"usage\\":{\\"prompt_tokens\\":99}"}}]}\n\n'
        b'data: {"choices":[],"usage": {"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
    )
    assert of_tail(tail) == Tokens(3, None, 4)
    assert of_tail(b'x "usage":{"prompt_tok') is None
    assert of_tail(b"") is None


def test_anthropics_two_halves_are_put_together() -> None:
    first, last = Tokens(10, 2, 1), Tokens(None, None, 9)
    assert merge(first, last) == Tokens(10, 2, 9)
    assert merge(Tokens(1, None, 1, 1), Tokens(5, 4, 3, 2)) == Tokens(5, 4, 3, 2)
    assert merge(None, last) == last
    assert merge(first, None) == first


def test_what_is_missing_is_estimated_and_marked() -> None:
    assert completed(None, prompt_bytes=41, events=7, answer_bytes=0, streamed=True) == Tokens(
        11, None, 7, estimated=True
    )
    assert completed(Tokens(3), prompt_bytes=41, events=0, answer_bytes=9, streamed=False) == Tokens(
        3, None, 3, estimated=True
    )
    assert completed(Tokens(None, None, 8), prompt_bytes=4, events=0, answer_bytes=0, streamed=True) == Tokens(
        1, None, 8, estimated=True
    )
    known = Tokens(1, None, 2)
    assert completed(known, prompt_bytes=400, events=9, answer_bytes=9, streamed=True) is known
