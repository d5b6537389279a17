"""Rows as the database's library gives them, for tables that are read whole and often.

What Django makes of each value, of times and JSON above all, costs several times what reading it does.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connection
from django.db.models import QuerySet, TextField
from django.db.models.functions import Cast


def rows(of: QuerySet[Any, Any]) -> list[tuple[Any, ...]]:
    """What `values_list` asked for. One query, and none where nothing can be found."""
    try:
        statement, values = of.query.sql_with_params()
    except EmptyResultSet:
        return []
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        found: list[tuple[Any, ...]] = cursor.fetchall()
    return found


def text(column: str) -> Cast:
    """A column of JSON or of times as its text, which is the same from both databases but for blanks."""
    return Cast(column, TextField())


@lru_cache(maxsize=2**15)
def moment(told: str) -> datetime:
    """A time that was read as text; SQLite has it without its zone, which is UTC. Most are the same each time."""
    at = datetime.fromisoformat(told)
    return at if at.tzinfo else at.replace(tzinfo=UTC)
