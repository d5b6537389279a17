from __future__ import annotations

import time
from dataclasses import replace

import pytest

from catalog import spec
from routing import ejection, mappings
from routing.scheduling import load
from routing.table import EMPTY, Failing, Rules, Served, Standing, Target, build, candidates, header_text, nowhere
from tests.routing.gateways import contents, endpoint, grant, key_of


def targets(count: int) -> tuple[Target, ...]:
    made = build(contents(*(endpoint(8000 + each, f"m-{each}") for each in range(count))), EMPTY)
    return made.targets


def served(*places: Target, states: tuple[str, ...] = ()) -> Served:
    return Served("m", b'"m"', Standing(Rules(), "least_load"), places, states)


def test_only_usable_endpoints_become_targets_and_the_rest_tell_what_is_coming() -> None:
    table = build(
        contents(
            endpoint(1, "a"),
            endpoint(2, "b", draining=True),
            endpoint(3, "c", lost=True),
            endpoint(None, "d"),
            endpoint(5, "e", state="loading"),
            endpoint(6, "f", host=""),
        ),
        EMPTY,
    )
    assert [target.replica for target in table.targets] == ["a"]
    assert sorted(table.names["m"].states) == ["loading", "ready", "ready"]


def test_each_target_carries_its_own_engine_key_and_ipv6_hosts_are_bracketed() -> None:
    (target,) = build(contents(endpoint(1, host="::1")), EMPTY).targets
    assert target.request_head.startswith(b" HTTP/1.1\r\nHost: [::1]:1\r\n")
    assert f"Bearer {key_of('m-1')}\r\n".encode() in target.request_head


def test_aliases_lead_to_their_model_and_never_hide_another_models_name() -> None:
    models = [spec.Model(name="a", aliases=("x", "b")), spec.Model(name="b", aliases=("x",))]
    table = build(contents(models=models), EMPTY)
    assert {name: each.name for name, each in table.names.items()} == {"a": "a", "x": "a", "b": "b"}
    assert sorted(table.visible(grant(models=frozenset({"a"})))) == ["a", "x"]
    assert sorted(table.visible(grant())) == ["a", "b", "x"]


def test_a_replica_that_moved_or_changed_its_model_starts_unknown() -> None:
    first = build(contents(endpoint(1)), EMPTY)
    first.targets[0].running = 3
    assert build(contents(endpoint(1)), first).targets[0].running == 3
    assert build(contents(endpoint(2)), first).targets[0].running is None
    assert build(contents(endpoint(1, engine="vllm")), first).targets[0].running is None


def test_own_requests_count_as_they_are_now_and_those_of_others_as_they_were_at_the_scrape() -> None:
    (target,) = targets(1)
    target.weight = 1
    target.begin()
    target.scraping()
    target.scraped(mappings.Load(4, 1, None), 1.0)
    assert load(target) == 4 + 1
    target.begin()
    assert load(target) == 4 + 2
    target.end()
    target.end()
    assert load(target) == 4


def test_own_requests_that_begin_or_end_during_a_scrape_are_not_taken_for_those_of_others() -> None:
    (target,) = targets(1)
    target.weight = 1
    target.scraping()
    target.begin()
    assert load(target) is None
    target.scraped(mappings.Load(1, 0, None), 1.0)
    assert load(target) == 1
    target.scraping()
    target.end()
    target.scraped(mappings.Load(1, 0, None), 2.0)
    assert load(target) == 0


def test_candidates_leave_out_the_tried_and_the_ejected_and_keep_soft_ones_as_last_resort() -> None:
    one, two = targets(2)
    assert candidates(served(one, two), [], 0) == [one, two]
    assert candidates(served(one, two), [one], 0) == [two]
    one.health = ejection.Health(failures=3, ejections=1, until=10, soft=True)
    assert candidates(served(one, two), [], 5) == [two]
    assert candidates(served(one, two), [], 11) == [one, two]
    assert candidates(served(one, two), [two], 5) == [one]
    one.health = ejection.Health(failures=3, ejections=1, until=10, soft=False)
    assert candidates(served(one, two), [two], 5) == []


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ((), "no_endpoint"),
        (("loading",), "model_loading"),
        (("failed", "fetching"), "model_loading"),
        (("failed",), "engine_down"),
        (("stopping",), "engine_down"),
    ],
)
def test_nowhere_to_go_has_its_own_code_for_each_reason(states: tuple[str, ...], code: str) -> None:
    refusal = nowhere(served(states=states), 0)
    assert (refusal.code, refusal.kind.status) == (code, 503)
    assert refusal.retry_after_s is not None
    assert "m" in refusal.message


def test_why_a_model_has_no_replica_is_for_operators_who_are_told_where_it_stands() -> None:
    """Where it finds no place names nodes, teams and what they hold: nothing for whoever has a key."""
    assert nowhere(served(states=()), 0).message == (
        "No replica serves model m and none is on its way. Ask an operator, who sees why with: llmgw why m"
    )
    assert nowhere(replace(served(states=()), name="it's m"), 0).message.endswith("""llmgw why 'it'"'"'s m'""")


def test_a_model_that_does_not_start_says_why_and_when_it_is_tried_again() -> None:
    soon = Failing("m", "killed by signal 9", time.time() + 400)
    refusal = nowhere(replace(served(states=()), failing=soon), 0)
    assert (refusal.code, refusal.kind.status) == ("engine_down", 503)
    assert "killed by signal 9" in refusal.message
    assert refusal.retry_after_s is not None
    assert 300 < refusal.retry_after_s <= 400
    due = replace(soon, next_try_at=0.0, reason="")
    assert nowhere(replace(served(states=("failed",)), failing=due), 0).retry_after_s == 5
    assert nowhere(replace(served(states=("loading",)), failing=due), 0).code == "model_loading"


def test_a_drained_replica_gets_nothing_new_and_is_still_counted() -> None:
    before = build(contents(endpoint(1)), EMPTY)
    (target,) = before.targets
    target.begin()
    after = build(contents(endpoint(1, draining=True)), before)
    assert (after.targets, after.leaving) == ((), (target,))
    assert after.names["m"].targets == ()
    assert build(contents(models=(spec.Model(name="m"),)), after).leaving == ()


def test_an_ejected_engine_says_when_it_is_tried_again() -> None:
    (target,) = targets(1)
    target.health = ejection.Health(until=12.0)
    assert nowhere(served(target), 5.0).retry_after_s == 7


def test_names_become_plain_ascii_in_headers() -> None:
    assert header_text("org/name:tag@rev") == b"org/name:tag@rev"
    assert header_text("a\r\nx: 1") == b"a%0D%0Ax: 1"
    assert header_text("中") == b"%E4%B8%AD"
