"""What the authority answers to an agent that asks for a new certificate; who holds its key signs, see `llmgw.ops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Signed:
    """`certificate` as PEM, `serial` in hexadecimal."""

    certificate: str
    serial: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class NotSigned:
    """`reason`: with the next step."""

    reason: str


Sign = Callable[[str, str, str], Signed | NotSigned]
"""Given the node, its request and the certificate that its stream came with, both as PEM."""
