"""What a pass looks at: the cluster in an order of its own, and what is looked up in it again and again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from catalog import spec
from nodes.expiry import Expired
from nodes.plans import BackOff, Drain, Stop
from nodes.state import Backoff, Cluster, Node, Replica, profile_digest


@dataclass(frozen=True, slots=True)
class View:
    """The cluster with the states that its nodes have from now on."""

    cluster: Cluster
    now: datetime
    nodes: Mapping[str, Node]
    models: Mapping[str, spec.Model]
    digests: Mapping[tuple[str, str], str]
    """By model and profile."""
    asked: Mapping[str, datetime]
    """When each on-demand model was last asked for."""
    settled: bool
    """Whether what runs is known (ND-45)."""


def look(cluster: Cluster, expired: Iterable[Expired], now: datetime) -> View:
    states = {change.node: change.state for change in expired}
    nodes = (replace(node, state=states[node.name]) if node.name in states else node for node in cluster.nodes)
    cluster = replace(
        cluster,
        nodes=tuple(sorted(nodes, key=lambda node: node.name)),
        models=tuple(sorted(cluster.models, key=lambda model: model.name)),
        replicas=tuple(sorted(cluster.replicas, key=lambda replica: (replica.made_at, replica.name))),
        backoffs=tuple(sorted(cluster.backoffs, key=lambda held: (held.model, held.profile, held.node))),
    )
    return View(
        cluster,
        now,
        nodes={node.name: node for node in cluster.nodes},
        models={model.name: model for model in cluster.models},
        digests={(m.name, p.name): profile_digest(m, p) for m in cluster.models for p in m.profiles},
        asked={status.model: status.demand_at for status in cluster.statuses if status.demand_at},
        settled=_settled(cluster, now),
    )


def _settled(cluster: Cluster, now: datetime) -> bool:
    """Every node has told what it runs lately, or has had the time to since we lead."""
    since, settle = cluster.since, cluster.rules.settle
    if since is None or now - since >= settle:
        return True
    return all(_told(node, since, settle) for node in cluster.nodes)


def _told(node: Node, since: datetime, settle: timedelta) -> bool:
    """A register, which rebuilds the rows, counts from shortly before too; a heartbeat comes only after a register."""
    if node.registered_at is None or node.last_seen_at is None:
        return False
    return node.registered_at >= since - settle or node.last_seen_at > since


def profile_of(replica: Replica, view: View) -> spec.Profile | None:
    """The profile that the replica was started under, if the catalog still has one of its name."""
    model = view.models.get(replica.model)
    return next((p for p in model.profiles if p.name == replica.profile), None) if model else None


def rank_of(capacity_class: str) -> int:
    """The place of a capacity class, higher for what may preempt others (ND-33)."""
    return -spec.CAPACITY_CLASSES.index(capacity_class)


def rank_in(replica: Replica, view: View) -> int:
    """That of the profile that it was started under; the lowest where the catalog has that no more."""
    profile = profile_of(replica, view)
    return rank_of(profile.capacity_class if profile else spec.CAPACITY_CLASSES[-1])


def retire(replica: Replica, because: str) -> Drain | Stop:
    """Take it down gently; one that serves nobody yet just stops."""
    if replica.state == "ready":
        return Drain(replica.name, replica.model, f"replica {replica.name} is drained: {because}")
    return Stop(replica.name, replica.model, f"replica {replica.name} is stopped: {because}")


def least_missed(replica: Replica) -> tuple[bool, float, float, str]:
    """Those that do not serve yet first, then the least loaded, then the newest; unknown load counts as busy."""
    in_flight = replica.load.in_flight if replica.load else None
    busy = float("inf") if in_flight is None else in_flight
    return replica.state == "ready", busy, -replica.made_at.timestamp(), replica.name


def is_idle(replica: Replica) -> bool:
    """It serves, and is known to serve nobody: unknown use is not idle."""
    return replica.state == "ready" and replica.load is not None and replica.load.in_flight == 0


Holds = Mapping[tuple[str, str], Mapping[str, str]]
"""By model and profile: why it is not tried on a node now, under its name, or nowhere, under an empty one."""


def holds(view: View, failed: Iterable[BackOff], *, wary: bool = False) -> Holds:
    """Which profiles wait after failures; one that changed meanwhile does not. `wary`: and those whose wait is over, on
    the node that they failed on last."""
    latest = {(held.model, held.profile, held.node): held for held in view.cluster.backoffs}
    latest |= {(each.backoff.model, each.backoff.profile, each.backoff.node): each.backoff for each in failed}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for (model, profile, node), held in latest.items():
        if view.digests.get((model, profile)) != held.profile_digest:
            continue
        if held.next_try_at > view.now:
            found.setdefault((model, profile), {})[node] = _waits(held)
        elif wary and node:
            why = f"is tried last, after {_times(held.failures)} here: {held.reason}"
            found.setdefault((model, profile), {})[node] = why
    return found


def _waits(held: Backoff) -> str:
    here = " here" if held.node else ""
    return f"waits until {held.next_try_at:%H:%M:%S} UTC after {_times(held.failures)}{here}: {held.reason}"


def _times(failures: int) -> str:
    return "1 failure" if failures == 1 else f"{failures} failures in a row"
