"""What a summary says beside the cluster: who uses it, and when models were last asked for."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from nodes import asides, snapshot
from nodes.summary import UserLine
from tests import factories
from tests.pages import rows

pytestmark = pytest.mark.django_db


def test_who_uses_the_cluster_is_told_by_project_and_model_the_busiest_first(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    now = timezone.now()
    research = factories.make_project("evals", team=factories.make_team("Research"))
    key, _ = factories.make_key(project=research)
    rows.make_usage(3, key=key, ended=now)
    rows.make_usage(1, key=key, ended=now, model="big", completion_tokens=None)
    rows.make_usage(5, key=key, ended=now - timedelta(minutes=6), model="earlier")
    rows.make_usage(1, ended=now)
    with django_assert_num_queries(1):
        found = asides.users(now)
    assert found == (
        UserLine(research.pk, "evals", "Research", "smollm2", 3, 3 * (12 + 20) / 5),
        UserLine(research.pk, "evals", "Research", "big", 1, 12 / 5),
    )
    assert snapshot.current_summary(now).users == found


def test_who_uses_the_cluster_is_read_from_the_last_minutes_alone() -> None:
    """Not from all requests that a project ever made."""
    with CaptureQueriesContext(connection) as queries:
        asides.users(timezone.now())
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN QUERY PLAN {queries.captured_queries[0]['sql']}")
            steps = [row[3] for row in cursor.fetchall() if "tenants_usage" in row[3]]
        assert [step.partition("(")[2] for step in steps] == ["at>? AND at<?)"]


def test_no_more_users_are_listed_than_a_page_can_show() -> None:
    now = timezone.now()
    for number in range(asides.USERS + 3):
        rows.make_usage(1, ended=now, key=factories.make_key()[0], model=f"m{number}")
    assert len(asides.users(now)) == asides.USERS


def test_a_replica_is_idle_from_the_last_request_for_its_model(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    for name in ("a", "b", "c"):
        rows.make_idle(name)
    now = timezone.now()
    rows.make_usage(2, model="a", ended=now - timedelta(minutes=40))
    rows.make_usage(1, model="b", ended=now - timedelta(minutes=1))
    with django_assert_num_queries(14):
        found = snapshot.current_summary(now).idle
    assert [(line.replica, now - line.idle_since) for line in found] == [
        ("c-1", pytest.approx(timedelta(hours=2), abs=timedelta(minutes=1))),
        ("a-1", pytest.approx(timedelta(minutes=32.5), abs=timedelta(minutes=7.5))),  # the end of that quarter
    ]


def test_when_models_were_last_asked_for_is_one_query_however_many_there_are(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    now = timezone.now()
    for number in range(20):
        factories.make_model(f"m{number}", position=number)
    rows.make_usage(4, model="m3", ended=now)
    rows.make_usage(1, model="m3", ended=now - timedelta(hours=3))
    with django_assert_num_queries(1):
        (found,) = asides.last_used({f"m{number}" for number in range(20)}).items()
    assert found[0] == "m3"
    assert timedelta(0) < found[1] - now <= timedelta(minutes=15)
    with django_assert_num_queries(0):
        assert asides.last_used(()) == {}
