"""What may be set as a limit or a budget, and what a budget's figures say."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.limits import (
    MAX_AMOUNT,
    MAX_NAME,
    MAX_NAMES,
    Unit,
    amount_of,
    names_objection,
    priced,
    runs_out,
    written_amount,
)
from tenants.money import Price


@given(st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=MAX_NAME), max_size=20))
def test_lists_of_names_that_can_be_seen_are_taken(names: list[str]) -> None:
    assert names_objection(names) == ""


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("a", "Write a list"),
        ({"a": 1}, "Write a list"),
        ([1], "Write a list"),
        (["a"] * (MAX_NAMES + 1), "256 are the most"),
        ([""], "'' is none"),
        ([" a"], "' a' is none"),
        (["a\0"], "is none"),
        (["\ud800"], "'\\ud800' is none"),
        (["x" * (MAX_NAME + 1)], "is none"),
    ],
)
def test_anything_else_is_refused_in_words_that_can_be_sent(names: object, message: str) -> None:
    objection = names_objection(names)
    assert message in objection
    assert objection.encode()


@given(st.sampled_from(["money", "tokens"]), st.integers(1, MAX_AMOUNT))
def test_an_amount_comes_back_as_it_was_written(unit: Unit, amount: int) -> None:
    assert amount_of(unit, written_amount(unit, amount)) == amount


@pytest.mark.parametrize(
    ("unit", "written", "message"),
    [
        ("tokens", "1.5", "whole"),
        ("tokens", "0", "more than nothing"),
        ("tokens", "1000000000000000001", "more than nothing"),
        ("money", "-1", "more than nothing"),
        ("money", "10000000000.01", "more than nothing"),
        ("money", "0.000000001", "8 decimals"),
    ],
)
def test_an_amount_that_no_budget_has_is_refused(unit: Unit, written: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        amount_of(unit, Decimal(written))


@given(st.integers(-5, 2000), st.integers(1, 1000), st.floats(0, 100))
def test_a_budget_runs_out_after_now_and_before_its_end_or_it_is_not_said(used: int, amount: int, now: float) -> None:
    at = runs_out(start=0, end=100, now=now, used=used, amount=amount)
    assert at is None or (0 < used < amount and now <= at < 100)
    assert runs_out(start=0, end=None, now=now, used=used, amount=amount) is None


def test_the_pace_so_far_says_when() -> None:
    assert runs_out(start=0, end=100, now=20, used=50, amount=100) == 40
    assert runs_out(start=0, end=100, now=20, used=10, amount=100) is None


def test_a_price_counts_from_its_time_on_for_the_models_that_may_be_used() -> None:
    prices = [Price("a", 50.0, 1, 1)]
    assert priced(None, prices, 50)
    assert priced(frozenset({"a", "b"}), prices, 60)
    assert not priced(frozenset({"b"}), prices, 60)
    assert not priced(None, prices, 49)
    assert not priced(None, [], 60)
