"""Certificates that end are spoken of in time, on every surface from the one summary (WEB-2, ND-4)."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from nodes import asides, identity, snapshot
from nodes.alerts import Certified, Claim, of_certificates, of_claims, of_listener, of_stops
from nodes.models import Certificate
from nodes.state import Cluster, Node, Replica, Shard
from tenants.audit import SYSTEM
from tests import factories
from tests.nodes.fleets import NOW
from tests.pages import rows


@pytest.mark.parametrize(
    ("left", "state", "says"),
    [
        (timedelta(days=31), "", ""),
        (timedelta(days=30), "warn", "The certificate of box ends in 30 d; then its agent is refused."),
        (timedelta(days=2, hours=5), "warn", "The certificate of box ends in 2 d; then its agent is refused."),
        (timedelta(hours=5), "warn", "The certificate of box ends in 5 h; then its agent is refused."),
        (timedelta(0), "failed", "The certificate of box has ended; its agent is refused when it comes again."),
        (timedelta(days=-3), "failed", "The certificate of box has ended; its agent is refused when it comes again."),
    ],
)
def test_a_certificate_is_spoken_of_from_thirty_days_before_its_end(left: timedelta, state: str, says: str) -> None:
    found = [(alert.state, alert.text) for alert in of_certificates([Certified("box", NOW + left)], NOW)]
    assert found == ([(state, f"{says} Make another: llmgw node add box --renew")] if state else [])


def test_the_first_certificate_to_end_comes_first() -> None:
    certified = [Certified(name, NOW + timedelta(days=days)) for name, days in (("b", 2), ("a", 2), ("c", 1))]
    assert [alert.subject for alert in of_certificates(certified, NOW)] == ["c", "a", "b"]


def certify(node: str, until: datetime, serial: str) -> None:
    identity.admit_certificate(name=node, serial=serial, expires_at=until, actor=SYSTEM)


@pytest.mark.django_db
def test_only_the_last_certificate_of_a_node_counts(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    now = timezone.now()
    for node, days in (("renewed", 5), ("renewed", 700), ("old", 5), ("older", -1), ("new", 700)):
        certify(node, now + timedelta(days=days), f"{Certificate.objects.count():x}")
    with django_assert_num_queries(1):
        found = {each.node: each.until for each in asides.ending(now)}
    assert found == {"old": now + timedelta(days=5), "older": now - timedelta(days=1)}


@pytest.mark.django_db
def test_the_dashboard_says_what_the_summary_says_of_a_certificate(client: Client) -> None:
    factories.make_node("box")
    certify("box", timezone.now() + timedelta(days=12, hours=1), "abc")
    [alert] = snapshot.current_summary().alerts
    assert alert.text.startswith("The certificate of box ends in 12 d")
    client.force_login(rows.make_operator())
    assert alert.text in client.get("/dashboard/").content.decode()


@pytest.mark.parametrize(
    ("left", "state", "says"),
    [
        (timedelta(days=31), "", ""),
        (timedelta(days=30), "warn", "ends in 30 d; then none of them connects."),
        (timedelta(0), "failed", "has ended; none connects."),
    ],
)
def test_the_listeners_certificate_is_spoken_of_from_thirty_days_before_its_end(
    left: timedelta, state: str, says: str
) -> None:
    found = [(alert.state, alert.text) for alert in of_listener(NOW + left, NOW)]
    step = "Make another where the authority's ca.key is: llmgw server ca"
    assert found == ([(state, f"The certificate that agents are shown {says} {step}")] if state else [])


# --- who is where, and what does not stop ----------------------------------------------------------------------------
def test_machines_that_say_they_are_at_one_address_are_named_and_agents_of_one_machine_are_not() -> None:
    one, two, same = Claim("one", "10.0.0.1", "a"), Claim("two", "10.0.0.1", "b"), Claim("same", "10.0.0.1", "a")
    [alert] = of_claims([one, two, Claim("three", "10.0.0.3", "c")])
    assert alert.state == "warn"
    assert alert.text.startswith("Different machines say that they are reached at 10.0.0.1: one and two;")
    assert "llmgw ctl address NODE ADDRESS" in alert.text
    assert list(of_claims([one, same])) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_each_machines_own(address: str) -> None:
    assert list(of_claims([Claim("one", address, "a"), Claim("two", address, "b")])) == []


@pytest.mark.django_db
def test_claims_that_collide_are_found_among_nodes_that_are_heard(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    for name, address, machine, state in (
        ("one", "10.0.0.1", "a", "ready"), ("two", "10.0.0.1", "b", "unreachable"), ("gone", "10.0.0.1", "c", "lost"),
        ("alone", "10.0.0.2", "d", "ready"), ("left", "10.0.0.2", "e", "lost"), ("mine", "10.0.0.1", "a", "ready"),
    ):  # fmt: skip
        factories.make_node(name, address=address, machine_id=machine, state=state)
    now = timezone.now()
    factories.make_node("old", address="10.0.0.8", contested="long ago", contested_at=now - timedelta(days=1))
    factories.make_node("copied", address="10.0.0.9", contested="a and b", contested_at=now)
    with django_assert_num_queries(1):
        found = {each.node: each.contested for each in asides.claims(now)}
    assert found == {"one": "", "two": "", "mine": "", "copied": "a and b"}
    assert {"mine", "copied"} <= {alert.subject for alert in snapshot.current_summary(now).alerts}


def test_a_replica_that_a_node_does_not_stop_is_named_with_what_it_holds() -> None:
    stopping = Replica(
        "r", "m", "p", "d", made_at=NOW, wanted="stop", wanted_at=NOW - timedelta(minutes=5), shards=(Shard("one"),)
    )
    cluster = Cluster(nodes=(Node("one"), Node("two", state="lost")), replicas=(stopping,))
    [alert] = of_stops(cluster, NOW)
    assert (alert.state, alert.subject) == ("warn", "one")
    assert "Replica r of m was told to stop 5 min ago, and still runs on one" in alert.text
    for other in (
        replace(stopping, wanted="run"),
        replace(stopping, wanted_at=NOW),
        replace(stopping, wanted_at=None),
        replace(stopping, shards=(Shard("one", state="stopped"), Shard("two"))),
    ):
        assert list(of_stops(replace(cluster, replicas=(other,)), NOW)) == []
