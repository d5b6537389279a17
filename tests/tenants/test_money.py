"""Money as whole units: what a request costs, and how amounts are read and written."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.money import MILLION, UNITS, Price, cost, decimal, text, units

COUNTS = st.integers(0, 10**8)
AMOUNTS = st.integers(0, 10**12)
PRICES = st.builds(Price, st.just("m"), st.just(0.0), AMOUNTS, AMOUNTS, st.none() | AMOUNTS, AMOUNTS)


@given(PRICES, COUNTS, COUNTS, COUNTS)
def test_a_cost_is_what_exact_arithmetic_says_rounded_half_up(
    price: Price, prompt: int, cached: int, completion: int
) -> None:
    of_cached = price.input if price.cached_input is None else price.cached_input
    known = min(cached, prompt)
    exact = Decimal((prompt - known) * price.input + known * of_cached + completion * price.output) / MILLION
    assert abs(cost(price, prompt=prompt, cached=cached, completion=completion) - price.request - exact) <= Decimal(
        "0.5"
    )


def test_a_cost_is_told_by_its_parts() -> None:
    price = Price("m", 0.0, input=3 * UNITS, output=15 * UNITS, cached_input=UNITS, request=7)
    assert cost(price, prompt=1000, cached=400, completion=100) == 7 + (600 * 300 + 400 * 100 + 100 * 1500)
    assert cost(Price("m", 0.0, 1, 0), prompt=MILLION // 2, cached=0, completion=0) == 1


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_amount_comes_back_as_it_went_out(amount: int) -> None:
    assert units(decimal(amount)) == amount
    assert units(Decimal(text(amount).replace(",", ""))) == amount


@pytest.mark.parametrize("amount", ["0.000000001", "NaN", "Infinity", "1E+99999", "-1E-99999"])
def test_what_is_no_amount_is_refused(amount: str) -> None:
    with pytest.raises(ValueError, match="8 decimals"):
        units(Decimal(amount))


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0.00 EUR"),
        (123_450_000_000, "1,234.50 EUR"),
        (1, "0.00000001 EUR"),
        (-5 * UNITS, "-5.00 EUR"),
        (None, "–"),
    ],
)
def test_money_reads_with_its_currency_and_unknown_is_not_zero(amount: int | None, shown: str) -> None:
    assert text(amount, "EUR") == shown
