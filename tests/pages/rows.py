"""Finished requests and whole clusters of a given size, for pages and their query counts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from tenants.models import Key, Membership, Role, Team, Usage, User
from tests import factories


def make_usage(count: int = 1, *, key: Key | None = None, ended: datetime | None = None, **fields: Any) -> list[Usage]:
    """`count` requests that ended a second apart, the newest at `ended`."""
    ended = ended or timezone.now()
    start = Usage.objects.count()
    return Usage.objects.bulk_create(
        Usage(
            **{
                "request_id": f"req-{start + number}",
                "at": ended - timedelta(seconds=number),
                "key": key,
                "project": key.project if key else None,
                "route": "/v1/chat/completions",
                "model": "smollm2",
                "replica": "smollm2-1",
                "node": "node1",
                "status": 200,
                "prompt_tokens": 12,
                "completion_tokens": 20,
                "first_token_ms": 41.0,
                "total_ms": 285.0,
                **fields,
            }
        )
        for number in range(count)
    )


def make_operator(name: str = "root") -> User:
    return factories.make_user(name, is_superuser=True, is_staff=True)


def make_member(team: Team, role: Role, name: str) -> User:
    user = factories.make_user(name)
    Membership.objects.create(user=user, team=team, role=role)
    return user


def make_cluster(count: int) -> None:
    """`count` nodes and models with a replica each; of every five one is loading and one has failed."""
    for number in range(count):
        state = {3: "loading", 4: "failed"}.get(number % 5, "ready")
        factories.make_model(f"model-{number:04}", position=number)
        node = factories.make_node(f"node-{number:04}")
        factories.make_replica(
            f"model-{number:04}-1",
            node=node,
            state=state,
            model=f"model-{number:04}",
            reason="the engine ended with code 1: could not load the model" if state == "failed" else "",
        )
