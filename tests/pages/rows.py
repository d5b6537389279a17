"""Finished requests and whole clusters of a given size, for pages and their query counts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.test import Client
from django.utils import timezone
from django_otp import DEVICE_ID_SESSION_KEY
from django_otp.plugins.otp_totp.models import TOTPDevice

import catalog.models
from nodes.models import Node, Replica, ReplicaLoad, Shard
from tenants.models import Key, Membership, Role, Team, Usage, User
from tests import factories


def make_usage(count: int = 1, *, key: Key | None = None, ended: datetime | None = None, **fields: Any) -> list[Usage]:
    """`count` requests that ended a second apart, the newest at `ended`, and their sums."""
    ended = ended or timezone.now()
    start = Usage.objects.count()
    made = Usage.objects.bulk_create(
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
    factories.add_up(made)
    return made


def make_operator(name: str = "root") -> User:
    return factories.make_user(name, is_superuser=True, is_staff=True)


def sign_in_verified(client: Client, user: User) -> None:
    """As somebody who came with a second factor, which the admin asks for."""
    device = TOTPDevice.objects.create(user=user, confirmed=True)
    client.force_login(user)
    session = client.session
    session[DEVICE_ID_SESSION_KEY] = device.persistent_id
    session.save()


def make_member(team: Team, role: Role, name: str) -> User:
    user = factories.make_user(name)
    Membership.objects.create(user=user, team=team, role=role)
    return user


def make_large_cluster(count: int) -> None:
    """As make_cluster, written in bulk."""
    now = timezone.now()
    names = [f"{number:04}" for number in range(count)]
    catalog.models.Model.objects.bulk_create(
        catalog.models.Model(name=f"model-{n}", position=int(n), source="/x.gguf", scaling_min=1, scaling_max=1)
        for n in names
    )
    catalog.models.Profile.objects.bulk_create(
        catalog.models.Profile(model=row, name="cpu", engine="llamacpp", weight=2, position=0)
        for row in catalog.models.Model.objects.all()
    )
    pattern = factories.make_node("pattern")
    Node.objects.bulk_create(
        Node(
            name=f"node-{n}",
            token_digest=n.zfill(64),
            state="ready" if int(n) % 50 else "lost",
            address="10.0.0.1",
            inventory=pattern.inventory,
            load=pattern.load,
            last_seen_at=now,
        )
        for n in names
    )
    pattern.delete()
    states = {n: {3: "loading", 4: "failed"}.get(int(n) % 5, "ready") for n in names}
    Replica.objects.bulk_create(
        Replica(
            name=f"model-{n}-1",
            model=f"model-{n}",
            profile="cpu",
            profile_digest="d" * 64,
            engine="llamacpp",
            weight=2,
            state=states[n],
            ready_at=now if states[n] == "ready" else None,
            reason="the engine ended with code 1: could not load the model" if states[n] == "failed" else "",
        )
        for n in names
    )
    Shard.objects.bulk_create(
        Shard(replica_id=f"model-{n}-1", node_id=f"node-{n}", state=states[n], port=9000, cores=4) for n in names
    )


def make_cluster(count: int, first: int = 0) -> None:
    """Nodes and models up to `count` with a replica each; of every five one is loading and one has failed."""
    for number in range(first, count):
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


def make_idle(name: str, *, node: Node | None = None) -> None:
    """A model whose replica has been ready for two hours and is known to serve nobody."""
    now = timezone.now()
    factories.make_model(name)
    replica = factories.make_replica(f"{name}-1", model=name, node=node, ready_at=now - timedelta(hours=2))
    ReplicaLoad.objects.create(gateway="g", replica=replica.name, in_flight=0, running=0, waiting=0, at=now)
