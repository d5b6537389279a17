"""What needs a person, told from nodes, certificates and teams; of models `nodes.summary` tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nodes.fitting import LEAST_DISK_BYTES
from nodes.state import Cluster, Node
from tenants.figures import span

WARN_BEFORE = timedelta(days=30)
"""How long before a certificate ends it is spoken of."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that needs a person. `state`: failed, warn."""

    state: str
    subject: str
    text: str
    at: datetime | None


@dataclass(frozen=True, slots=True)
class Certified:
    """Until when a node is proven by the last of its certificates."""

    node: str
    until: datetime


def of_nodes(nodes: Iterable[Node]) -> tuple[Alert, ...]:
    found = []
    for node in nodes:
        if node.state in ("unreachable", "lost"):
            grade = "failed" if node.state == "lost" else "warn"
            text = f"Node {node.name} is {node.state}; see whether the machine and its agent run."
            found.append(Alert(grade, node.name, text, node.last_seen_at))
        free = node.disk_free_bytes
        if node.state == "ready" and free is not None and free < LEAST_DISK_BYTES:
            text = f"The disk of node {node.name} has {free // 10**6} MB free; free some, or nothing new can be stored."
            found.append(Alert("warn", node.name, text, None))
        if node.state == "ready" and node.gpus_fault:
            text = f"The cards of {node.name} cannot be read: {node.gpus_fault}. Nothing new is placed on them."
            found.append(Alert("warn", node.name, text, None))
        found += [
            Alert("warn", node.name, f"Card {gpu.index} ({gpu.name}) of {node.name} is faulty: {gpu.fault}", None)
            for gpu in node.gpus
            if not gpu.healthy
        ]
    return tuple(found)


def of_certificates(certified: Sequence[Certified], now: datetime) -> Iterator[Alert]:
    """The first to end comes first. One that has ended lets its agent's stream be, and no new one begin."""
    for each in sorted(certified, key=lambda each: (each.until, each.node)):
        left = each.until - now
        if left > WARN_BEFORE:
            continue
        renew = f"Make another: llmgw node add {each.node} --renew"
        if left > timedelta(0):
            text = f"The certificate of {each.node} ends in {_days(left)}; then its agent is refused. {renew}"
            yield Alert("warn", each.node, text, each.until)
        else:
            text = f"The certificate of {each.node} has ended; its agent is refused when it comes again. {renew}"
            yield Alert("failed", each.node, text, each.until)


def _days(left: timedelta) -> str:
    """Whole days where there are some, so that nodes made together are told together."""
    return f"{left.days} d" if left.days else span(left)


def of_teams(cluster: Cluster) -> Iterator[Alert]:
    """A quota binds by the team's short name: a model that names none that there is would hold what it likes."""
    for model in sorted(cluster.models, key=lambda model: model.name):
        if model.team and model.team not in cluster.quotas:
            text = f"{model.name} names the team {model.team}, which there is not: no quota binds it. Correct its team."
            yield Alert("warn", model.name, text, None)
