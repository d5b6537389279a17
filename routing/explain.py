"""Why a request went where it went (GW-46), as a small record beside its usage row. Pure."""

from __future__ import annotations

import msgspec


class Considered(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One endpoint as the choice saw it. `score`: lower is better, None unknown; `note`: why it could not be taken."""

    replica: str
    score: float | None = None
    note: str = ""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One try; `failed` empty: it answered. Milliseconds since the request's headers."""

    replica: str
    at_ms: float
    failed: str = ""


class Skipped(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A model of the fallback chain that did not serve, and the code that says why."""

    model: str
    code: str


class Explained(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """What was decided. Lists are cut to what fits a page: 16 candidates, 10 attempts, 10 models."""

    asked: str = ""
    """The name that the client wrote, when it is not the model's."""
    band: str = ""
    routing_profile: str = ""
    queued: bool = False
    position: int = 0
    """Place in the queue when it began to wait; 0 when it did not."""
    loading: bool = False
    """Whether it waited for a replica to become ready."""
    reserved_tokens: int = 0
    affinity: str = ""
    """hit, miss or saturated, when the model's requests follow their prefixes."""
    considered: tuple[Considered, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    skipped: tuple[Skipped, ...] = ()
