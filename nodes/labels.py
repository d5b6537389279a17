"""A node's labels: what its agent.yaml tells, and what operators set, which wins. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agent import protocol

MAX_LENGTH = 63
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}\Z")


class LabelFault(Exception):
    """Why labels cannot be set; `str()` is the whole sentence."""


def effective(told: Mapping[str, str], held: Mapping[str, str]) -> dict[str, str]:
    """What placement goes by."""
    return {**told, **held}


def changed(told: Mapping[str, str], held: Mapping[str, str], change: Mapping[str, str | None]) -> dict[str, str]:
    """What operators have set after a change; None takes away what was set. Raises LabelFault."""
    after = dict(held)
    for name, value in change.items():
        if value is not None:
            _check(name, value)
            after[name] = value
        elif name in after:
            del after[name]
        elif name in told:
            raise LabelFault(f"Label {name} stands in the node's agent.yaml; take it out there, or set another value.")
        else:
            raise LabelFault(f"The node has no label {name}.")
    if len(effective(told, after)) > protocol.MAX_LABELS:
        raise LabelFault(f"A node has at most {protocol.MAX_LABELS} labels; take one away.")
    return after


def _check(name: str, value: str) -> None:
    if not _NAME.match(name):
        raise LabelFault(f"{name[:MAX_LENGTH]!r} is no label: write 1 to 63 letters, digits, dots, hyphens, / and _.")
    if len(value) > MAX_LENGTH or not value.isprintable():
        raise LabelFault(f"The value of {name} must be one line of at most {MAX_LENGTH} characters.")
