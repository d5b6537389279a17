"""What SQLite's library is told about values that it would look up each time."""

from __future__ import annotations

import sqlite3
from types import NoneType

from django.apps import apps


def test_none_and_bool_are_adapted_at_once_to_what_they_were_stored_as_before() -> None:
    known = dict(sqlite3.adapters)
    values = "SELECT typeof(?1), typeof(?2), typeof(?3), ?2, ?3"
    try:
        sqlite3.adapters.clear()
        with sqlite3.connect(":memory:") as without:
            before = without.execute(values, (None, True, False)).fetchone()
        apps.get_app_config("core").ready()
        adapted = {kind for kind, _ in sqlite3.adapters}
        with sqlite3.connect(":memory:") as now:
            assert now.execute(values, (None, True, False)).fetchone() == before
    finally:
        sqlite3.adapters.clear()
        sqlite3.adapters.update(known)
    assert before == ("null", "integer", "integer", 1, 0)
    assert adapted == {NoneType, bool}
