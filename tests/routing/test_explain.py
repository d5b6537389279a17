"""The story of a request: each sentence, and that any record tells one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.explain import MEANINGS, Attempt, Considered, Explained, Skipped, in_words, read, was_looked_for
from routing.openai import ERRORS
from routing.shapes import Record

PLAIN: dict[str, Any] = {
    "request_id": "req-1",
    "at": 0.0,
    "route": "/v1/chat/completions",
    "model": "smollm2",
    "replica": "smollm2-1",
    "node": "node1",
    "status": 200,
    "total_ms": 285.0,
    "prompt_tokens": 12,
    "completion_tokens": 20,
}
ONE = Explained(considered=(Considered("smollm2-1", 0.25),), attempts=(Attempt("smollm2-1", 0.4),))
NOT_REACHED: dict[str, Any] = {"replica": "", "node": "", "prompt_tokens": None, "completion_tokens": None}


def ended(**fields: Any) -> Record:
    return Record(**{**PLAIN, **fields})


def story(why: Explained | None = None, **fields: Any) -> str:
    return "\n".join(in_words(ended(**fields), why, "EUR"))


def test_a_plain_request_is_told_from_what_it_asked_for_to_what_it_used() -> None:
    assert in_words(ended(), ONE, "EUR") == (
        "It asked for model smollm2.",
        "It did not wait: there was room at once.",
        "Only smollm2-1 could take it.",
        "It was answered by smollm2-1 on node1 in 285 ms (HTTP 200).",
        "It read 12 tokens and wrote 20.",
        "It counts against no budget of money: model smollm2 had no price then.",
    )


def test_a_request_whose_explanation_is_gone_still_says_what_is_counted() -> None:
    assert in_words(
        ended(queue_ms=120.0, band="batch", streamed=True, first_token_ms=41.0, cost=1234), None, "EUR"
    ) == (
        "It asked for model smollm2.",
        "It went in band batch.",
        "It waited 120 ms in the queue.",
        "It was answered by smollm2-1 on node1 in 285 ms, the first token after 41 ms (HTTP 200).",
        "It read 12 tokens and wrote 20.",
        "It cost 0.00001234 EUR.",
    )


@pytest.mark.parametrize(
    ("why", "fields", "sentence"),
    [
        (Explained(asked="chat"), {}, "It asked for chat, which is model smollm2."),
        (Explained(asked="de"), {"adapter": "support-de"}, "which is model smollm2 with adapter support-de."),
        (Explained(asked="smollm3"), {"model": "", **NOT_REACHED}, "It asked for smollm3, which is no model here."),
        (None, {"model": "", **NOT_REACHED}, "It named no model."),
        (Explained(band="interactive"), {"band": "interactive"}, "It went in band interactive."),
        (
            Explained(band="batch", reserved_tokens=1200),
            {},
            "It went in band batch; 1,200 tokens were set aside for it until its real use was known.",
        ),
        (Explained(reserved_tokens=9), {}, "\n9 tokens were set aside for it"),
        (Explained(reserved_tokens=1), {}, "\n1 token was set aside for it"),
    ],
)
def test_what_was_asked_for_and_in_which_band(why: Explained | None, fields: dict[str, Any], sentence: str) -> None:
    assert sentence in story(why, **fields)


@pytest.mark.parametrize(
    ("why", "fields", "sentence"),
    [
        (Explained(queued=True, position=3), {}, "It waited 120 ms in the queue, from place 3."),
        (Explained(queued=True), {}, "It waited 120 ms in the queue."),
        (Explained(loading=True), {}, "It waited 120 ms for the model to load, which then was ready."),
        (
            Explained(queued=True, position=2, loading=True),
            {"status": 503, "error_code": "model_loading"},
            "It waited 120 ms in the queue, from place 2, for the model to load, which was not ready in time.",
        ),
    ],
)
def test_what_it_waited_for(why: Explained, fields: dict[str, Any], sentence: str) -> None:
    assert sentence in story(why, queue_ms=120.0, **fields)


def test_a_request_that_went_nowhere_is_not_said_to_have_had_room() -> None:
    assert "room" not in story(Explained(), status=403, error_code="model_forbidden", **NOT_REACHED)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "its load was the lowest (a 0.25, b 0.5, c unknown)"),
        ({"scores": (0.25, 0.25, 1)}, "it was its turn among the least loaded"),
        ({"scores": (0.5, 0.25, 1)}, "by what was known of their load then"),
        ({"scores": (None, None, None)}, "by what was known of their load then (a unknown, b unknown, c unknown)"),
        ({"routing_profile": "round_robin"}, "it was its turn ("),
        ({"routing_profile": "weighted"}, "it was its turn by weight"),
        ({"affinity": "hit"}, "it held the beginning of this prompt already"),
        ({"affinity": "miss"}, "no replica was known to hold the beginning of this prompt"),
        ({"affinity": "saturated"}, "the replica that holds the beginning of this prompt was full"),
    ],
)
def test_why_one_replica_was_chosen_among_several(fields: dict[str, Any], reason: str) -> None:
    scores = fields.pop("scores", (0.25, 0.5, None))
    considered = tuple(Considered(name, score) for name, score in zip("abc", scores, strict=True))
    why = Explained(
        considered=(*considered, Considered("d", note="left alone")), attempts=(Attempt("a", 1.0),), **fields
    )
    told = story(why)
    assert f"Of 3 replicas a was chosen: {reason}" in told
    assert "d could not take it: left alone." in told


def test_attempts_say_when_where_and_what_failed() -> None:
    why = Explained(attempts=(Attempt("a", 3.0, "it refused the connection"), Attempt("b", 20.0)))
    told = story(why, replica="b")
    assert "After 3 ms it was sent to a, where it failed: it refused the connection." in told
    assert "After 20 ms it was sent to b." in told
    assert "It was answered by b on node1" in told


def test_fallbacks_say_which_models_did_not_serve_and_why() -> None:
    why = Explained(asked="chat", skipped=(Skipped("big", "no_endpoint"), Skipped("mid", "odd"), Skipped("low", "")))
    told = story(why)
    assert "It asked for chat, which is model big." in told
    assert "Model big did not serve: no replica served the model and none was on its way (no_endpoint)." in told
    assert "Model mid did not serve: odd." in told
    assert "Model low did not serve: the reason is not known." in told
    assert "So its fallback, model smollm2, got it." in told


def test_a_model_whose_fallbacks_did_not_serve_either_is_said_to_have_been_waited_for() -> None:
    why = Explained(skipped=(Skipped("smollm2", "model_loading"), Skipped("small", "no_endpoint")), loading=True)
    told = story(why, queue_ms=120.0)
    assert "No fallback did, so model smollm2 was waited for." in told
    assert "No fallback did" not in story(why, status=503, error_code="model_loading")


def test_the_replica_that_answered_was_the_first_choice_when_no_attempt_is_written() -> None:
    why = Explained(considered=(Considered("smollm2-1", 0.25), Considered("smollm2-2", 0.5)))
    assert "Of 2 replicas smollm2-1 was chosen: its load was the lowest" in story(why)


def test_no_fallback_is_said_to_have_served_when_none_did() -> None:
    why = Explained(skipped=(Skipped("big", "no_endpoint"),))
    assert "fallback" not in story(why, model="big", status=503, error_code="no_endpoint", **NOT_REACHED)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"status": 200, "node": ""}, "It was answered by smollm2-1 in 285 ms (HTTP 200)."),
        ({"status": 200, "replica": "", "node": ""}, "It was answered in 285 ms (HTTP 200)."),
        (
            {"status": 429, "error_code": "budget_exceeded", **NOT_REACHED},
            "After 285 ms it was refused: a budget was used up (HTTP 429, budget_exceeded).",
        ),
        (
            {"status": 504, "error_code": "engine_silent"},
            "After 285 ms it failed at smollm2-1 on node1: the engine sent nothing for too long "
            "(HTTP 504, engine_silent).",
        ),
        ({"status": 400}, "After 285 ms it was refused at smollm2-1 on node1 (HTTP 400)."),
        (
            {"status": 499, "error_code": "client_left"},
            "After 285 ms it was over at smollm2-1 on node1: the client went away before the answer was complete "
            "(logged as HTTP 499).",
        ),
    ],
)
def test_how_it_ended(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in story(None, **fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"cached_tokens": 8}, "It read 12 tokens, 8 of them from the cache, and wrote 20."),
        ({"cached_tokens": 0}, "It read 12 tokens, 0 of them from the cache, and wrote 20."),
        ({"reasoning_tokens": 5}, "and wrote 20, 5 of them reasoning."),
        ({"prompt_tokens": 1, "completion_tokens": 1}, "It read 1 token and wrote 1."),
        ({"prompt_tokens": None, "completion_tokens": 1}, "It wrote 1 token; how many it read is not known."),
        ({"completion_tokens": None, "prompt_tokens": 1}, "It read 1 token; how many it wrote is not known."),
        ({"estimated": True}, "These counts are estimates: the engine did not report all of them."),
        ({"completion_tokens": None}, "It read 12 tokens; how many it wrote is not known."),
        ({"prompt_tokens": None}, "It wrote 20 tokens; how many it read is not known."),
        ({"prompt_tokens": None, "completion_tokens": None}, "How many tokens it used is not known."),
        ({"cost": 250_000_000}, "It cost 2.50 EUR."),
        ({"cost": 0}, "It cost nothing."),
    ],
)
def test_what_it_used(fields: dict[str, Any], sentence: str) -> None:
    assert sentence in story(None, **fields)


def test_a_request_that_reached_no_engine_says_nothing_of_tokens_or_prices() -> None:
    told = story(None, status=401, error_code="key_unknown", **NOT_REACHED)
    assert "tokens" not in told
    assert "price" not in told


def test_every_code_of_the_gateway_has_a_meaning() -> None:
    assert set(MEANINGS) >= set(ERRORS)


words = st.text(st.characters(codec="utf-8", exclude_characters="N"), max_size=12)
millis = st.floats(0, 1e7)
counts = st.none() | st.integers(0, 10**8)
explanations = st.builds(
    Explained,
    asked=words,
    band=words,
    routing_profile=st.sampled_from(("", "least_load", "round_robin", "prefix_affinity")),
    queued=st.booleans(),
    position=st.integers(0, 100),
    loading=st.booleans(),
    reserved_tokens=st.integers(0, 10**6),
    affinity=st.sampled_from(("", "hit", "miss", "saturated", "odd")),
    considered=st.lists(st.builds(Considered, words, st.none() | st.floats(0, 9), words), max_size=4).map(tuple),
    attempts=st.lists(st.builds(Attempt, words, millis, words), max_size=3).map(tuple),
    skipped=st.lists(st.builds(Skipped, words, words | st.sampled_from(sorted(MEANINGS))), max_size=3).map(tuple),
)


@given(
    st.builds(
        Record,
        request_id=words,
        at=st.just(0.0),
        route=words,
        model=words,
        replica=words,
        node=words,
        status=st.integers(200, 599),
        error_code=words | st.sampled_from(sorted(MEANINGS)),
        streamed=st.booleans(),
        prompt_tokens=counts,
        cached_tokens=counts,
        completion_tokens=counts,
        reasoning_tokens=counts,
        estimated=st.booleans(),
        queue_ms=millis,
        first_token_ms=st.none() | millis,
        total_ms=millis,
        adapter=words,
        cost=counts,
        band=words,
    ),
    st.none() | explanations,
)
def test_any_request_has_a_story_of_whole_sentences(record: Record, why: Explained | None) -> None:
    told = in_words(record, why, "EUR")
    assert len(told) >= 2
    assert all(sentence.endswith(".") for sentence in told)
    assert not any("None" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"replica": "", "error_code": "no_endpoint"}, True),
        ({"replica": "", "error_code": "client_left"}, True),
        ({"error_code": "body_invalid"}, True),  # the replica's route lacks what the body asks for
        ({"replica": "", "error_code": "body_invalid"}, False),
        ({"replica": "", "model": "", "error_code": "client_left"}, False),
        ({"replica": "", "error_code": "model_forbidden"}, False),
        ({"replica": "", "error_code": "budget_exceeded"}, False),
    ],
)
def test_more_could_be_told_only_of_requests_for_which_a_replica_was_looked_for(
    fields: dict[str, str], expected: bool
) -> None:
    record = ended(**fields)
    assert was_looked_for(record.model, record.replica, record.error_code) is expected


@given(explanations)
def test_what_is_stored_is_read_back(why: Explained) -> None:
    assert read(msgspec.json.decode(msgspec.json.encode(why))) == why


@pytest.mark.parametrize("stored", [None, [], "x", {"attempts": 3}, {"considered": [{"score": 1}]}])
def test_what_another_version_stored_is_no_explanation(stored: object) -> None:
    assert read(stored) is None
