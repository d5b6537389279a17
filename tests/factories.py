"""Rows for tests, each with everything it needs and nothing more. Hand in what the test is about."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from django.utils import timezone

import catalog.models
from agent import protocol
from llmgw.core.models import Secret
from nodes.engine_keys import SECRET_NAME, seal
from nodes.models import Node, Replica, Shard
from tenants import rollup
from tenants.keys import new_secret
from tenants.models import Key, Membership, Organisation, Project, Role, Team, Usage, User

_numbers = count(1)
GIB = 1024**3


def make_user(name: str = "", **fields: Any) -> User:
    return User.objects.create_user(username=name or f"user{next(_numbers)}", password="correct horse", **fields)


def make_team(name: str = "", *, owner: User | None = None) -> Team:
    name = name or f"team{next(_numbers)}"
    organisation, _ = Organisation.objects.get_or_create(slug="default", defaults={"name": "Default"})
    team = Team.objects.create(organisation=organisation, name=name, slug=name.lower())
    if owner:
        Membership.objects.create(user=owner, team=team, role=Role.OWNER)
    return team


def make_project(name: str = "", *, team: Team | None = None, **fields: Any) -> Project:
    name = name or f"project{next(_numbers)}"
    return Project.objects.create(team=team or make_team(), name=name, slug=name.lower(), **fields)


def make_key(*, project: Project | None = None, **fields: Any) -> tuple[Key, str]:
    """A key row and its secret."""
    secret = new_secret("sk")
    fields = {"name": f"key{next(_numbers)}", "prefix": secret.prefix, "digest": secret.digest, **fields}
    return Key.objects.create(project=project or make_project(), **fields), secret.text


def make_model(
    name: str = "smollm2",
    *,
    min: int = 1,
    max: int = 1,
    profiles: tuple[dict[str, Any], ...] = ({},),
    **fields: Any,
) -> catalog.models.Model:
    """A catalog model with one llama.cpp profile on CPUs, unless `profiles` says otherwise."""
    row = catalog.models.Model.objects.create(
        name=name, scaling_min=min, scaling_max=max, **{"source": "/models/tiny.gguf", **fields}
    )
    for position, profile in enumerate(profiles):
        catalog.models.Profile.objects.create(
            model=row, position=position, **{"name": "cpu", "engine": "llamacpp", "weight": 2, **profile}
        )
    return row


def inventory(**fields: Any) -> protocol.Inventory:
    """What an eight-core machine without cards that can run llama.cpp reports."""
    return protocol.Inventory(
        **{
            "hostname": "somewhere",
            "os": "Debian 13",
            "kernel": "6.12",
            "cpu": protocol.Cpu(model="a CPU", cores=8, numa_nodes=1),
            "memory_bytes": 16 * GIB,
            "disks": (protocol.Disk(path="/", total_bytes=100 * GIB, free_bytes=50 * GIB),),
            "builds": (protocol.Build(engine="llamacpp", name="xllamacpp", version="0.2"),),
            **fields,
        }
    )


def make_node(name: str = "", *, seen_at: datetime | None = None, **fields: Any) -> Node:
    """A ready node that has just reported."""
    number = next(_numbers)
    seen_at = seen_at or timezone.now()
    return Node.objects.create(
        **{
            "name": name or f"node{number}",
            "token_digest": new_secret("nt").digest,
            "machine_id": f"machine{number}",
            "state": "ready",
            "address": "127.0.0.1",
            "inventory": msgspec.to_builtins(inventory()),
            "load": msgspec.to_builtins(protocol.NodeLoad(load_1m=0.5, cpu_percent=5.0, disk_free_bytes=50 * GIB)),
            "registered_at": seen_at,
            "last_seen_at": seen_at,
            **fields,
        }
    )


def make_replica(
    name: str = "", *, node: Node | None = None, port: int | None = 9000, state: str = "ready", **fields: Any
) -> Replica:
    """A replica of one shard, ready a minute ago unless `state` says otherwise."""
    now = timezone.now()
    row = Replica.objects.create(
        **{
            "name": name or f"replica{next(_numbers)}",
            "model": "smollm2",
            "profile": "cpu",
            "profile_digest": "d" * 64,
            "engine": "llamacpp",
            "weight": 2,
            "state": state,
            "made_at": now - timedelta(minutes=2),
            "ready_at": now - timedelta(minutes=1) if state == "ready" else None,
            **fields,
        }
    )
    Shard.objects.create(replica=row, node=node or make_node(), state=state, port=port, pid=4242, cores=4)
    return row


def add_up(rows: Iterable[Usage]) -> None:
    """The sums of these requests, which gateways write with them."""
    names = ("model", "adapter", "status", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
    rollup.add(
        cast(
            rollup.Counted,
            SimpleNamespace(
                at=row.at.timestamp(),
                project=row.project_id,
                key=row.key_id,
                user=row.user_id,
                **{name: getattr(row, name) for name in names},
            ),
        )
        for row in rows
    )


def sealed(node: str, spec: protocol.ShardSpec) -> protocol.ShardSpec:
    """As the node was told it."""
    return msgspec.structs.replace(spec, seal=seal(Secret.named(SECRET_NAME), node, spec))
