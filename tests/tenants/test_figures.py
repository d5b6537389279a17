"""How numbers and times read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import figures

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
UNITS = ["B", "KiB", "MiB", "GiB", "TiB"]


@pytest.mark.parametrize("read", [figures.number, figures.size, figures.milliseconds, figures.percent])
def test_what_is_unknown_reads_as_a_dash_and_never_as_zero(read: object) -> None:
    assert callable(read)
    assert read(None) == "–"
    assert read(0).startswith("0")


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(1234567, 0, "1,234,567"), (2.5, 1, "2.5"), (100, 1, "100"), (0.04, 1, "0")]
)
def test_numbers_have_thousands_apart_and_no_idle_zeros(value: float, digits: int, text: str) -> None:
    assert figures.number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(17, "17 B"), (1024, "1 KiB"), (98 * 1024**2, "98 MiB"), (1536 * 1024**2, "1.5 GiB"), (3 * 1024**5, "3,072 TiB")],
)
def test_sizes_are_in_binary_units(value: int, text: str) -> None:
    assert figures.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(285.2, "285 ms"), (1800, "1.8 s"), (185_000, "3 min 5 s"), (7_200_000, "2 h")]
)
def test_waits_read_in_the_unit_that_fits(value: float, text: str) -> None:
    assert figures.milliseconds(value) == text


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(0), "0 s"),
        (timedelta(seconds=-5), "0 s"),
        (timedelta(seconds=100), "1 min 40 s"),
        (timedelta(hours=3, minutes=12, seconds=9), "3 h 12 min"),
        (timedelta(days=2), "2 d"),
    ],
)
def test_a_span_reads_in_its_two_largest_units(length: timedelta, text: str) -> None:
    assert figures.span(length) == text


def test_times_read_relative_to_now() -> None:
    assert figures.ago(None, NOW) == "never"
    assert figures.ago(NOW, NOW) == "just now"
    assert figures.ago(NOW - timedelta(minutes=3, seconds=20), NOW) == "3 min ago"
    assert figures.ago(NOW + timedelta(seconds=40), NOW) == "in 40 s"


@given(st.timedeltas(min_value=timedelta(0), max_value=timedelta(days=4000)))
def test_a_span_never_claims_more_time_than_passed(length: timedelta) -> None:
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    words = figures.span(length).split()
    told = sum(int(count) * units[unit] for count, unit in zip(words[::2], words[1::2], strict=True))
    assert told <= length.total_seconds()
    assert len(words) in (2, 4)


@given(st.floats(min_value=0, max_value=1e18))
def test_sizes_never_lose_their_order(value: float) -> None:
    unit = figures.size(value).split()[1]
    larger = figures.size(value * 2048).split()[1]
    assert UNITS.index(larger) >= UNITS.index(unit)
