"""Enforces limits and budgets (GW-32, GW-33): a meter for each rate, pool of slots and budget, for all keys below.

A request checks every meter on its path, then takes from all, so that one refused takes nothing. Pure, fed with
reservations and their ends. Times are monotonic seconds, so that a clock set back refills nothing; only when budgets
begin anew is read off the wall, by the distance that `adopt` was told.

With several gateways (routing.sharing) a meter also has a lease: what this process may still take of what all share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Final

from routing.ledger import Ledger
from routing.over import DUST, MONEY, QUOTA, REQUESTS, SLOTS, TOKENS, Over, over
from tenants.keys import Grant
from tenants.limits import Budget, Limit, Period
from tenants.periods import bounds

MINUTE_S: Final = 60.0

Name = tuple[int, str, int]
Header = tuple[bytes, bytes]


class Meter:
    """One thing that is limited. Always `used` + `reserved` <= `amount` when a request is let in.

    Rates are buckets: `used` drains at `rate` a second. Slots have nothing but `reserved`. Of budgets `used` is what
    was spent in the period.
    """

    __slots__ = (
        "allowed",
        "amount",
        "at",
        "ceiling",
        "drawn",
        "ends",
        "ends_at",
        "name",
        "others",
        "period",
        "rate",
        "reserved",
        "shared",
        "short_until",
        "starts_at",
        "stored",
        "taken",
        "time_zone",
        "unit",
        "until",
        "used",
        "whose",
    )

    def __init__(self, unit: int, name: Name, now: float) -> None:
        self.unit, self.name, self.at = unit, name, now
        self.whose = ""
        self.amount = 0
        self.ceiling = 0.0
        self.rate = 0.0
        self.used = 0.0
        self.reserved = 0
        self.period: Period = "total"
        self.time_zone = ""
        self.starts_at = 0.0
        self.ends_at: float | None = None
        """Epoch seconds; `ends` is the same on the monotonic clock."""
        self.ends = inf
        self.stored = 0
        """What the store last said was spent in this period."""
        self.shared = False
        """Whether a lease says what this process may take. If so, it may until `until` as long as
        `taken` + `reserved` <= `allowed`."""
        self.taken = 0
        """What this process used for good, ever or in this period."""
        self.allowed = 0
        self.until = 0.0
        self.others = 0
        """What other processes had reserved when last heard."""
        self.short_until = 0.0
        """Until then there is no point in asking for more."""
        self.drawn = 0
        """Everything ever taken or reserved: shows how fast it goes."""

    def used_at(self, now: float) -> float:
        """Moves a bucket on to `now`."""
        if self.rate and now > self.at:
            used = self.used - self.rate * (now - self.at)
            self.used = used if used > 0 else 0.0
            self.at = now
        return self.used

    def take(self, amount: int, now: float) -> None:
        """Into a bucket at once; `amount` may be negative, to give back."""
        used = self.used_at(now) + amount
        self.used = used if used > 0 else 0.0
        self.taken += amount


class Hold:
    """What one request has reserved. `settle` or `release` ends it, whichever comes first; the other is nothing."""

    __slots__ = ("_account", "_needs")

    def __init__(self, account: Account, needs: tuple[int, ...]) -> None:
        self._account: Account | None = account
        self._needs = needs

    def settle(self, tokens: int, cost: int | None, now: float) -> None:
        """What was really used. Call in one step with appending the record, after it."""
        account, self._account = self._account, None
        if account is None:
            return
        used, spent = max(tokens, 0), max(cost or 0, 0)
        real: tuple[int, ...] = (1, used, 0, used, spent)  # of any length, or the compiler makes one at each look
        limiter, needs = account.limiter, self._needs
        for meter in account.meters:
            unit = meter.unit
            if unit == TOKENS:
                meter.take(real[unit] - needs[unit], now)
            elif unit > TOKENS:
                if now >= meter.ends:
                    limiter.roll(meter, now)
                meter.reserved -= needs[unit]
                if real[unit]:
                    meter.used += real[unit]
                    meter.taken += real[unit]
                    limiter.ledger.settled(meter, real[unit])

    def release(self, now: float) -> None:
        """Everything back: no engine has worked on it."""
        account, self._account = self._account, None
        if account is None:
            return
        for meter in account.meters:
            need = self._needs[meter.unit]
            if meter.unit <= TOKENS:
                meter.take(-need, now)
            else:
                meter.reserved -= need


class Account:
    """The meters on one path; many keys may share it."""

    __slots__ = ("_requests", "_tokens", "limiter", "meters")

    def __init__(self, limiter: Limiter, meters: tuple[Meter, ...]) -> None:
        self.limiter, self.meters = limiter, meters
        self._requests = tuple(meter for meter in meters if meter.unit == REQUESTS)
        self._tokens = tuple(meter for meter in meters if meter.unit == TOKENS)

    def try_reserve(self, tokens: int, cost: int, now: float) -> Hold | None:
        """Reserve one request's estimate, or raise Over. None: all gateways together have room, but this one's lease
        is used up; see `Share.reserve`."""
        needs: tuple[int, ...] = (1, tokens, 1, tokens, cost)
        short = False
        for meter in self.meters:
            need = needs[meter.unit]
            if now >= meter.ends:
                self.limiter.roll(meter, now)
            used = meter.used
            if meter.rate and now > meter.at:
                used -= meter.rate * (now - meter.at)
                meter.used = used = used if used > 0 else 0.0
                meter.at = now
            if used + meter.reserved + need > meter.ceiling:
                if need:
                    raise self._worst(needs, now)
            elif meter.shared and (meter.taken + meter.reserved + need > meter.allowed or now >= meter.until):
                short = short or need > 0
        if short:
            if any(now < meter.short_until for meter, _ in self.lacking(tokens, cost, now)):
                raise self._worst(needs, now)
            return None
        for meter in self.meters:
            need = needs[meter.unit]
            meter.drawn += need
            if meter.unit <= TOKENS:
                meter.used += need
                meter.taken += need
            else:
                meter.reserved += need
        return Hold(self, needs)

    def lacking(self, tokens: int, cost: int, now: float) -> list[tuple[Meter, int]]:
        """The meters whose lease has no room for this request, with what it needs."""
        needs: tuple[int, ...] = (1, tokens, 1, tokens, cost)
        return [
            (meter, needs[meter.unit])
            for meter in self.meters
            if meter.shared
            and needs[meter.unit]
            and (meter.taken + meter.reserved + needs[meter.unit] > meter.allowed or now >= meter.until)
        ]

    def _worst(self, needs: tuple[int, ...], now: float) -> Over:
        """Of all that is reached, what lasts longest."""
        offset = self.limiter.offset
        found = [
            over(meter, needs[meter.unit], now, offset)
            for meter in self.meters
            if needs[meter.unit]
            and (
                meter.used_at(now) + meter.reserved + needs[meter.unit] > meter.ceiling
                or (meter.shared and meter.taken + meter.reserved + needs[meter.unit] > meter.allowed)
                or (meter.shared and now >= meter.until)
            )
        ]
        return max(found, key=lambda each: each.resets_s)

    def headers(self, now: float) -> list[Header]:
        """x-ratelimit-*: of the rates on the path, those with the least left."""
        pairs = (line.split(b": ", 1) for line in self.lines(now).split(b"\r\n") if line)
        return [(name, value) for name, value in pairs]

    def lines(self, now: float) -> bytes:
        """`headers` as they stand in an answer."""
        found = _standing(self._requests, "requests", now) if self._requests else ""
        if self._tokens:
            found += _standing(self._tokens, "tokens", now)
        return found.encode()


def _standing(meters: tuple[Meter, ...], kind: str, now: float) -> str:
    """Limit, what is left of it, and seconds until all of it is free, of the meter with the least left."""
    tightest, least = meters[0], inf
    for meter in meters:
        left = meter.amount - meter.used
        if now > meter.at:
            left = min(left + meter.rate * (now - meter.at), meter.amount)
        if left < least:
            tightest, least = meter, left
    full_s = (tightest.amount - least) / tightest.rate if tightest.rate else MINUTE_S
    tenths = int(full_s * 10 + 0.5)
    rest = tenths % 10
    return (
        f"x-ratelimit-limit-{kind}: {tightest.amount}\r\n"
        f"x-ratelimit-remaining-{kind}: {int(least + DUST) if least > 0 else 0}\r\n"
        f"x-ratelimit-reset-{kind}: {tenths // 10}{f'.{rest}' if rest else ''}s\r\n"
    )


class Limiter:
    """The meters of one gateway process."""

    def __init__(self) -> None:
        self.ledger: Ledger[Meter] = Ledger()
        self.offset = 0.0
        """Epoch seconds minus monotonic ones."""
        self.meters: dict[Name, Meter] = {}
        self._accounts: dict[str, Account] = {}
        self._grants: tuple[Grant, ...] | None = None
        self._shared = False

    def account(self, grant: Grant) -> Account | None:
        """None where nothing limits this key."""
        return self._accounts.get(grant.digest)

    def adopt(
        self,
        grants: tuple[Grant, ...],
        spent: Mapping[int, tuple[float, int]],
        ticket: int,
        now: float,
        wall: float,
    ) -> None:
        """Take over what keys allow and what the store says was spent: per budget, since when and how much.

        `ticket`: what `ledger.asked()` gave before the store was asked. The same `grants` again only look at `spent`.
        Meters that stay keep what is used and reserved, those gone are forgotten.
        """
        self.offset = wall - now
        self.ledger.answered(ticket)
        if grants is not self._grants:
            self._grants = grants
            self._rebuild(grants, now)
        known: dict[tuple[Period, str], tuple[float, float | None]] = {}
        for meter in self.meters.values():
            if meter.unit >= QUOTA:
                period = (meter.period, meter.time_zone)
                if period not in known:
                    known[period] = bounds(*period, wall)
                self._begin(meter, *known[period])
                since, amount = spent.get(meter.name[2], (None, 0))
                if since == meter.starts_at:
                    self._count(meter, amount)

    def share(self, shared: bool) -> None:
        """From now on leases say what this process may take, or no longer."""
        self._shared = shared
        for meter in self.meters.values():
            meter.shared = shared

    def roll(self, meter: Meter, now: float) -> None:
        """The period of a budget has ended."""
        self._begin(meter, *bounds(meter.period, meter.time_zone, now + self.offset))

    def _begin(self, meter: Meter, starts_at: float, ends_at: float | None) -> None:
        if starts_at != meter.starts_at:
            meter.starts_at = starts_at
            meter.stored = meter.taken = meter.allowed = meter.others = 0
            meter.used = 0.0
            meter.until = meter.short_until = 0.0
            self.ledger.forget(meter)
        meter.ends_at = ends_at
        meter.ends = inf if ends_at is None else ends_at - self.offset

    def _count(self, meter: Meter, stored: int) -> None:
        meter.stored = stored
        used = stored + self.ledger.uncounted(meter)
        # Where others share it, Redis knows of what they have not handed over to the store yet.
        meter.used = max(meter.used, used) if meter.shared else used

    def _rebuild(self, grants: tuple[Grant, ...], now: float) -> None:
        meters: dict[Name, Meter] = {}
        accounts: dict[str, Account] = {}
        # Keys of one project have the very same tuples, and often the very same path.
        paths: dict[tuple[int, int], Account | None] = {}
        for grant in grants:
            if grant.limits or grant.budgets:
                path = (id(grant.limits), id(grant.budgets))
                if path not in paths:
                    found = [meter for limit in grant.limits for meter in self._of_limit(limit, meters, now)]
                    found += [self._of_budget(each, meters, now) for each in grant.budgets if each.stops]
                    paths[path] = Account(self, tuple(found)) if found else None
                account = paths[path]
                if account is not None:
                    accounts[grant.digest] = account
        self.meters, self._accounts = meters, accounts

    def _meter(self, unit: int, name: Name, meters: dict[Name, Meter], now: float) -> Meter:
        meter = meters.get(name)
        if meter is None:
            meter = self.meters.get(name)
            if meter is None:
                meter = Meter(unit, name, now)
                meter.shared = self._shared
            meters[name] = meter
        return meter

    def _of_limit(self, limit: Limit, meters: dict[Name, Meter], now: float) -> Iterable[Meter]:
        whose = f"{limit.subject} {limit.name}"
        for unit, amount in (
            (SLOTS, limit.concurrent),
            (REQUESTS, limit.requests_per_minute),
            (TOKENS, limit.tokens_per_minute),
        ):
            if amount is not None:
                meter = self._meter(unit, (unit, limit.subject, limit.subject_id), meters, now)
                if unit != SLOTS and amount != meter.amount:
                    meter.used_at(now)  # what has passed drained at the old rate
                    meter.rate = amount / MINUTE_S
                meter.whose, meter.amount = whose, amount
                meter.ceiling = float(amount) if unit == SLOTS else amount + DUST
                yield meter

    def _of_budget(self, budget: Budget, meters: dict[Name, Meter], now: float) -> Meter:
        unit = MONEY if budget.unit == "money" else QUOTA
        meter = self._meter(unit, (unit, "budget", budget.budget_id), meters, now)
        meter.whose = f"{budget.subject} {budget.name}"
        meter.amount, meter.ceiling = budget.amount, float(budget.amount)
        meter.period, meter.time_zone = budget.period, budget.time_zone
        return meter
