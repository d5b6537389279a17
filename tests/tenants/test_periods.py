"""Periods of budgets in every time zone, across changes of the clocks and ends of months."""

from __future__ import annotations

import zoneinfo
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.limits import Period
from tenants.periods import bounds, zone
from tenants.rollup import SLOT_S

ZONES = sorted(zoneinfo.available_timezones())
INSTANTS = st.integers(-(10**9), 4 * 10**9).map(float)
LENGTHS: dict[Period, tuple[int, int]] = {"day": (0, 2), "week": (6, 8), "month": (27, 32)}


def local(instant: float, name: str) -> datetime:
    return datetime.fromtimestamp(instant, UTC).astimezone(ZoneInfo(name))


@given(st.sampled_from(ZONES), st.sampled_from(sorted(LENGTHS)), INSTANTS)
def test_a_period_holds_its_instant_begins_where_its_date_does_and_leaves_no_gap(
    name: str, period: Period, now: float
) -> None:
    start, end = bounds(period, name, now)
    assert end is not None
    assert start <= now < end
    assert bounds(period, name, start) == (start, end)
    assert bounds(period, name, end)[0] == end
    assert bounds(period, name, start - 1)[1] == start
    shortest, longest = LENGTHS[period]
    assert timedelta(days=shortest) < timedelta(seconds=end - start) < timedelta(days=longest, hours=25)
    for instant in (start, end):
        before, at = local(instant - 1, name).date(), local(instant, name).date()
        assert before < at, "no date begins here"
        if period == "week":
            assert at.isocalendar().week != before.isocalendar().week
        if period == "month":
            assert at.month != before.month


@given(INSTANTS)
def test_what_has_no_period_began_long_ago_and_never_ends(now: float) -> None:
    assert bounds("total", "Europe/Berlin", now) == (0.0, None)


@given(st.sampled_from(ZONES), st.sampled_from(sorted(LENGTHS)), st.integers(1_767_225_600, 4 * 10**9).map(float))
def test_today_every_border_is_one_of_the_slots_that_are_summed(name: str, period: Period, now: float) -> None:
    start, end = bounds(period, name, now)
    assert end is not None
    assert start % SLOT_S == end % SLOT_S == 0


@pytest.mark.parametrize(
    ("name", "day", "hours"),
    [
        ("Europe/Berlin", date(2026, 3, 29), 23),
        ("Europe/Berlin", date(2026, 10, 25), 25),
        ("Australia/Lord_Howe", date(2026, 4, 5), 24.5),
        ("America/Havana", date(2026, 3, 8), 23),  # midnight is skipped
        ("America/Havana", date(2026, 11, 1), 25),  # midnight comes twice
        ("America/Toronto", date(1919, 3, 31), 23.5),  # half past eleven became half past midnight
        ("UTC", date(2026, 12, 31), 24),
    ],
)
def test_days_on_which_clocks_change_have_their_own_length(name: str, day: date, hours: float) -> None:
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=ZoneInfo(name)).timestamp()
    start, end = bounds("day", name, noon)
    assert end is not None
    assert end - start == hours * 3600


def test_a_day_that_begins_twice_has_begun_the_first_time() -> None:
    # In Goose Bay one minute past midnight became eleven in the evening: for an hour the date was yesterday's again.
    again = datetime(2010, 11, 6, 23, 30, fold=1, tzinfo=ZoneInfo("America/Goose_Bay"))
    start, end = bounds("day", "America/Goose_Bay", again.timestamp())
    assert end is not None
    assert start == datetime(2010, 11, 7, tzinfo=ZoneInfo("America/Goose_Bay")).timestamp()
    assert end - start == 25 * 3600


def test_a_month_ends_with_its_last_day_and_a_week_begins_on_monday() -> None:
    now = datetime(2028, 2, 29, 23, 59, 59, tzinfo=ZoneInfo("Asia/Kathmandu")).timestamp()
    assert [local(each or 0, "Asia/Kathmandu").isoformat() for each in bounds("month", "Asia/Kathmandu", now)] == [
        "2028-02-01T00:00:00+05:45",
        "2028-03-01T00:00:00+05:45",
    ]
    assert [local(each or 0, "Asia/Kathmandu").isoformat() for each in bounds("week", "Asia/Kathmandu", now)] == [
        "2028-02-28T00:00:00+05:45",
        "2028-03-06T00:00:00+05:45",
    ]


@pytest.mark.parametrize("name", ["Nowhere/Land", "../../etc/passwd", "", "a\0b"])
def test_a_zone_that_this_machine_does_not_know_stops_nothing(name: str) -> None:
    assert zone(name).key == "UTC"
