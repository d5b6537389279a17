"""What needs a person, told from nodes, certificates and teams; of models `nodes.summary` tells it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nodes.fitting import LEAST_DISK_BYTES
from nodes.intake import is_loopback
from nodes.state import Cluster, Node
from tenants.figures import span

WARN_BEFORE = timedelta(days=30)
"""How long before a certificate ends it is spoken of."""
LONG_STOP = timedelta(minutes=2)
NAMED = 4
"""How many nodes a line names."""


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


def of_listener(until: datetime, now: datetime) -> Iterator[Alert]:
    """Of the certificate that agents are shown: one that has ended keeps all of them out."""
    left = until - now
    if left > WARN_BEFORE:
        return
    renew = "Make another where the authority's ca.key is: llmgw server ca"
    if left > timedelta(0):
        text = f"The certificate that agents are shown ends in {_days(left)}; then none of them connects. {renew}"
        yield Alert("warn", "agents", text, until)
    else:
        yield Alert(
            "failed", "agents", f"The certificate that agents are shown has ended; none connects. {renew}", until
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """Where a node says that it is reached, and by which machine; `contested`: who else came as it lately."""

    node: str
    address: str
    machine_id: str
    contested: str = ""
    contested_at: datetime | None = None


def of_claims(claims: Sequence[Claim]) -> Iterator[Alert]:
    """Copies of a machine, and machines that say they are at one address."""
    for each in claims:
        if each.contested:
            text = f"Two agents take turns to speak for {each.node}: {each.contested}. Give a copy a node of its own."
            yield Alert("failed", each.node, text, each.contested_at)
    by_address: dict[str, list[Claim]] = {}
    for each in claims:
        by_address.setdefault(each.address, []).append(each)
    for address, found in sorted(by_address.items()):
        if len({each.machine_id for each in found}) > 1 and not is_loopback(address):
            names = " and ".join(each.node for each in found[:NAMED])
            text = (
                f"Different machines say that they are reached at {address}: {names}; requests for one reach another. "
                "Correct address in agent.yaml, or pin what is right: llmgw ctl address NODE ADDRESS"
            )
            yield Alert("warn", found[0].node, text, None)


def of_stops(cluster: Cluster, now: datetime) -> Iterator[Alert]:
    """Replicas that a node goes on running though it was told long ago to stop them; their cards stay theirs."""
    heard = {node.name for node in cluster.nodes if node.state == "ready"}
    for replica in sorted(cluster.replicas, key=lambda replica: replica.name):
        asked_at = replica.wanted_at or replica.made_at
        if replica.wanted != "stop" or now - asked_at < LONG_STOP:
            continue
        where = [shard.node for shard in replica.shards if shard.node in heard and not shard.ended]
        if where:
            text = (
                f"Replica {replica.name} of {replica.model} was told to stop {span(now - asked_at)} ago, and still "
                f"runs on {', '.join(where)}: what it holds there is not free. See the agent's log on that machine."
            )
            yield Alert("warn", where[0], text, asked_at)


def of_teams(cluster: Cluster) -> Iterator[Alert]:
    """A quota binds by the team's short name: a model that names none that there is would hold what it likes."""
    for model in sorted(cluster.models, key=lambda model: model.name):
        if model.team and model.team not in cluster.quotas:
            text = f"{model.name} names the team {model.team}, which there is not: no quota binds it. Correct its team."
            yield Alert("warn", model.name, text, None)
