"""Money as whole numbers of 10^-8 of the currency, so that sums are exact; what a request costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

UNITS: Final = 10**8
MILLION: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Price:
    """What a model's tokens cost from `valid_from` (epoch seconds) on: units a million tokens, and units a request.

    `cached_input` None: cached tokens cost what input costs.
    """

    model: str
    valid_from: float
    input: int
    output: int
    cached_input: int | None = None
    request: int = 0


def cost(price: Price, *, prompt: int, cached: int, completion: int) -> int:
    """Units that one request costs, rounded half up. `cached` is part of `prompt`."""
    cached = min(cached, prompt)
    cached_price = price.input if price.cached_input is None else price.cached_input
    tokens = (prompt - cached) * price.input + cached * cached_price + completion * price.output
    return price.request + (tokens + MILLION // 2) // MILLION


def units(amount: Decimal) -> int:
    """Of the currency in units of 10^-8; nothing finer is kept, so a finer amount is a ValueError."""
    if not amount.is_finite() or amount.adjusted() > 18 or (scaled := amount.scaleb(8)) != scaled.to_integral_value():
        raise ValueError("An amount has at most 8 decimals.")
    return int(scaled)


def decimal(amount: int) -> Decimal:
    """Units of 10^-8 as the currency, without zeros that say nothing: 350000000 -> Decimal("3.5")."""
    whole, rest = divmod(abs(amount), UNITS)
    digits = f"{rest:08d}".rstrip("0")
    return Decimal(f"{'-' if amount < 0 else ''}{whole}{'.' if digits else ''}{digits}")


def text(amount: int | None, currency: str = "") -> str:
    """How money reads: 1,234.50 EUR; with two decimals at least and as many as it takes, unknown as "–"."""
    if amount is None:
        return "–"
    whole, rest = divmod(abs(amount), UNITS)
    digits = f"{rest:08d}".rstrip("0").ljust(2, "0")
    return f"{'-' if amount < 0 else ''}{whole:,}.{digits}{' ' if currency else ''}{currency}"
