"""Old usage goes in batches, explanations before rows; what is young stays, and writers are never locked out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from llmgw.config import Settings
from tenants import tasks, tidying
from tenants.models import Usage
from tests.pages import rows

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
DAY = timedelta(days=1)
WHY = {"asked": "chat"}


def tidy() -> tidying.Tidied:
    return tidying.tidy(NOW, keep_rows=90 * DAY, keep_explained=7 * DAY)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "BATCH", 2)


@pytest.mark.django_db
@pytest.mark.usefixtures("small")
def test_old_rows_go_and_younger_ones_lose_only_what_explains_them() -> None:
    for days in (100, 91, 89, 8, 8, 8, 6, 0):
        rows.make_usage(1, ended=NOW - days * DAY, explained=WHY, request_id=f"r{Usage.objects.count()}-{days}")

    assert tidy() == tidying.Tidied(rows=2, explanations=4)

    kept = {row.request_id.split("-")[1]: row.explained for row in Usage.objects.all()}
    assert kept == {"89": None, "8": None, "6": WHY, "0": WHY}
    assert Usage.objects.count() == 6
    assert tidy() == tidying.Tidied(rows=0, explanations=0)


@pytest.mark.django_db
@pytest.mark.usefixtures("small")
def test_rows_that_ended_at_the_same_instant_are_all_met() -> None:
    rows.make_usage(7, explained=WHY)
    Usage.objects.update(at=NOW - 30 * DAY)
    assert tidy() == tidying.Tidied(rows=0, explanations=7)


@pytest.mark.django_db
@pytest.mark.usefixtures("small")
def test_one_run_is_bounded_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "MOST_BATCHES", 2)
    rows.make_usage(9, ended=NOW - 100 * DAY)
    assert [tidy().rows for _ in range(4)] == [4, 4, 1, 0]


@pytest.mark.django_db
@pytest.mark.usefixtures("small")
def test_looking_for_explanations_ends_where_none_were_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "QUIET_BATCHES", 2)
    rows.make_usage(2, ended=NOW - 40 * DAY, explained=WHY)
    rows.make_usage(6, ended=NOW - 30 * DAY)
    rows.make_usage(2, ended=NOW - 20 * DAY, explained=WHY)
    rows.make_usage(3, ended=NOW - 10 * DAY)
    assert tidy().explanations == 2
    assert Usage.objects.filter(explained__isnull=False).count() == 2


@pytest.mark.django_db(transaction=True)
def test_between_batches_nothing_keeps_a_gateway_from_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "BATCH", 50)
    rows.make_usage(500, ended=NOW - 100 * DAY)
    rows.make_usage(200, ended=NOW - 10 * DAY, explained=WHY)
    wrote: list[str] = []

    def write() -> None:
        """As another process does."""
        rows.make_usage(1, ended=NOW, request_id=f"new-{len(wrote)}")
        connection.close()

    def before_each(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if sql.startswith("SELECT"):
            assert not connection.in_atomic_block
            writer = threading.Thread(target=write)
            writer.start()
            writer.join(60)
            wrote.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(before_each):
        assert tidy() == tidying.Tidied(rows=500, explanations=200)
    assert len(wrote) >= 15
    assert Usage.objects.filter(at=NOW).count() == len(wrote)


@pytest.mark.django_db
def test_the_task_keeps_what_the_settings_say(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.LLMGW = Settings.model_validate({"usage": {"keep_days": 2, "keep_explained_days": 1}})
    now = datetime.now(UTC)
    rows.make_usage(1, ended=now - 3 * DAY, request_id="old")
    rows.make_usage(1, ended=now - 1.5 * DAY, request_id="middle", explained=WHY)
    rows.make_usage(1, ended=now, request_id="young", explained=WHY)
    with caplog.at_level("INFO"):
        tasks.tidy_usage()
    assert {row.request_id: row.explained for row in Usage.objects.all()} == {"middle": None, "young": WHY}
    assert "1 old records of usage and 1 explanations were dropped" in caplog.text


@pytest.mark.django_db
def test_the_task_says_once_that_the_store_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OperationalError("database or disk is full")

    caplog.set_level("INFO")
    tasks.tidy_usage()
    monkeypatch.setattr(tidying, "tidy", fail)
    for _ in range(3):
        tasks.tidy_usage()
    monkeypatch.undo()
    tasks.tidy_usage()
    assert caplog.messages == [
        "Old usage was not dropped, as the store cannot be used (database or disk is full); the next try is in 10 min",
        "Old usage is dropped again",
    ]


def test_the_schedule_knows_the_task() -> None:
    from llmgw.celery import app

    app.loader.import_default_modules()
    assert app.conf.beat_schedule["tidy-usage"]["task"] in app.tasks
