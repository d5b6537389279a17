"""Requests by key and by model, which no index of requests knows: found like all others, from their sums."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from tenants import finding
from tenants.models import Usage
from tests import factories
from tests.pages import rows

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
FEW = 4
"""As far as a page looks in the property below, so that it often stops before it is full."""


def walk(wanted: finding.Wanted, size: int) -> list[int]:
    met: list[int] = []
    older = ""
    for _ in range(500):
        found = finding.find(wanted, before=older, size=size)
        met += [row.pk for row in found.rows]
        older = found.older
        if not older:
            return met
    raise AssertionError("the walk does not end")


class ByKeyAndModel(TestCase):
    @settings(max_examples=40, deadline=None)
    @given(
        made=st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 6), st.sampled_from((0, 0, 1, 899))),
            max_size=30,
        ),
        key=st.none() | st.integers(0, 3),
        model=st.sampled_from(("", "a", "b", "none")),
        seen=st.none() | st.sets(st.integers(0, 1)),
        span=st.tuples(st.none() | st.integers(0, 6), st.none() | st.integers(0, 6)),
        size=st.integers(1, 5),
    )
    def test_a_walk_meets_what_a_plain_question_finds(
        self,
        made: list[tuple[int, str, int, int]],
        key: int | None,
        model: str,
        seen: set[int] | None,
        span: tuple[int | None, int | None],
        size: int,
    ) -> None:
        projects = [factories.make_project(), factories.make_project()]
        keys = [factories.make_key(project=projects[number % 2])[0] for number in range(4)]
        for number, (of, name, quarter, second) in enumerate(made):
            ended = NOON - quarter * timedelta(minutes=15) + timedelta(seconds=second)
            rows.make_usage(1, key=keys[of], model=name, ended=ended, request_id=f"r{number}")
        since, until = (None if each is None else NOON - each * timedelta(minutes=15) for each in span)
        wanted = finding.Wanted(
            projects=None if seen is None else tuple(projects[each].pk for each in seen),
            key=None if key is None else keys[key].pk,
            model=model,
            since=since,
            until=until,
        )
        expected = Usage.objects.all()
        if wanted.projects is not None:
            expected = expected.filter(project__in=wanted.projects)
        expected = expected.filter(key=wanted.key) if wanted.key is not None else expected
        expected = expected.filter(model=model) if model else expected
        expected = expected.filter(at__gte=since) if since else expected
        expected = expected.filter(at__lt=until) if until else expected
        looked, finding.LOOKED_THROUGH = finding.LOOKED_THROUGH, FEW
        try:
            met = walk(wanted, size)
        finally:
            finding.LOOKED_THROUGH = looked
        assert met == list(expected.order_by("-at", "-pk").values_list("pk", flat=True))


@pytest.mark.django_db
def test_a_search_by_key_begins_where_its_sums_have_something() -> None:
    """Not at the newest of all requests, which may be millions away."""
    key, _ = factories.make_key()
    other, _ = factories.make_key(project=key.project)
    rows.make_usage(1, key=key, ended=NOON - timedelta(days=30), request_id="rare")
    rows.make_usage(200, key=other, ended=NOON)
    looked, finding.LOOKED_THROUGH = finding.LOOKED_THROUGH, 10
    try:
        found = finding.find(finding.Wanted(projects=(key.project_id,), key=key.pk))
        with CaptureQueriesContext(connection) as queries:
            assert finding.find(finding.Wanted(key=key.pk + 99)).rows == ()
    finally:
        finding.LOOKED_THROUGH = looked
    assert [row.request_id for row in found.rows] == ["rare"]
    assert found.older == ""
    assert len(queries) == 1  # the sums alone


@pytest.mark.django_db
def test_what_ended_within_a_rounding_of_a_quarters_end_is_found() -> None:
    """A row is as old as it says to the microsecond, and so are its sums."""
    from routing.shapes import Record
    from routing.store import DjangoStore

    key, _ = factories.make_key()
    end = NOON.timestamp() - 1e-7
    record = Record(
        request_id="edge", at=end, project=key.project_id, key=key.pk, route="r", model="m", status=200, total_ms=1.0
    )
    DjangoStore().save_usage([record])
    assert Usage.objects.get().at == NOON
    assert [row.request_id for row in finding.find(finding.Wanted(key=key.pk)).rows] == ["edge"]


@pytest.mark.django_db
def test_a_keys_latest_requests_are_its_own_and_no_more_than_asked_for() -> None:
    key, _ = factories.make_key()
    other, _ = factories.make_key(project=key.project)
    rows.make_usage(3, key=key, ended=NOON - timedelta(hours=9))
    rows.make_usage(2, key=other, ended=NOON)
    assert [row.key_id for row in finding.of_key(key)] == [key.pk] * 3
    assert [row.at for row in finding.of_key(key, 1)] == [NOON - timedelta(hours=9)]
