"""Gateways' limiters that share a Redis: the keys they know and how a request asks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from routing.limits import Account, Hold, Limiter, Meter
from routing.sharing import Share
from tenants.keys import Grant
from tenants.limits import Budget, Limit
from tenants.periods import bounds

PROJECT = Limit("project", 1, "Blue")


def key(name: str, limit: Limit | None = None, *budgets: Budget) -> Grant:
    return Grant(name, 1, "sk-1234", 1, None, None, None, (limit,) if limit else (), budgets)


GRANTS = (
    key("two slots", Limit("project", 1, "Blue", concurrent=2)),
    key("many slots", Limit("project", 2, "Green", concurrent=40)),
    key("one request", None, Budget(1, "team", 1, "Ops", "tokens", 100, "month")),
    key("some money", None, Budget(2, "team", 1, "Ops", "money", 10_000, "total")),
    key("rates", Limit("project", 3, "Red", requests_per_minute=60, tokens_per_minute=60_000)),
    key("fast", Limit("project", 4, "Pink", requests_per_minute=600_000, concurrent=1_000)),
)


def adopt(limiter: Limiter, **spent: int) -> None:
    """`spent`: what the store says, `b` and the budget's number."""
    wall = time.time()
    said = {
        budget.budget_id: (bounds(budget.period, budget.time_zone, wall)[0], spent.get(f"b{budget.budget_id}", 0))
        for grant in GRANTS
        for budget in grant.budgets
    }
    limiter.adopt(GRANTS, said, limiter.ledger.asked(), time.monotonic(), wall)


class Gateway:
    """One gateway's part in this: its limiter and its share."""

    def __init__(self, url: str) -> None:
        self.limiter, self.share = Limiter(), Share(url)

    def account(self, name: str) -> Account:
        found = self.limiter.account(next(grant for grant in GRANTS if grant.digest == name))
        assert found is not None
        return found

    def meter(self, name: str) -> Meter:
        return self.account(name).meters[0]

    async def reserve(self, name: str, tokens: int = 100, cost: int = 100) -> Hold:
        grant = next(grant for grant in GRANTS if grant.digest == name)
        return await reserve(self.limiter, self.share, grant, tokens, cost)


async def reserve(limiter: Limiter, share: Share, grant: Grant, tokens: int = 100, cost: int = 100) -> Hold:
    """As the gateway does it: without waiting where that is possible."""
    account = limiter.account(grant)
    assert account is not None
    hold = account.try_reserve(tokens, cost, time.monotonic())
    return await share.reserve(account, tokens, cost) if hold is None else hold


@asynccontextmanager
async def gateways(url: str, count: int, **spent: int) -> AsyncIterator[list[Gateway]]:
    started = [Gateway(url) for _ in range(count)]
    try:
        for each in started:
            adopt(each.limiter, **spent)
            await each.share.start(each.limiter)
        yield started
    finally:
        for each in started:
            await each.share.stop()
