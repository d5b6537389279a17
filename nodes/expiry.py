"""Which nodes have been silent for too long, by the control plane's clock (ND-10). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from nodes.state import Cluster, Life, Node

SET_BACK = timedelta(minutes=20)
"""What was said so much later than now was said before the database's clock was set back, which ends the lease too
(`llmgw.core.lease.FAR`): the lead has been taken since."""


@dataclass(frozen=True, slots=True)
class Expired:
    """A node that goes from `was` to `state` unless it has spoken since `last_seen_at`."""

    node: str
    was: Life
    state: Life
    last_seen_at: datetime | None
    why: str


def expire(cluster: Cluster, now: datetime) -> tuple[Expired, ...]:
    """The nodes whose state their silence changes. Silence from before we listened (`since`) does not count."""
    found = (_judge(node, cluster, now) for node in sorted(cluster.nodes, key=lambda node: node.name))
    return tuple(expired for expired in found if expired)


def _judge(node: Node, cluster: Cluster, now: datetime) -> Expired | None:
    if node.state not in ("ready", "unreachable") or node.last_seen_at is None:
        return None
    silence = now - _heard_at(node.last_seen_at, cluster.since, now)
    if silence > cluster.rules.lost_after:
        why = f"node {node.name} is lost: nothing heard for {int(silence.total_seconds())} s; its replicas move"
        return Expired(node.name, node.state, "lost", node.last_seen_at, why)
    if silence > cluster.rules.unreachable_after and node.state == "ready":
        why = f"node {node.name} is unreachable: nothing heard for {int(silence.total_seconds())} s"
        return Expired(node.name, node.state, "unreachable", node.last_seen_at, why)
    return None


def _heard_at(last_seen_at: datetime, since: datetime | None, now: datetime) -> datetime:
    """When it spoke last, as far as that is known: silence from before we listened does not count."""
    if since is None:
        return last_seen_at
    return since if last_seen_at - now > SET_BACK else max(last_seen_at, since)
