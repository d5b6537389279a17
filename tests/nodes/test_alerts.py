"""Certificates that end are spoken of in time, on every surface from the one summary (WEB-2, ND-4)."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from nodes import asides, identity, snapshot
from nodes.alerts import Certified, of_certificates
from nodes.models import Certificate
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
