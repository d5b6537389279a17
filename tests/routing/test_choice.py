"""Scheduling, ejection and the metric mappings: the pure parts of choosing an endpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import ejection, mappings
from routing.ejection import WELL, Health
from routing.mappings import LLAMACPP, SGLANG, VLLM, Load, Mapping, mapping_for, read
from routing.scheduling import choose, load


@dataclass(frozen=True)
class Place:
    name: str = "a"
    weight: int = 1
    running: int | None = 0
    waiting: int | None = 0
    kv_used: float | None = None
    sent: int = 0
    in_flight: int = 0


counts = st.none() | st.integers(0, 20)
places = st.lists(
    st.builds(
        Place,
        weight=st.integers(0, 8),
        running=counts,
        waiting=counts,
        kv_used=st.none() | st.floats(0, 1),
        sent=st.integers(0, 9),
        in_flight=st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


@given(places, st.integers(0, 1000))
def test_nothing_known_to_be_less_loaded_is_passed_over(candidates: list[Place], turn: int) -> None:
    chosen = choose(candidates, turn)
    assert chosen is not None
    known = [each for candidate in candidates if (each := load(candidate)) is not None]
    mine = load(chosen)
    if mine is not None:
        assert mine == min(known)


@given(places)
def test_equals_are_served_in_turn(candidates: list[Place]) -> None:
    same = [Place(name=str(index)) for index in range(len(candidates))]
    chosen = {choose(same, turn) for turn in range(len(same))}
    assert chosen == set(same)


def test_unknown_load_is_never_taken_for_idle() -> None:
    busy, unknown = Place("busy", running=3), Place("unknown", running=None)
    assert choose([unknown, busy, Place("free")], 0) == Place("free")
    assert choose([Place("u", running=None, in_flight=9), busy], 0) == busy
    assert choose([], 0) is None
    assert choose([unknown], 5) == unknown


def test_requests_sent_since_the_scrape_and_the_weight_count() -> None:
    assert choose([Place("a", sent=2), Place("b", running=1)], 0) == Place("b", running=1)
    big = Place("big", weight=10, running=5)
    assert choose([big, Place("small", running=1)], 0) == big


def test_the_cache_decides_between_equals_only_when_all_say_how_full_it_is() -> None:
    full, empty = Place("full", kv_used=0.9), Place("empty", kv_used=0.1)
    assert choose([full, empty], 0) == empty
    assert choose([full, Place("silent")], 0) == full


# --- ejection --------------------------------------------------------------------------------------------------------
def after(*outcomes: str, soft: bool = False) -> tuple[Health, float]:
    health, now = WELL, 0.0
    for outcome in outcomes:
        health = ejection.failed(health, now, soft=soft) if outcome == "fail" else WELL
    return health, now


def test_three_failures_in_a_row_eject_and_a_success_between_does_not() -> None:
    assert after("fail", "fail")[0].until is None
    assert after("fail", "fail", "ok", "fail", "fail")[0].until is None
    health, now = after("fail", "fail", "fail")
    assert health.until == now + ejection.FIRST_COOLING_S
    assert not ejection.may_try(health, now)
    assert ejection.may_try(health, now + ejection.FIRST_COOLING_S)


def test_one_probe_goes_and_others_wait_for_it() -> None:
    health, _ = after("fail", "fail", "fail")
    probing = ejection.tried(health)
    assert not ejection.may_try(probing, 100)
    assert ejection.may_try(ejection.abandoned(probing), 100)
    assert ejection.tried(WELL) is WELL


@given(st.integers(1, 30))
def test_the_cooling_time_grows_to_its_bound(failed_probes: int) -> None:
    health, _ = after("fail", "fail", "fail")
    now, last = 0.0, 0.0
    for _ in range(failed_probes):
        assert health.until is not None
        cooling = health.until - now
        assert last <= cooling <= ejection.LONGEST_COOLING_S
        last, now = cooling, health.until
        health = ejection.failed(ejection.tried(health), now, soft=False)


def test_a_late_failure_of_an_ejected_endpoint_changes_only_how_hard_it_failed() -> None:
    health, _ = after("fail", "fail", "fail", soft=True)
    assert health.soft
    assert ejection.failed(health, 1.0, soft=True) is health
    hard = ejection.failed(health, 1.0, soft=False)
    assert (hard.soft, hard.until) == (False, health.until)


# --- mappings --------------------------------------------------------------------------------------------------------
def test_llamacpp_is_read_with_and_without_its_cache_figure() -> None:
    text = "# HELP x\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    assert read(text, LLAMACPP) == Load(2, 1, None)
    assert read(text + "llamacpp:kv_cache_usage_ratio 0.25\n", LLAMACPP) == Load(2, 1, 0.25)


def test_vllm_adds_engines_and_takes_the_fullest_cache_under_either_name() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting_by_reason{reason="x"} 7\n'
    )
    assert read(text, VLLM) == Load(5, 1, None)
    assert read(text + 'vllm:kv_cache_usage_perc{engine="0"} 0.5\n', VLLM).kv_used == 0.5
    assert read(text + 'vllm:gpu_cache_usage_perc{engine="0"} 0.7\n', VLLM).kv_used == 0.7


def test_sglangs_ranks_are_counted_once() -> None:
    text = (
        'sglang:num_running_reqs{model_name="m",tp_rank="0"} 4\nsglang:num_running_reqs{model_name="m",tp_rank="1"} 4\n'
        'sglang:num_queue_reqs{tp_rank="0",pp_rank="0"} 0\nsglang:token_usage{tp_rank="0"} 1.5\n'
    )
    assert read(text, SGLANG) == Load(4, 0, 1.0)


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running NaN\n", "vllm:num_requests_running x\n", "<html>"])
def test_what_cannot_be_read_is_unknown_and_not_zero(text: str) -> None:
    assert read(text, VLLM) == mappings.UNKNOWN


def test_a_mapping_that_names_running_is_complete_and_an_empty_one_means_vllm() -> None:
    own = Mapping(running=("busy",))
    assert mapping_for("vllm", own) is own
    assert read("busy 2\nvllm:num_requests_waiting 9\n", own) == Load(2, None, None)
    assert mapping_for("other", Mapping(waiting=("w",))) is VLLM
    assert mapping_for("sglang") is SGLANG
