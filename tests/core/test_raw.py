"""Rows without what Django makes of their values."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pytest_django import DjangoAssertNumQueries

from llmgw.core import raw
from llmgw.core.models import Lease
from nodes.models import Node
from tests.factories import make_node

NOON = datetime(2026, 11, 30, 12, 0, 0, 250_000, tzinfo=UTC)


@pytest.mark.django_db
def test_rows_come_in_their_order_with_times_and_json_as_text(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    for name, labels in (("b", {}), ("a", {"zone": 'é"'})):
        make_node(name, seen_at=NOON, labels=labels, draining_at=None)
    columns = ("name", raw.text("labels"), raw.text("last_seen_at"), "draining_at")
    with django_assert_num_queries(1):
        found = raw.rows(Node.objects.order_by("name").values_list(*columns))
    assert [(name, json.loads(labels), raw.moment(seen), draining) for name, labels, seen, draining in found] == [
        ("a", {"zone": 'é"'}, NOON, None),
        ("b", {}, NOON, None),
    ]


@pytest.mark.django_db
def test_nothing_is_asked_where_nothing_can_be_found(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    with django_assert_num_queries(0):
        assert raw.rows(Lease.objects.none().values_list("name")) == []
        assert raw.rows(Lease.objects.filter(name__in=[]).values_list("name")) == []


@pytest.mark.parametrize(
    ("told", "offset"),
    [
        ("2026-11-30 12:00:00.250000", timedelta()),
        ("2026-11-30 12:00:00.25+00", timedelta()),
        ("2026-11-30 14:00:00.25+02", timedelta(hours=2)),
    ],
)
def test_a_time_without_a_zone_is_utc_and_one_with_a_zone_keeps_it(told: str, offset: timedelta) -> None:
    at = raw.moment(told)
    assert at == NOON
    assert at.tzinfo == timezone(offset)
