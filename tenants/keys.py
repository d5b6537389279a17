"""What a key is: 256 random bits, shown once, known afterwards by digest and prefix only. Pure."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from tenants.limits import Budget, Limit

SECRET_BYTES = 32
PREFIX_LENGTH = 7
MAX_LENGTH = 200
"""Longer tokens are refused before they are hashed."""


@dataclass(frozen=True, slots=True)
class NewSecret:
    text: str
    prefix: str
    digest: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What one key allows, as the gateway keeps it. Times in epoch seconds.

    `models`: names of models and adapters, None for all. `limits` and `budgets`: of everybody on the key's path,
    widest first. `band`: its priority band, empty for the model's.
    """

    digest: str
    key_id: int | None
    prefix: str
    project_id: int | None
    user_id: int | None
    models: frozenset[str] | None
    expires_at: float | None
    limits: tuple[Limit, ...] = ()
    budgets: tuple[Budget, ...] = ()
    band: str = ""

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


def new_secret(kind: str = "sk") -> NewSecret:
    """A fresh secret: `sk-…` for project keys, `at-…` for API tokens, `nt-…` for nodes."""
    text = f"{kind}-{secrets.token_urlsafe(SECRET_BYTES)}"
    return NewSecret(text=text, prefix=text[:PREFIX_LENGTH], digest=digest(text))


def digest(text: str) -> str:
    """SHA-256 in hex. The secret has 256 bits of its own, so no slow hash is needed."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
