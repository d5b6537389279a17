"""Texts of options that the control plane reads: looked at here first, so that what is wrong names the option."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal, InvalidOperation

import typer


def moment(option: str, text: str) -> str:
    """A time in ISO 8601, as it was given."""
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text[:40]!r} is no time. Write one such as 2027-01-31T00:00:00Z.", param_hint=option
        ) from None
    return text


def amount(option: str, text: str) -> str:
    """An amount of money, as it was given; how large and how fine it may be, the control plane knows."""
    try:
        good = Decimal(text).is_finite()
    except InvalidOperation:
        good = False
    if not good:
        raise typer.BadParameter(
            f"{text[:40]!r} is no amount of money. Write one such as 0.15.", param_hint=option
        ) from None
    return text
