"""Requests as CSV, page by page: what is in memory does not grow with what is asked for."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from asgiref.sync import sync_to_async

from tenants.finding import Wanted, find, result_of
from tenants.models import Usage
from tenants.money import UNITS

ROWS_AT_ONCE = 1000
LONGEST = timedelta(days=92)
UNLESS_SAID = timedelta(days=7)
COLUMNS = (
    *("request_id", "ended_at", "project", "key", "route", "model", "adapter", "band", "replica", "node", "streamed"),
    *("status", "result", "error_code", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"),
    *("estimated", "queue_ms", "first_token_ms", "total_ms", "cost"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def spanned(wanted: Wanted, now: datetime) -> Wanted | str:
    """With both ends set, or why that cannot be: a sentence."""
    until = min(wanted.until or now, now)
    since = wanted.since or until - UNLESS_SAID
    if until - since > LONGEST:
        return f"An export spans at most {LONGEST.days} days; move since or until."
    return replace(wanted, since=since, until=until)


def parts(wanted: Wanted) -> Iterator[str]:
    """The header, then the rows of one page after the other, newest first."""
    yield _lines([COLUMNS])
    older = ""
    while True:
        found = find(wanted, before=older, size=ROWS_AT_ONCE)
        if found.rows:
            yield _lines([_values(row) for row in found.rows])
        older = found.older
        if not older:
            return


async def parts_later(wanted: Wanted) -> AsyncIterator[str]:
    """The same for a server that is not to wait for the store."""
    made = parts(wanted)
    while part := await sync_to_async(_next)(made):
        yield part


def _next(made: Iterator[str]) -> str:
    """Empty at the end."""
    return next(made, "")


def _values(row: Usage) -> tuple[object, ...]:
    cost = None if row.cost is None else f"{row.cost // UNITS}.{row.cost % UNITS:08d}"
    return (
        *(row.request_id, row.at.astimezone(UTC).isoformat(timespec="milliseconds")),
        *(row.project.name if row.project else None, row.key.name if row.key else None),
        *(row.route, row.model, row.adapter, row.band, row.replica, row.node, row.streamed),
        *(row.status, result_of(row.status), row.error_code),
        *(row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.reasoning_tokens),
        *(row.estimated, row.queue_ms, row.first_token_ms, row.total_ms, cost),
    )


def _lines(rows: list[tuple[object, ...]]) -> str:
    out = io.StringIO()
    csv.writer(out).writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    """Text that a spreadsheet would take for a formula is marked as text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
