"""Scheduling, ejection and the metric mappings: the pure parts of choosing an endpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.spec import ROUTING_PROFILES, Metrics
from routing import ejection, mappings
from routing.affinity import prefix_keys
from routing.ejection import WELL, Health
from routing.mappings import LLAMACPP, SGLANG, VLLM, Load, mapping_for, read
from routing.scheduling import REMEMBERED_GONE, Candidate, Chooser, least_loaded, load, saturated


@dataclass(frozen=True)
class Place(Candidate):
    replica: str = "a"
    weight: int = 1
    running: int | None = 0
    waiting: int | None = 0
    kv_used: float | None = None
    in_flight: int = 0
    in_flight_then: int = 0


counts = st.none() | st.integers(0, 20)
places = st.lists(
    st.builds(
        Place,
        replica=st.integers().map(str),
        weight=st.integers(0, 8),
        running=counts,
        waiting=counts,
        kv_used=st.none() | st.floats(0, 1),
        in_flight=st.integers(0, 9),
        in_flight_then=st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.replica,
)
LONG = prefix_keys(bytes(range(256)) * 16, 0, 4096)
OTHER = prefix_keys(bytes(range(255, -1, -1)) * 16, 0, 4096)


@given(places, st.integers(0, 1000))
def test_nothing_known_to_be_less_loaded_is_passed_over(candidates: list[Place], turn: int) -> None:
    chosen = least_loaded(candidates, turn)
    assert chosen is not None
    known = [each for candidate in candidates if (each := load(candidate)) is not None]
    mine = load(chosen)
    if mine is not None:
        assert mine == min(known)


@given(places)
def test_equals_are_served_in_turn(candidates: list[Place]) -> None:
    same = [Place(str(index)) for index in range(len(candidates))]
    chosen = {least_loaded(same, turn) for turn in range(len(same))}
    assert chosen == set(same)


def test_unknown_load_is_never_taken_for_idle() -> None:
    busy, unknown = Place("busy", running=3), Place("unknown", running=None)
    assert least_loaded([unknown, busy, Place("free")], 0) == Place("free")
    assert least_loaded([Place("u", running=None, in_flight=9), busy], 0) == busy
    assert Chooser("least_load").choose([]) is None
    assert least_loaded([unknown], 5) == unknown


def test_requests_sent_and_ended_since_the_scrape_and_the_weight_count() -> None:
    assert least_loaded([Place("a", in_flight=2), Place("b", running=1)], 0) == Place("b", running=1)
    ended = Place("ended", running=2, in_flight_then=2)
    assert least_loaded([Place("a", running=1), ended], 0) == ended
    assert load(Place(running=1, waiting=3, in_flight=1, in_flight_then=2)) == 3
    assert load(Place(running=0, in_flight=1, in_flight_then=2)) == 1
    big = Place("big", weight=10, running=5)
    assert least_loaded([big, Place("small", running=1)], 0) == big


def test_the_cache_decides_between_equals_only_when_all_say_how_full_it_is() -> None:
    full, empty = Place("full", kv_used=0.9), Place("empty", kv_used=0.1)
    assert least_loaded([full, empty], 0) == empty
    assert least_loaded([full, Place("silent")], 0) == full


def test_an_explanation_shows_every_load_and_none_for_the_unknown() -> None:
    assert [load(each) for each in (Place("a", weight=2, running=1), Place("b", running=None))] == [0.5, None]


# --- profiles --------------------------------------------------------------------------------------------------------
@given(places, st.sampled_from(ROUTING_PROFILES), st.lists(st.sampled_from([(), LONG, OTHER]), max_size=20))
def test_every_profile_chooses_one_of_the_candidates(
    candidates: list[Place], profile: str, prompts: list[tuple[int, ...]]
) -> None:
    chooser = Chooser(profile)
    for prompt in prompts:
        assert chooser.choose(candidates, prompt) in candidates
    assert chooser.choose([], LONG) is None
    assert chooser.choose(candidates[:1], LONG) == candidates[0]
    assert not chooser.last_affinity


def test_least_load_takes_the_least_loaded_and_equals_in_turn() -> None:
    chooser = Chooser("least_load")
    assert chooser.choose([Place("busy", running=1), Place("free")]) == Place("free")
    assert {chooser.choose([Place("a"), Place("b")]) for _ in range(2)} == {Place("a"), Place("b")}


@given(st.lists(st.sets(st.integers(0, 4), min_size=2), max_size=40))
def test_round_robin_takes_who_had_no_turn_for_longest(rounds: list[set[int]]) -> None:
    chooser = Chooser("round_robin")
    last: dict[str, int] = {}
    for turn, present in enumerate(rounds, 1):
        candidates = [Place(str(each), running=each) for each in sorted(present)]
        chosen = chooser.choose(candidates)
        assert chosen is not None
        assert last.get(chosen.replica, 0) == min(last.get(each.replica, 0) for each in candidates)
        last[chosen.replica] = turn


@given(st.lists(st.integers(0, 5), min_size=2, max_size=5), st.integers(1, 4))
def test_weighted_gives_each_exactly_its_weight_in_every_cycle(weights: list[int], cycles: int) -> None:
    chooser = Chooser("weighted")
    candidates = [Place(str(index), weight=weight) for index, weight in enumerate(weights)]
    total = sum(max(1, weight) for weight in weights)
    went = Counter(chooser.choose(candidates) for _ in range(cycles * total))
    assert went == {each: cycles * max(1, each.weight) for each in candidates}


@given(st.lists(st.sets(st.integers(0, 3), min_size=2), max_size=40))
def test_weighted_owes_nobody_more_than_a_cycle_whoever_comes_and_goes(rounds: list[set[int]]) -> None:
    chooser = Chooser("weighted")
    for present in rounds:
        chooser.choose([Place(str(each), weight=each + 1) for each in sorted(present)])
        assert all(abs(owed) <= 2 * 10 for owed in chooser._standing.values())


@pytest.mark.parametrize("profile", ["round_robin", "weighted"])
def test_what_is_remembered_of_replicas_that_are_gone_is_bounded(profile: str) -> None:
    chooser = Chooser(profile)
    for number in range(500):
        chooser.choose([Place(f"a{number}"), Place(f"b{number}")])
    assert len(chooser._standing) <= 2 + REMEMBERED_GONE
    chooser.keep(["a499"])
    assert set(chooser._standing) <= {"a499"}


# --- affinity --------------------------------------------------------------------------------------------------------
def test_requests_that_share_a_prefix_go_where_it_was_seen_and_others_where_it_is_calm() -> None:
    chooser = Chooser("prefix_affinity")
    first, second = Place("a", weight=8), Place("b", weight=8, running=1)
    assert (chooser.choose([first, second], LONG), chooser.last_affinity) == (first, "miss")
    first, second = Place("a", weight=8, running=3), Place("b", weight=8, running=2)
    assert (chooser.choose([first, second], LONG), chooser.last_affinity) == (first, "hit")
    assert (chooser.choose([first, second], OTHER), chooser.last_affinity) == (second, "miss")
    assert (chooser.choose([first, second], ()), chooser.last_affinity) == (second, "")


def test_new_prefixes_are_spread_over_equals_whatever_goes_where_it_was_seen() -> None:
    chooser = Chooser("prefix_affinity")
    same = [Place(name, weight=8) for name in "abc"]
    homes = []
    for number in range(6):
        prompt = prefix_keys(bytes([number]) * 512, 0, 512)
        homes.append(chooser.choose(same, prompt))
        for _ in range(number):
            assert chooser.choose(same, prompt) == homes[-1]
    assert Counter(homes) == dict.fromkeys(same, 2)


def test_a_prefix_outgrows_its_saturated_replica_and_comes_back_to_it() -> None:
    chooser = Chooser("prefix_affinity")
    home, other, third = Place("a", weight=4), Place("b", weight=4), Place("c", weight=4, running=1)
    chooser.choose([home, Place("b", running=1), third], LONG)
    full = Place("a", weight=4, running=4)
    assert (chooser.choose([full, other, third], LONG), chooser.last_affinity) == (other, "saturated")
    busier = Place("b", weight=4, running=2)
    assert (chooser.choose([full, busier, third], LONG), chooser.last_affinity) == (busier, "hit")
    assert (chooser.choose([home, busier, third], LONG), chooser.last_affinity) == (home, "hit")
    chooser.keep(["b", "c"])
    assert (chooser.choose([home, busier, third], LONG), chooser.last_affinity) == (busier, "hit")


@given(places, st.integers(0, 5))
def test_who_is_full_or_far_busier_than_the_others_is_saturated(candidates: list[Place], index: int) -> None:
    place = candidates[index % len(candidates)]
    weight = max(1, place.weight)
    known = load(place)
    counted = place.in_flight if known is None else known * weight
    if counted >= weight:
        assert saturated(place, candidates)
    if counted == 0:
        assert not saturated(place, candidates)


def test_an_endpoint_whose_load_is_unknown_is_judged_by_what_we_have_open_there() -> None:
    others = [Place("b", weight=16), Place("c", weight=16)]
    assert not saturated(Place("a", weight=16, running=None, in_flight=4), others)
    assert saturated(Place("a", weight=16, running=None, in_flight=5), others)
    assert saturated(Place("a", weight=16, running=0, in_flight=5), others)
    assert saturated(Place("a", weight=2, running=None, in_flight=2), [])


def test_an_adapters_holders_are_taken_while_one_is_not_saturated() -> None:
    chooser = Chooser("least_load")
    holder, idle = Place("a", weight=8, running=2), Place("b", weight=8)
    assert chooser.choose([holder, idle], prefer=frozenset({"a", "gone"})) == holder
    assert chooser.choose([Place("a", weight=8, running=8), idle], prefer=frozenset({"a"})) == idle
    assert chooser.choose([holder, idle], prefer=frozenset()) == idle
    assert chooser.choose([holder, idle], prefer=frozenset({"b"})) == idle
    calmer = Place("c", weight=8, running=1)
    assert chooser.choose([holder, idle, calmer], prefer=frozenset({"a", "c"})) == calmer


class Engine:
    """One that serves as many requests at once as its weight, each for `takes_s`, and is scraped once a second."""

    def __init__(self, replica: str, takes_s: float) -> None:
        self.replica, self.weight, self.takes_s = replica, 4, takes_s
        self.running: int | None = 0
        self.waiting: int | None = 0
        self.kv_used: float | None = None
        self.open: list[float] = []
        self.in_flight_then, self.scraped_at = 0, 0.0

    @property
    def in_flight(self) -> int:
        return len(self.open)

    def until(self, now: float) -> None:
        self.open = [end for end in self.open if end > now]
        if now - self.scraped_at >= 1:
            self.running = self.in_flight_then = len(self.open)
            self.scraped_at = now


def test_a_slowed_replica_loses_new_work_within_two_seconds() -> None:
    chooser = Chooser("prefix_affinity")
    engines = [Engine(name, 0.2) for name in "abc"]
    home = chooser.choose(engines, LONG)
    assert home is not None
    got: Counter[str] = Counter()
    for step in range(300):
        now = step / 20  # 20 requests a second, all with one prefix
        if now == 5:
            home.takes_s = 1e6
        for engine in engines:
            engine.until(now)
        chosen = chooser.choose(engines, LONG)
        assert chosen is not None
        chosen.open.append(now + chosen.takes_s)
        got[f"{chosen.replica} {'before' if now < 5 else 'soon' if now < 7 else 'after'}"] += 1
    assert got[f"{home.replica} before"] > 50
    assert got[f"{home.replica} after"] == 0


@given(st.integers(2, 5), st.integers(1, 8), st.integers(1, 60))
def test_one_hot_prefix_makes_no_hot_spot(count: int, weight: int, requests: int) -> None:
    chooser = Chooser("prefix_affinity")
    open_at = [0] * count
    for _ in range(requests):
        candidates = [
            Place(str(index), weight=weight, running=None, in_flight=flying) for index, flying in enumerate(open_at)
        ]
        chosen = chooser.choose(candidates, LONG)
        assert chosen is not None
        open_at[int(chosen.replica)] += 1
    if requests <= count * weight:
        assert max(open_at) <= weight
    mean = requests / count
    assert max(open_at) <= 1.25 * mean + max(weight / 4, 2) + 1


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
    own = Metrics(running=("busy",))
    assert mapping_for("vllm", own) is own
    assert read("busy 2\nvllm:num_requests_waiting 9\n", own) == Load(2, None, None)
    assert mapping_for("other", Metrics(waiting=("w",))) is VLLM
    assert mapping_for("sglang") is SGLANG
