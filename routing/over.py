"""What a request is told that goes over a limit or budget: whose it is, used of limit, and when it resets. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Final

from tenants.money import text as money
from tenants.periods import zone

if TYPE_CHECKING:
    from routing.limits import Meter

REQUESTS: Final = 0
TOKENS: Final = 1
SLOTS: Final = 2
QUOTA: Final = 3
MONEY: Final = 4

DUST: Final = 1e-6
"""Far less than one request or token: what floating point leaves of a bucket that is empty."""
FREED_RETRY_S = 2.0
"""When to try again where requests in flight stand in the way: nobody knows when they end."""
NEVER_RETRY_S = 3600.0
"""When to try again where waiting does not help."""


class Over(Exception):
    """A limit or budget is reached. `code` is GW-3's; `resets_s` is for Retry-After."""

    def __init__(self, code: str, message: str, resets_s: float) -> None:
        super().__init__(message)
        self.code, self.message, self.resets_s = code, message, resets_s


def over(meter: Meter, need: int, now: float, offset: float) -> Over:
    """Why `meter` has no room for `need`. `offset`: epoch seconds minus monotonic ones."""
    if meter.unit == SLOTS:
        return _slots(meter)
    return _rate(meter, need, now) if meter.unit < SLOTS else _budget(meter, need, now, offset)


def _rate(meter: Meter, need: int, now: float) -> Over:
    whose = _sentence(meter.whose)
    if need > meter.amount:
        if meter.unit == REQUESTS:
            text = f"{whose} may send no requests: its limit is 0 a minute."
        else:
            text = (
                f"This request may need {need:,} tokens, and {meter.whose} is limited to {meter.amount:,} a minute:"
                " it never fits. Ask for fewer (max_tokens), send less, or have the limit raised."
            )
        return Over("rate_limited", text, NEVER_RETRY_S)
    used = meter.used_at(now)
    resets_s = max((used + need - meter.amount) / meter.rate, 1.0)
    what, needs = ("requests", "") if meter.unit == REQUESTS else ("tokens", f", and this request may need {need:,}")
    text = f"{whose} has used {math.ceil(used - DUST):,} of {meter.amount:,} {what} a minute{needs}."
    return Over("rate_limited", f"{text} Try again in {math.ceil(resets_s)} s.", resets_s)


def _slots(meter: Meter) -> Over:
    whose = _sentence(meter.whose)
    if meter.amount == 0:
        return Over("rate_limited", f"{whose} may run no requests: its limit is 0 at once.", NEVER_RETRY_S)
    text = f"{whose} runs {meter.reserved + meter.others:,} of {meter.amount:,} requests at once."
    return Over("rate_limited", f"{text} Try again when one of them has ended.", FREED_RETRY_S)


def _budget(meter: Meter, need: int, now: float, offset: float) -> Over:
    show: Callable[[int], str] = _money if meter.unit == MONEY else _count
    if meter.unit == MONEY:
        code, kind, verb = "budget_exceeded", "budget", "may cost"
    else:
        code, kind, verb = "quota_exceeded", "token quota", "may need"
    used, held = int(meter.used), meter.reserved + meter.others
    text = f"The {kind} of {meter.whose} {_PERIODS[meter.period]} has {show(used)} of {show(meter.amount)} used"
    if held:
        text += f" and {show(held)} reserved for requests in flight"
    text += f"; this request {verb} {show(need)}. "
    if meter.ends_at is None:
        reset, resets_s = "It never resets: have it raised.", NEVER_RETRY_S
    else:
        resets_s = max(meter.ends_at - offset - now, 1.0)
        when = datetime.fromtimestamp(meter.ends_at, zone(meter.time_zone))
        reset = f"It resets on {when:%Y-%m-%d at %H:%M} ({meter.time_zone})."
    if used + need <= meter.amount:
        resets_s = FREED_RETRY_S
        text += "Try again when some of them have ended. "
    return Over(code, text + reset, resets_s)


def _count(number: int) -> str:
    return f"{number:,}"


def _money(units: int) -> str:
    return money(units)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


_PERIODS = {"day": "for this day", "week": "for this week", "month": "for this month", "total": "in total"}
