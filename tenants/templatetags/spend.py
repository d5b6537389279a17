"""Money and budgets in templates; how they read is decided in tenants.money and tenants.figures."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

from django import template

from tenants import figures, money, standing
from tenants.standing import BudgetLine

register = template.Library()


@register.filter
def in_currency(amount: int | None) -> str:
    """Units of 10^-8, rounded to the cent where there is more than a cent."""
    if amount is not None and abs(amount) >= money.UNITS // 100:
        cent = money.UNITS // 100
        amount = (abs(amount) + cent // 2) // cent * cent * (-1 if amount < 0 else 1)
    return money.text(amount, standing.currency())


@register.filter
def paid(amount: Decimal) -> str:
    """An amount of the currency, rounded as above."""
    return in_currency(money.units(amount))


@register.filter
def amount(line: BudgetLine) -> str:
    """What the budget allows: 350.00 EUR a month."""
    period = {"total": "in all"}.get(line.row.period, f"a {line.row.period}")
    return f"{_in(line, line.row.amount)} {period}"


@register.filter
def used(line: BudgetLine) -> str:
    return _in(line, line.spent.amount)


@register.filter
def local(at: datetime) -> str:
    """A time as it reads where its budget's days begin, not where this server is: 1 December 00:00."""
    return f"{at.day} {at:%B %H:%M}"


def _in(line: BudgetLine, value: int) -> str:
    return in_currency(value) if line.row.unit == "money" else f"{figures.number(value)} tokens"
