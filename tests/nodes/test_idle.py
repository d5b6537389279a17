"""Replicas that hold hardware which nobody asks for (WEB-2): since when, and what is never called so."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given

from catalog import spec
from nodes.idle import IDLE_AFTER, IdleLine, askers, idle, names_to_look_up
from nodes.state import Cluster, Load, Replica, Shard, Status
from tests.nodes.fleets import NOW, clusters
from tests.nodes.test_placement import GOOD, MODEL
from tests.nodes.test_reconcile import SERVING

AGES_AGO = NOW - timedelta(hours=3)
REST = replace(SERVING, made_at=AGES_AGO, ready_at=AGES_AGO, load=Load(NOW, in_flight=0))
BUSY = replace(REST, name="busy", load=Load(NOW, in_flight=1))
UNKNOWN = replace(REST, name="unknown", load=Load(NOW))
ON_DEMAND = replace(MODEL, scaling=spec.Scaling(0, 2, idle_timeout_s=900))


def found(
    *replicas: Replica,
    used: dict[str, datetime] | None = None,
    models: tuple[spec.Model, ...] = (MODEL,),
    asked: datetime | None = None,
) -> tuple[IdleLine, ...]:
    cluster = Cluster(nodes=(GOOD,), models=models, replicas=replicas, statuses=(Status("m", demand_at=asked),))
    return idle(cluster, used or {}, NOW)


def test_a_replica_at_rest_since_it_became_ready_is_idle() -> None:
    note = "kept up: scaling.min is 1; with 0 it starts on demand"
    assert found(REST) == (IdleLine("r", "m", "good", 0, 4, AGES_AGO, note),)


@pytest.mark.parametrize("other", [BUSY, UNKNOWN, replace(REST, name="silent", load=None)])
def test_no_replica_is_called_idle_while_one_of_its_model_serves_or_its_use_is_unknown(other: Replica) -> None:
    assert found(REST, other) == ()


def test_a_replica_that_does_not_serve_or_is_on_its_way_out_is_not_listed() -> None:
    loading = replace(REST, name="l", state="loading", load=None)
    leaving = replace(REST, name="d", wanted="drain")
    assert [line.replica for line in found(REST, loading, leaving)] == ["r"]


@pytest.mark.parametrize(("minutes", "is_idle"), [(0, False), (9, False), (10, True), (60, True)])
def test_what_was_asked_for_lately_is_not_idle(minutes: int, is_idle: bool) -> None:
    at = NOW - timedelta(minutes=minutes)
    for listed in (found(REST, used={"m": at}), found(REST, asked=at), found(replace(REST, ready_at=at))):
        assert [line.idle_since for line in listed] == ([at] if is_idle else [])
    assert timedelta(minutes=10) == IDLE_AFTER


def test_requests_for_a_model_that_falls_back_on_it_count_as_asking() -> None:
    first = replace(MODEL, name="first", fallbacks=("Alias", "gone"))
    aliased = replace(MODEL, aliases=("alias",))
    cluster = Cluster(models=(first, aliased), replicas=(REST,))
    assert names_to_look_up(cluster) == {"m", "first"}
    assert found(REST, models=(first, aliased), used={"first": NOW}) == ()


def test_nothing_is_looked_up_while_nothing_is_at_rest() -> None:
    assert askers(Cluster(models=(MODEL,), replicas=(BUSY,))) == {}


def test_it_says_why_each_stays_and_what_holds_most_comes_first() -> None:
    cards = replace(REST, name="c", model="n", shards=(Shard("good", 0, "ready", 0, ("GPU-0", "GPU-1")),))
    ended = replace(REST, name="e", model="gone", shards=(Shard("good", 0, "stopped", 4),))
    lines = found(REST, cards, ended, models=(ON_DEMAND, replace(MODEL, name="n")))
    assert [(line.replica, line.cards, line.note) for line in lines] == [
        ("c", 2, "kept up: scaling.min is 1; with 0 it starts on demand"),
        ("e", 0, "its model is off; it is about to be stopped"),
        ("r", 0, "on demand; stops after 15 min of rest"),
    ]
    assert (lines[1].node, lines[1].cores) == ("", 0)


def test_a_ready_replica_without_a_time_of_it_counts_from_when_it_was_made() -> None:
    assert found(replace(REST, ready_at=None))[0].idle_since == AGES_AGO


@given(clusters())
def test_whatever_the_cluster_only_replicas_known_to_serve_nobody_are_idle(cluster: Cluster) -> None:
    by_name = {replica.name: replica for replica in cluster.replicas}
    for line in idle(cluster, {}, NOW):
        load = by_name[line.replica].load
        assert load is not None
        assert load.in_flight == 0
        assert NOW - line.idle_since >= IDLE_AFTER
