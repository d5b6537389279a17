"""Single decisions of the plan that a story does not reach."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from catalog import spec
from nodes.plans import BackOff, Drain, Forget, Recover, Start, Stop
from nodes.reconcile import plan
from nodes.state import Backoff, Cluster, Load, Node, Replica, Shard, Status, profile_digest
from tests.nodes.fleets import NOW
from tests.nodes.test_placement import CPU, GOOD, MODEL

AGO = NOW - timedelta(minutes=1)
DIGEST = profile_digest(MODEL, CPU)
SERVING = Replica(
    "r",
    "m",
    "cpu",
    DIGEST,
    made_at=AGO,
    state="ready",
    state_at=AGO,
    ready_at=AGO,
    shards=(Shard("good", 0, "ready", 4),),
)


def decide(*replicas: Replica, node: Node = GOOD, model: spec.Model = MODEL, **fields: object) -> tuple[object, ...]:
    cluster = Cluster(nodes=(node,), models=(model,), replicas=replicas)
    return plan(replace(cluster, **fields), NOW).actions  # type: ignore[arg-type]


def test_nothing_is_done_when_all_is_well() -> None:
    assert decide(SERVING) == ()


def test_an_external_model_and_one_without_profiles_run_nowhere() -> None:
    external = replace(MODEL, external=spec.External("https://x", "y"))
    assert decide(model=external) == ()
    assert decide(model=replace(MODEL, profiles=())) == ()


def test_a_replica_is_named_after_its_model_and_never_twice_at_once() -> None:
    strange = replace(MODEL, name="Org/Model:7B")
    [start] = decide(model=strange)
    assert isinstance(start, Start)
    assert start.replica.startswith("org-model-7b-")
    [nameless] = decide(model=replace(MODEL, name="模型"))
    assert isinstance(nameless, Start)
    assert nameless.replica.startswith("model-")


def test_models_that_have_least_are_served_first() -> None:
    greedy = replace(MODEL, name="a", scaling=spec.Scaling(3, 3))
    needy = replace(MODEL, name="b")
    one = replace(SERVING, model="a", profile_digest=profile_digest(greedy, CPU))
    [start] = plan(Cluster(nodes=(replace(GOOD, cores=64),), models=(greedy, needy), replicas=(one,)), NOW).actions
    assert isinstance(start, Start)
    assert start.model == needy


def test_only_one_failure_is_counted_when_two_replicas_fail_together() -> None:
    failed = replace(SERVING, state="failed")
    actions = decide(failed, replace(failed, name="s"))
    assert [type(action) for action in actions] == [Stop, Stop, BackOff]
    [held] = [action.backoff for action in actions if isinstance(action, BackOff)]
    assert (held.failures, held.reason) == (1, "its engine failed")


def test_a_replica_that_stopped_with_its_machine_is_rebuilt_at_once() -> None:
    actions = decide(replace(SERVING, state="stopped", shards=(Shard("good", 0, "stopped", 4),)))
    assert [type(action) for action in actions] == [Stop, Start]
    assert isinstance(actions[0], Stop)
    assert "stopped without being told to" in actions[0].why
    told = replace(SERVING, state="stopped", reason="the agent of its node was stopped")
    stop = decide(replace(told, shards=(Shard("good", 0, "stopped", 4),)))[0]
    assert isinstance(stop, Stop)
    assert stop.why == "replica r is over: the agent of its node was stopped"


def test_failures_of_a_profile_that_has_changed_do_not_count() -> None:
    actions = decide(replace(SERVING, state="failed", profile_digest="old"))
    assert [type(action) for action in actions] == [Stop, Start]


def test_a_profile_that_waits_is_not_placed_and_says_until_when() -> None:
    held = Backoff("m", "cpu", DIGEST, 2, NOW + timedelta(seconds=9), "out of memory")
    decided = plan(Cluster(nodes=(GOOD,), models=(MODEL,), backoffs=(held,)), NOW)
    assert decided.actions == ()
    [(_, [turned])] = decided.reasons
    assert turned.reason == "waits until 12:00:09 UTC after 2 failures in a row: out of memory"


def test_another_profile_is_tried_while_one_waits() -> None:
    model = replace(MODEL, profiles=(CPU, replace(CPU, name="other")))
    held = Backoff("m", "cpu", DIGEST, 1, NOW + timedelta(seconds=9))
    [start] = decide(model=model, backoffs=(held,))
    assert isinstance(start, Start)
    assert start.profile.name == "other"


def test_a_backoff_ends_with_health_or_change() -> None:
    held = Backoff("m", "cpu", DIGEST, 1, AGO)
    assert decide(SERVING, backoffs=(held,)) == ()
    healthy = replace(SERVING, ready_at=NOW - timedelta(minutes=3))
    assert isinstance(decide(healthy, backoffs=(held,))[0], Recover)
    assert isinstance(decide(SERVING, backoffs=(replace(held, profile_digest="old"),))[0], Recover)


def test_a_profile_that_left_its_model_drains_its_replicas() -> None:
    actions = decide(replace(SERVING, profile="gone"))
    assert isinstance(actions[0], Drain)
    assert actions[0].why == "replica r is drained: profile gone left model m"


def test_a_replica_that_does_not_serve_yet_is_stopped_without_a_drain() -> None:
    assert isinstance(decide(replace(SERVING, state="loading"), model=replace(MODEL, name="n"))[0], Stop)


def test_a_replica_without_a_node_is_forgotten() -> None:
    assert isinstance(decide(replace(SERVING, shards=()))[0], Forget)
    assert isinstance(decide(replace(SERVING, shards=(Shard("removed"),)))[0], Forget)


def test_load_figures_from_before_the_drain_do_not_end_it() -> None:
    begun = NOW - timedelta(seconds=5)
    draining = replace(SERVING, wanted="drain", wanted_at=begun)
    off = replace(MODEL, scaling=spec.Scaling(0, 0))
    assert decide(replace(draining, load=Load(begun, in_flight=0)), model=off) == ()
    [stop] = decide(replace(draining, load=Load(NOW, in_flight=0)), model=off)
    assert isinstance(stop, Stop)


def test_the_time_that_starting_may_take_does_not_run_while_nobody_listens() -> None:
    slow = replace(SERVING, state="loading", state_at=NOW - timedelta(hours=2), ready_at=None)
    assert isinstance(decide(slow)[0], Stop)
    assert decide(slow, since=AGO) == ()
    assert decide(slow, node=replace(GOOD, state="unreachable")) == ()
    assert decide(replace(slow, state="fetching")) == ()


def test_a_stop_is_waited_for_until_its_node_says_that_it_is_done() -> None:
    stopping = replace(SERVING, wanted="stop", wanted_at=NOW - timedelta(days=1))
    off = replace(MODEL, scaling=spec.Scaling(0, 0))
    assert decide(stopping, model=off, node=replace(GOOD, state="unreachable")) == ()
    assert decide(stopping, model=off) == ()
    stopped = replace(stopping, shards=(replace(SERVING.shards[0], state="stopped"),))
    assert isinstance(decide(stopped, model=off)[0], Forget)


def test_demand_is_forgotten_after_the_idle_time() -> None:
    model = replace(MODEL, scaling=spec.Scaling(0, 1, idle_timeout_s=60))
    recent = Status("m", demand_at=NOW - timedelta(seconds=59))
    assert isinstance(decide(model=model, statuses=(recent,))[0], Start)
    assert decide(model=model, statuses=(replace(recent, demand_at=NOW - timedelta(seconds=60)),)) == ()


def test_nothing_else_is_swapped_out_while_one_is_on_its_way() -> None:
    model = replace(MODEL, scaling=spec.Scaling(2, 2), profiles=(replace(CPU, reserved_cores=4, args=("--new",)),))
    old = replace(SERVING, profile_digest="old")
    going = replace(old, name="s", wanted="drain", wanted_at=NOW)
    assert decide(old, going, model=model) == ()


def test_no_old_replica_is_taken_down_for_a_new_one_that_fits_nowhere() -> None:
    model = replace(MODEL, profiles=(replace(CPU, required_memory_gb=900),))
    assert decide(replace(SERVING, profile_digest="old"), model=model) == ()
