"""Who asks in these tests: Root operates, Alice owns a team, Vera looks into it, Charlie is in another."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.test import Client

from tenants import actions
from tenants.audit import SYSTEM
from tenants.models import Budget, Key, Membership, Project, Role, Usage, User
from tests import factories

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


@dataclass
class World:
    root: User = field(default_factory=lambda: factories.make_user("root", is_superuser=True))
    alice: User = field(default_factory=lambda: factories.make_user("alice"))
    vera: User = field(default_factory=lambda: factories.make_user("vera"))
    charlie: User = field(default_factory=lambda: factories.make_user("charlie"))
    project: Project = field(init=False)
    key: Key = field(init=False)
    usage: Usage = field(init=False)
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        team = factories.make_team("Blue", owner=self.alice)
        Membership.objects.create(user=self.vera, team=team, role=Role.VIEWER)
        factories.make_team("Red", owner=self.charlie)
        self.project = factories.make_project("Apps", team=team)
        self.key, _ = factories.make_key(project=self.project, owner=self.alice)
        self.usage = make_usage(self.project, self.key, request_id="req-1")
        self.budget = Budget.objects.create(project=self.project, unit="tokens", amount=1000, period="day")


def make_usage(project: Project, key: Key | None = None, **fields: Any) -> Usage:
    values = {"at": NOON, "route": "/v1/chat/completions", "model": "smollm2", "status": 200, "total_ms": 12.5}
    values |= {"prompt_tokens": 3, "completion_tokens": 4}
    made = Usage.objects.create(project=project, key=key, **{**values, **fields})
    factories.add_up([made])
    return made


def client(user: User | None, *scopes: str) -> Client:
    """With a token of these scopes; without scopes by session."""
    made = Client()
    if user and scopes:
        _, secret = actions.make_api_token(user=user, name="t", scopes=scopes, actor=SYSTEM)
        return Client(headers={"Authorization": f"Bearer {secret}"})
    if user:
        made.force_login(user)
    return made
