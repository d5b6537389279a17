"""Sums of usage by quarters of an hour, and what budgets have spent of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.db import connection, connections, transaction
from django.db.models import Count, Q, Sum
from pytest_django import DjangoAssertNumQueries

from tenants import rollup
from tenants.limits import Budget, Period, Subject
from tenants.models import Key, Usage, UsageSlot
from tests import factories

NOON = datetime(2026, 11, 29, 12, 7, tzinfo=UTC)


@dataclass
class Row:
    """As routing.journal.Record."""

    request_id: str = ""
    at: float = NOON.timestamp()
    project: int | None = None
    key: int | None = None
    user: int | None = None
    model: str = "m"
    adapter: str = ""
    status: int = 200
    prompt_tokens: int | None = 10
    cached_tokens: int | None = 4
    completion_tokens: int | None = 5
    cost: int | None = 100


def of(key: Key, **fields: object) -> Row:
    return Row(**{"key": key.pk, "project": key.project_id, **fields})  # type: ignore[arg-type]


def slots() -> list[tuple[object, ...]]:
    return list(UsageSlot.objects.order_by("pk").values_list("requests", "failed", "prompt_tokens", "cost", "unpriced"))


# --- writing ---------------------------------------------------------------------------------------------------------
@pytest.mark.django_db
def test_requests_of_a_quarter_of_an_hour_become_one_row_and_unknown_adds_nothing() -> None:
    rollup.add([Row(), Row(status=502, prompt_tokens=None, cached_tokens=None, completion_tokens=None, cost=None)])
    rollup.add([Row(at=NOON.timestamp() + 479.9)])
    row = UsageSlot.objects.get()
    assert row.at == datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
    assert (row.project, row.key, row.user, row.model, row.adapter) == (0, 0, 0, "m", "")
    assert (row.requests, row.failed, row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (3, 1, 20, 8, 10)
    assert (row.cost, row.unpriced) == (200, 0)  # what used nothing needs no price
    rollup.add([Row(cost=None), Row(cost=None, prompt_tokens=None)])
    assert UsageSlot.objects.get().unpriced == 2


@pytest.mark.django_db
def test_whatever_differs_has_a_row_of_its_own() -> None:
    rollup.add(
        [
            Row(),
            Row(at=NOON.timestamp() + 480),
            Row(project=1),
            Row(key=1),
            Row(user=1),
            Row(model="n"),
            Row(adapter="a"),
        ]
    )
    assert slots() == [(1, 0, 10, 100, 0)] * 7


@pytest.mark.django_db
def test_nothing_to_add_asks_nothing(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    with django_assert_num_queries(0):
        rollup.add([])


def _write(rows: Sequence[Row], failed: list[BaseException]) -> None:
    """As a gateway does: usage rows and their sums in one transaction, ten at a time."""
    try:
        for start in range(0, len(rows), 10):
            with transaction.atomic():
                for row in rows[start : start + 10]:
                    Usage.objects.create(
                        request_id=row.request_id,
                        at=datetime.fromtimestamp(row.at, UTC),
                        project_id=row.project,
                        key_id=row.key,
                        route="/v1/chat/completions",
                        model=row.model,
                        status=row.status,
                        prompt_tokens=row.prompt_tokens,
                        cached_tokens=row.cached_tokens,
                        completion_tokens=row.completion_tokens,
                        total_ms=1,
                        cost=row.cost,
                    )
                rollup.add(rows[start : start + 10])
    except BaseException as error:
        failed.append(error)
    finally:
        connections.close_all()


@pytest.mark.django_db(transaction=True)
def test_several_writers_at_once_lose_nothing_and_wait_for_nobody_for_ever() -> None:
    keys = [factories.make_key()[0] for _ in range(5)]
    writers = 4 if connection.vendor == "postgresql" else 1
    failed: list[BaseException] = []

    def rows(writer: int) -> list[Row]:
        made = [
            of(
                keys[number * (writer + 1) % 5],
                request_id=f"{writer}-{number}",
                at=NOON.timestamp() + number % 3 * 900,
                cost=None if number % 7 == 0 else number,
                status=500 if number % 11 == 0 else 200,
            )
            for number in range(100)
        ]
        return made if writer % 2 else made[::-1]

    threads = [threading.Thread(target=_write, args=(rows(writer), failed)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert not any(thread.is_alive() for thread in threads)
    wanted = Usage.objects.values("project", "key").annotate(
        n=Count("pk"),
        bad=Count("pk", filter=Q(status__gte=500)),
        prompt=Sum("prompt_tokens"),
        money=Sum("cost"),
        free=Count("pk", filter=Q(cost=None)),
    )
    found = UsageSlot.objects.values("project", "key").annotate(
        n=Sum("requests"), bad=Sum("failed"), prompt=Sum("prompt_tokens"), money=Sum("cost"), free=Sum("unpriced")
    )
    assert list(found.order_by("key")) == list(wanted.order_by("key"))
    assert sum(row["n"] for row in wanted) == 100 * writers


# --- reading ---------------------------------------------------------------------------------------------------------
def budget(
    number: int, subject: Subject, pk: int, *, unit: str = "tokens", period: Period = "month", **more: str
) -> Budget:
    return Budget(number, subject, pk, "n", unit, 1, period, **more)  # type: ignore[arg-type]


@pytest.mark.django_db
def test_each_budget_counts_what_its_subject_and_all_below_used_in_its_unit() -> None:
    key, _ = factories.make_key()
    other, _ = factories.make_key(project=key.project)
    elsewhere, _ = factories.make_key(project=factories.make_project(team=key.project.team))
    stranger, _ = factories.make_key()
    rollup.add([of(key), of(other, cost=7), of(elsewhere, model="n"), of(stranger, cost=None), Row()])
    team = key.project.team
    found = rollup.spent(
        [
            budget(1, "key", key.pk),
            budget(2, "project", key.project_id, unit="money"),
            budget(3, "team", team.pk, unit="money"),
            budget(4, "organisation", team.organisation_id),
            budget(5, "key", stranger.pk, unit="money"),
            budget(6, "key", 999),
        ],
        NOON.timestamp(),
    )
    assert {number: amount for number, (_, amount) in found.items()} == {1: 15, 2: 107, 3: 207, 4: 60, 5: 0, 6: 0}


@pytest.mark.django_db
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/Havana"])
@pytest.mark.parametrize("period", ["day", "week", "month", "total"])
def test_only_the_current_period_counts_from_its_very_beginning(period: Period, zone: str) -> None:
    key, _ = factories.make_key()
    now = NOON.timestamp()
    start = {
        "day": datetime(2026, 11, 29, tzinfo=ZoneInfo(zone)),
        "week": datetime(2026, 11, 23, tzinfo=ZoneInfo(zone)),
        "month": datetime(2026, 11, 1, tzinfo=ZoneInfo(zone)),
        "total": datetime(1970, 1, 1, tzinfo=UTC),
    }[period].timestamp()
    rollup.add([of(key, at=start), of(key, at=now), *([of(key, at=start - 1)] if start else [])])
    assert rollup.spent([budget(1, "key", key.pk, period=period, time_zone=zone)], now) == {1: (start, 30)}


@pytest.mark.django_db
def test_asking_for_many_budgets_costs_as_many_queries_as_for_few(
    django_assert_num_queries: DjangoAssertNumQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [factories.make_key()[0] for _ in range(12)]
    rollup.add([of(key) for key in keys])
    periods: tuple[Period, ...] = ("day", "week", "month", "total")
    many = [
        budget(number * 10 + each, "key", key.pk, period=period)
        for number, key in enumerate(keys)
        for each, period in enumerate(periods)
    ]
    with django_assert_num_queries(5):
        few = rollup.spent(many[:4], NOON.timestamp())
    with django_assert_num_queries(5):
        found = rollup.spent(many, NOON.timestamp())
    monkeypatch.setattr(rollup, "NAMED_AT_ONCE", 3)
    assert rollup.spent(many, NOON.timestamp()) == found
    assert {amount for _, amount in found.values()} == {15}
    assert few.items() <= found.items()
    with django_assert_num_queries(0):
        assert rollup.spent([], NOON.timestamp()) == {}


@pytest.mark.django_db
def test_what_was_used_follows_a_project_that_changes_its_team() -> None:
    key, _ = factories.make_key()
    rollup.add([of(key)])
    team = factories.make_team()
    key.project.team = team
    key.project.save()
    assert rollup.spent([budget(1, "team", team.pk)], (NOON + timedelta(hours=1)).timestamp())[1][1] == 15
