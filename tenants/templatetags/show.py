"""Figures, times and states in templates; how they read is decided in tenants.figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from django import template
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from tenants import figures
from tenants.finding import result_of

register = template.Library()

TONES = {
    "ready": "ok",
    "up": "ok",
    "active": "ok",
    "ok": "ok",
    "answered": "ok",
    "loading": "warn",
    "starting": "warn",
    "fetching": "warn",
    "installing": "warn",
    "joining": "warn",
    "draining": "warn",
    "stopping": "warn",
    "warn": "warn",
    "cordoned": "warn",
    "waiting": "warn",
    "refused": "warn",
    "over": "warn",
    "used up": "bad",
    "failed": "bad",
    "faulty": "bad",
    "down": "bad",
    "lost": "bad",
    "unreachable": "bad",
    "revoked": "bad",
    "expired": "bad",
}
"""Colour of a state's word; every other word (off, on demand, cannot run, external, stopped) is grey."""


@register.filter
def number(value: float | None) -> str:
    return figures.number(value, 1)


@register.filter
def hundredths(value: float | None) -> str:
    return figures.number(value, 2)


@register.filter
def whole(value: float | None) -> str:
    return figures.number(value)


@register.filter
def size(value: float | None) -> str:
    return figures.size(value)


@register.filter
def milliseconds(value: float | None) -> str:
    return figures.milliseconds(value)


@register.filter
def percent(value: float | None) -> str:
    return figures.percent(value)


@register.filter
def seconds_span(value: float) -> str:
    return figures.milliseconds(value * 1000)


@register.filter
def ago(at: datetime | None) -> SafeString | str:
    """How long ago, with the absolute time on hover."""
    if at is None:
        return figures.ago(None, timezone.now())
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        at.isoformat(timespec="seconds"),
        f"{at:%Y-%m-%d %H:%M:%S} UTC",
        figures.ago(at, timezone.now()),
    )


@register.filter
def of(counts: Mapping[str, object], label: str) -> object | None:
    """`counts|of:label`: a look-up by a name that the template itself looks up."""
    return counts.get(label)


@register.filter
def quoted(text: str) -> str:
    """As a string of JSON and of Python."""
    return json.dumps(text, ensure_ascii=False)


@register.filter
def in_shell(text: str) -> str:
    """For between the single quotes of a command to paste."""
    return text.replace("'", "'\\''")


@register.filter
def result(status: int) -> str:
    """The word for an HTTP status: ok, refused, left, failed."""
    return result_of(status)


@register.filter
def state(word: str) -> SafeString:
    return format_html('<span class="state {}">{}</span>', TONES.get(word, "idle"), word or figures.UNKNOWN)


class Part(NamedTuple):
    kind: str
    start: float
    width: float


@register.inclusion_tag("_bar.html")
def bar(total: float, **shares: float | None) -> dict[str, object]:
    """A bar of `total` with a part for each of `used`, `starting`, `closed`, `faulty`, `reserved`, `warn`."""
    parts, start = [], 0.0
    for kind, value in shares.items():
        width = 100 * min(max(value or 0, 0) / total, 1) if total else 0
        width = min(width, 100 - start)
        if width > 0:
            parts.append(Part(kind, round(start, 2), round(width, 2)))
        start += width
    return {"parts": parts}
