"""Writes the timeline: what happened to nodes, models and replicas, in words an operator understands (ND-48)."""

from __future__ import annotations

from datetime import datetime

from nodes.models import Event


def note(kind: str, text: str, *, at: datetime, model: str = "", replica: str = "", node: str = "") -> None:
    """One line. `text` stands alone, in lower case as if after a time; it is shown with a capital."""
    text = text[:1].upper() + text[1:]
    Event.objects.create(at=at, kind=kind, model=model, replica=replica, node=node, text=text[:1000])
