"""What holds of every plan and every placement, whatever the cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nodes import backoff
from nodes.expiry import expire
from nodes.holdings import in_use
from nodes.placement import Placed, Unplaced, place
from nodes.plans import BackOff, Drain, Forget, Plan, Start, Stop
from nodes.reconcile import plan
from nodes.state import Cluster, profile_digest
from nodes.summary import UsageLine, summarise
from tests.nodes.fleets import NOW, carried_out, clusters, some_model

some = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def starts(decided: Plan) -> list[Start]:
    return [action for action in decided.actions if isinstance(action, Start)]


def at_rest(cluster: Cluster) -> Cluster:
    """The cluster after as many passes as act."""
    for _ in range(40):
        decided = plan(cluster, NOW)
        if not decided.actions:
            return cluster
        cluster = carried_out(cluster, decided, NOW)
    raise AssertionError("passes do not come to rest")


@some
@given(clusters())
def test_passes_come_to_rest(cluster: Cluster) -> None:
    assert plan(at_rest(cluster), NOW).actions == ()


@some
@given(clusters(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(cluster: Cluster, random: object) -> None:
    def shuffled(items: tuple[object, ...]) -> tuple[object, ...]:
        mixed = list(items)
        random.shuffle(mixed)  # type: ignore[attr-defined]
        return tuple(mixed)

    mixed = replace(
        cluster,
        nodes=shuffled(cluster.nodes),
        models=shuffled(cluster.models),
        replicas=shuffled(cluster.replicas),
        backoffs=shuffled(cluster.backoffs),
        statuses=shuffled(cluster.statuses),
    )  # type: ignore[arg-type]
    assert plan(mixed, NOW) == plan(cluster, NOW)


@some
@given(clusters())
def test_at_most_one_replica_is_placed_and_never_where_it_must_not_be(cluster: Cluster) -> None:
    started = starts(plan(cluster, NOW))
    assert len(started) <= 1
    expired = {change.node for change in expire(cluster, NOW)}
    nodes = {node.name: node for node in cluster.nodes}
    for start in started:
        for part in start.parts:
            node = nodes[part.node]
            assert node.state == "ready"
            assert node.name not in expired
            assert not node.cordoned
            assert not node.draining
            assert start.profile.engine not in node.disabled_engines
            assert any(build.usable for build in node.builds)


@some
@given(clusters())
def test_every_replica_has_one_fate_at_a_time(cluster: Cluster) -> None:
    named = [a.replica for a in plan(cluster, NOW).actions if isinstance(a, Drain | Stop | Forget)]
    assert len(named) == len(set(named))


@some
@given(clusters())
def test_a_model_that_is_short_is_placed_or_every_node_says_why_not(cluster: Cluster) -> None:
    cluster = at_rest(replace(cluster, since=None))
    reasons = dict(plan(cluster, NOW).reasons)
    for model in cluster.models:
        live = [r for r in cluster.replicas if r.model == model.name and r.wanted == "run"]
        if not model.profiles or len(live) >= model.scaling.min:
            continue
        told = {(each.node, each.profile) for each in reasons[model.name]}
        names = [node.name for node in cluster.nodes] or [""]
        assert told == {(name, profile.name) for name in names for profile in model.profiles}


@some
@given(clusters())
def test_the_least_number_is_kept_whenever_it_can_be(cluster: Cluster) -> None:
    cluster = at_rest(replace(cluster, since=None, backoffs=()))
    held = {(each.model, each.profile) for each in cluster.backoffs if each.next_try_at > NOW}
    for model in cluster.models:
        live = [r for r in cluster.replicas if r.model == model.name and r.wanted == "run"]
        free = [profile for profile in model.profiles if (model.name, profile.name) not in held]
        if len(live) < model.scaling.min:
            assert isinstance(place(model, free, cluster), Unplaced)


@some
@given(clusters())
def test_more_than_the_most_are_not_left_running(cluster: Cluster) -> None:
    cluster = at_rest(cluster)
    for model in cluster.models:
        live = [r for r in cluster.replicas if r.model == model.name and r.wanted == "run"]
        leaving = [r for r in live if r.profile_digest == "old" or _draining(cluster, r.shards[0].node)]
        assert len(live) <= model.scaling.max + (1 if leaving else 0) or leaving


def _draining(cluster: Cluster, name: str) -> bool:
    return any(node.name == name and node.draining for node in cluster.nodes)


@some
@given(clusters())
def test_a_ready_replica_of_a_reachable_node_is_never_stopped_without_a_drain(cluster: Cluster) -> None:
    ready = {r.name for r in cluster.replicas if r.state == "ready" and r.wanted == "run"}
    assert not [a for a in plan(cluster, NOW).actions if isinstance(a, Stop) and a.replica in ready]


@some
@given(clusters())
def test_a_replica_with_requests_or_of_unknown_load_is_stopped_only_at_the_end_of_its_drain(cluster: Cluster) -> None:
    stopped = {action.replica for action in plan(cluster, NOW).actions if isinstance(action, Stop)}
    for replica in cluster.replicas:
        if replica.name in stopped and replica.wanted == "drain" and replica.state == "ready":
            idle = replica.load is not None and replica.load.in_flight == 0
            begun = replica.wanted_at or replica.made_at
            assert idle or NOW - begun >= cluster.rules.drain


@some
@given(clusters())
def test_failures_wait_longer_each_time(cluster: Cluster) -> None:
    before = {(held.model, held.profile, held.node, held.profile_digest): held for held in cluster.backoffs}
    for action in plan(cluster, NOW).actions:
        if isinstance(action, BackOff):
            new = action.backoff
            old = before.get((new.model, new.profile, new.node, new.profile_digest))
            assert new.failures == (old.failures + 1 if old else 1)
            assert new.next_try_at > NOW


@some
@given(st.integers(1, 60), st.floats(0, 1), st.floats(0, 1))
def test_backoff_never_shrinks_and_is_bounded(failures: int, jitter: float, later_jitter: float) -> None:
    assert backoff.delay(failures, jitter) <= backoff.delay(failures + 1, later_jitter)
    assert backoff.FIRST <= backoff.delay(failures, jitter) <= backoff.LONGEST


@some
@given(st.text(), st.text())
def test_jitter_is_a_share_and_its_own_for_each(one: str, other: str) -> None:
    assert 0 <= backoff.jitter_of(one, other) < 1
    assert backoff.jitter_of(one) == backoff.jitter_of(one)
    assert one == other or backoff.jitter_of(one) != backoff.jitter_of(other)


@some
@given(clusters(), some_model("new"))
def test_placement_counts_what_is_there(cluster: Cluster, model: object) -> None:
    assume(model.profiles)  # type: ignore[attr-defined]
    answer = place(model, model.profiles, cluster)  # type: ignore[arg-type, attr-defined]
    if isinstance(answer, Placed):
        [part] = answer.parts
        node = next(node for node in cluster.nodes if node.name == part.node)
        held = in_use(cluster).get(node.name)
        if held and held.replicas and answer.profile.gpu_class is None:
            assert node.cores is not None
            assert held.cores + part.cores <= node.cores - node.reserved_cores
    else:
        assert len(answer.reasons) == max(1, len(cluster.nodes)) * len(model.profiles)  # type: ignore[attr-defined]


@some
@given(clusters(), st.integers(0, 600))
def test_silence_only_ever_makes_a_node_less_trusted(cluster: Cluster, seconds: int) -> None:
    order = ["joining", "ready", "unreachable", "lost"]
    for change in expire(cluster, NOW + timedelta(seconds=seconds)):
        assert order.index(change.state) > order.index(change.was)


@some
@given(clusters())
def test_any_cluster_can_be_summed_up(cluster: Cluster) -> None:
    summary = summarise(cluster, UsageLine(0, 0, 0, 0), NOW)
    assert [line.name for line in summary.models] == [model.name for model in cluster.models]
    assert len(summary.replicas) == len(cluster.replicas)
    assert len(summary.nodes) == len(cluster.nodes)
    for line in summary.models:
        assert line.ready <= line.replicas
    for capacity in summary.capacity:
        assert capacity.free >= 0


@some
@given(some_model("m"))
def test_a_digest_changes_with_what_runs_and_with_nothing_else(model: object) -> None:
    assume(model.profiles)  # type: ignore[attr-defined]
    profile = model.profiles[0]  # type: ignore[attr-defined]
    digest = profile_digest(model, profile)  # type: ignore[arg-type]
    assert profile_digest(model, replace(profile, priority=9, startup_timeout_s=9)) == digest  # type: ignore[arg-type]
    assert profile_digest(model, replace(profile, args=("--other",))) != digest  # type: ignore[arg-type]
    assert profile_digest(replace(model, source="/other"), profile) != digest  # type: ignore[type-var, arg-type]
