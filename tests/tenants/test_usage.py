"""Totals of today and pages of requests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_django import DjangoAssertNumQueries

from tenants import rollup, usage
from tenants.models import Role, Usage
from tests import factories
from tests.pages import rows
from tests.tenants.test_rollup import Row, of

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.mark.django_db
def test_today_begins_at_midnight_utc_and_unknown_tokens_add_nothing() -> None:
    key, _ = factories.make_key()
    rows.make_usage(1, key=key, ended=usage.midnight(NOW) - timedelta(seconds=1))
    rows.make_usage(2, key=key, ended=NOW)
    rows.make_usage(1, key=key, ended=NOW, status=502, prompt_tokens=None, completion_tokens=None)
    assert usage.total(usage.sums_of_today(NOW)) == usage.Totals(3, 1, prompt_tokens=24, completion_tokens=40)
    assert usage.totals(Usage.objects.filter(at__gte=usage.midnight(NOW))) == usage.total(usage.sums_of_today(NOW))


@pytest.mark.django_db
def test_a_day_without_requests_sums_to_nothing() -> None:
    assert usage.total(usage.sums_of_today(NOW)) == usage.totals(Usage.objects.all()) == usage.Totals()


@pytest.mark.django_db
def test_projects_are_summed_for_those_who_may_see_them(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    team = factories.make_team("Research")
    busy, calm = factories.make_project("busy", team=team), factories.make_project("calm", team=team)
    often, seldom, elsewhere = (factories.make_key(project=each)[0] for each in (busy, calm, factories.make_project()))
    today = (usage.midnight(NOW).timestamp(), NOW.timestamp(), NOW.timestamp() + 43_199)
    rollup.add([*(of(often, at=at, status=502) for at in today), of(seldom), of(often, at=today[0] - 1), Row()])
    rollup.add([of(elsewhere)] * 9)
    viewer = rows.make_member(team, Role.VIEWER, "victor")
    with django_assert_num_queries(2):
        found = usage.today_by_project(NOW, viewer)
    assert [(line.team, line.project, line.totals) for line in found] == [
        ("Research", "busy", usage.Totals(3, 3, 30, 15)),
        ("Research", "calm", usage.Totals(1, 0, 10, 5)),
    ]
    everybody = rows.make_operator()
    assert [line.totals.requests for line in usage.today_by_project(NOW, everybody)] == [9, 3, 1]
    assert len(usage.today_by_project(NOW, everybody, limit=1)) == 1


@pytest.mark.django_db
def test_a_refused_request_and_one_whose_client_left_have_not_failed() -> None:
    key, _ = factories.make_key()
    for status in (200, 400, 429, 499, 500, 503):
        rows.make_usage(1, key=key, ended=NOW, status=status)
    assert usage.totals(Usage.objects.all()).failed == 2
    (line,) = usage.today_by_project(NOW, rows.make_operator())
    assert (line.totals.requests, line.totals.failed) == (6, 2)


@given(st.datetimes(timezones=st.just(UTC), min_value=datetime(1000, 1, 1)), st.integers(1, 2**63 - 1))
def test_a_cursor_comes_back_as_it_went_out(at: datetime, pk: int) -> None:
    assert usage.read_cursor(usage.write_cursor(at, pk)) == (at, pk)


@given(st.text(max_size=60))
def test_any_other_cursor_is_none_or_a_place(text: str) -> None:
    cursor = usage.read_cursor(text)
    assert cursor is None or cursor[1] > 0
