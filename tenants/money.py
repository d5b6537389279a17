"""Money as whole numbers of 10^-8 of the currency, so that sums are exact; what a request costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = 10**8
MILLION = 1_000_000


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
