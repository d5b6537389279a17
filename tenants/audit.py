"""Who changes what: an Actor travels with every action, and every action leaves one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest

from tenants.models import AuditEntry, User


@dataclass(frozen=True, slots=True)
class Actor:
    """A person (or the product itself, `user` None) and the way they came: web, admin, api, cli or system."""

    name: str
    via: str
    user: User | None = None
    address: str = ""

    @classmethod
    def of(cls, request: HttpRequest, via: str = "web") -> Actor:
        user = request.user
        assert isinstance(user, User)
        return cls(name=user.username, via=via, user=user, address=request.META.get("REMOTE_ADDR", ""))


SYSTEM = Actor(name="llmgw", via="system")


def record(
    actor: Actor,
    action: str,
    target: str,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    """Write the audit row of one change; call inside its transaction. Never hand in a secret."""
    AuditEntry.objects.create(
        actor=actor.user,
        actor_name=actor.name,
        via=actor.via,
        action=action,
        target=target[:200],
        before=before,
        after=after,
        address=actor.address,
    )
