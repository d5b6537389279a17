"""The database's clock is set forward or back under a fleet that is well: nobody is lost by that, and whoever is gone
is found out (ND-10)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from django.db.models import F
from hypothesis import given
from hypothesis import strategies as st

from llmgw.core import lease
from llmgw.core.models import Lease
from nodes import expiry, passes
from nodes.models import Node, Replica, Shard
from nodes.state import Cluster, Rules
from tests.factories import make_model, make_node, make_replica
from tests.nodes.fleets import NOW
from tests.nodes.simulation import machine

HOUR = timedelta(hours=1)
TTL_S = 60.0


def set_clock(by: timedelta) -> None:
    """As if the database's clock were set by so much: all that is written in it is that much older."""
    Lease.objects.update(expires_at=F("expires_at") - by, since=F("since") - by)
    Node.objects.update(last_seen_at=F("last_seen_at") - by, registered_at=F("registered_at") - by)
    Replica.objects.update(made_at=F("made_at") - by, state_at=F("state_at") - by, ready_at=F("ready_at") - by)


def a_pass() -> None:
    """The keeper looks, then passes run as long as there is something to do."""
    held = lease.acquire(lease.LEADER, ttl_s=TTL_S)
    assert held
    for _ in range(10):
        held = lease.current(lease.LEADER)
        assert held
        if not passes.run_pass(held.at, held=held):
            return


@pytest.mark.django_db
@pytest.mark.parametrize("by", [HOUR, -HOUR, 30 * 24 * HOUR, -30 * 24 * HOUR, timedelta(minutes=6)], ids=str)
def test_a_step_of_the_clock_loses_no_node_and_a_node_that_is_gone_is_lost_all_the_same(by: timedelta) -> None:
    model = make_model("smollm2")
    now = lease.acquire(lease.LEADER, ttl_s=TTL_S)
    assert now
    for name in ("one", "two"):
        make_node(name, last_seen_at=now.at, registered_at=now.at)
    make_replica("r", node=Node.objects.get(pk="one"), made_at=now.at, state_at=now.at, ready_at=now.at)
    assert model
    a_pass()
    before = lease.current(lease.LEADER)
    set_clock(by)
    a_pass()
    after = lease.current(lease.LEADER)
    assert before
    assert after
    assert after.fence > before.fence, "it is taken anew"
    assert abs(after.since - after.at) < timedelta(minutes=1)
    assert not Node.objects.filter(state="lost").exists()
    assert Shard.objects.get(replica="r").node_id == "one"
    for _ in range(45):  # nobody speaks for six minutes, in steps that the lease outlasts
        set_clock(timedelta(seconds=8))
        a_pass()
    assert set(Node.objects.values_list("state", flat=True)) == {"lost"}


@given(st.integers(-7200, 7200), st.integers(0, 900), st.booleans())
def test_silence_is_never_counted_from_before_the_lead_was_taken(seen_s: int, since_s: int, leads: bool) -> None:
    node = replace(machine("a"), last_seen_at=NOW + timedelta(seconds=seen_s))
    since = NOW - timedelta(seconds=since_s) if leads else None
    found = expiry.expire(Cluster(nodes=(node,), since=since), NOW)
    silent_s = -seen_s if not leads else since_s if seen_s > 1200 else min(-seen_s, since_s)
    rules = Rules()
    lost, quiet = rules.lost_after.total_seconds(), rules.unreachable_after.total_seconds()
    expected = "lost" if silent_s > lost else "unreachable" if silent_s > quiet else ""
    assert "".join(each.state for each in found) == expected
