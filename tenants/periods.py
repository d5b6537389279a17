"""When a budget's period begins and ends: exact across changes of the clocks and ends of months. Pure."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from tenants.limits import Period

DAY = timedelta(days=1)
_UTC_ZONE = ZoneInfo("UTC")


@lru_cache(maxsize=1000)
def zone(name: str) -> ZoneInfo:
    """The time zone of that name; UTC where this machine does not know it, so that no row can stop a gateway."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        return _UTC_ZONE


def bounds(period: Period, time_zone: str, now: float) -> tuple[float, float | None]:
    """The first instant of the period that `now` lies in, and of the next one (None: it never ends), epoch seconds.

    Days begin with the first instant that bears their date, weeks on Monday. A day that a time zone skips is empty.
    """
    if period == "total":
        return 0.0, None
    where = zone(time_zone)
    first = _first_day(period, datetime.fromtimestamp(now, where).date())
    following = _next_first_day(period, first)
    start, end = _begin(first, where), _begin(following, where)
    while end <= now:  # clocks were put back over midnight: the new day had begun already
        start, following = end, _next_first_day(period, following)
        end = _begin(following, where)
    return start, end


def _first_day(period: Period, day: date) -> date:
    if period == "month":
        return day.replace(day=1)
    return day - DAY * day.weekday() if period == "week" else day


def _next_first_day(period: Period, first: date) -> date:
    if period == "month":
        return (first + 31 * DAY).replace(day=1)
    return first + (7 * DAY if period == "week" else DAY)


def _begin(day: date, where: ZoneInfo) -> float:
    """The first instant whose date there is `day` or later."""
    midnight = datetime(day.year, day.month, day.day, tzinfo=where)
    early, late = sorted((midnight.timestamp(), midnight.replace(fold=1).timestamp()))
    if _date(early, where) >= day:
        return early
    while late - early > 1:  # midnight itself is skipped: look for the change, which falls on a whole second
        middle = (early + late) // 2
        early, late = (early, middle) if _date(middle, where) >= day else (middle, late)
    return late


def _date(instant: float, where: ZoneInfo) -> date:
    return datetime.fromtimestamp(instant, UTC).astimezone(where).date()
