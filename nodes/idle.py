"""Replicas that hold hardware which nobody asks for (WEB-2). Pure.

A model is asked for by its name, and by every model that falls back on it. Unknown use is not idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from catalog import names, spec
from catalog.validate import targets_of
from nodes.outlook import is_idle
from nodes.state import Cluster, Replica
from tenants.figures import milliseconds

IDLE_AFTER = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class IdleLine:
    replica: str
    model: str
    node: str
    cards: int
    cores: float
    idle_since: datetime
    """When the model was last asked for, or the replica became ready, whichever came later."""
    note: str
    """Why it stays, and what changes that."""


def askers(cluster: Cluster) -> Mapping[str, tuple[str, ...]]:
    """By model with a ready replica, all of them at rest: the names whose requests would come to it."""
    resting: dict[str, bool] = {}
    for replica in cluster.replicas:
        if replica.state == "ready":
            resting[replica.model] = resting.get(replica.model, True) and is_idle(replica)
    if not any(resting.values()):
        return {}
    targets = targets_of(cluster.models)
    from_others: dict[str, list[str]] = defaultdict(list)
    for model in cluster.models:
        for fallback in model.fallbacks:
            from_others[targets.get(names.fold(fallback), fallback)].append(model.name)
    return {model: (model, *from_others[model]) for model, at_rest in resting.items() if at_rest}


def idle(cluster: Cluster, used: Mapping[str, datetime], now: datetime) -> tuple[IdleLine, ...]:
    """Those that hold most cards first, then the longest idle. `used`: when requests by a name had last ended."""
    models = {model.name: model for model in cluster.models}
    asked = {status.model: status.demand_at for status in cluster.statuses if status.demand_at}
    resting = askers(cluster)
    found = []
    for replica in cluster.replicas:
        if replica.model not in resting or replica.state != "ready" or replica.wanted != "run":
            continue
        times = [replica.ready_at or replica.made_at, asked.get(replica.model)]
        times += [used.get(name) for name in resting[replica.model]]
        since = max(at for at in times if at is not None)
        if now - since >= IDLE_AFTER:
            found.append(_line(replica, models.get(replica.model), since))
    return tuple(sorted(found, key=lambda line: (-line.cards, line.idle_since, line.replica)))


def _line(replica: Replica, model: spec.Model | None, since: datetime) -> IdleLine:
    held = [shard for shard in replica.shards if not shard.ended]
    return IdleLine(
        replica=replica.name,
        model=replica.model,
        node=", ".join(shard.node for shard in held),
        cards=sum(len(shard.gpus) for shard in held),
        cores=sum(shard.cores for shard in held),
        idle_since=since,
        note=_note(model),
    )


def _note(model: spec.Model | None) -> str:
    if model is None or not model.scaling.max:
        return "its model is off; it is about to be stopped"
    if model.scaling.min:
        return f"kept up: scaling.min is {model.scaling.min}; with 0 it starts on demand"
    return f"on demand; stops after {milliseconds(model.scaling.idle_timeout_s * 1000)} of rest"


def names_to_look_up(cluster: Cluster) -> frozenset[str]:
    """The names whose last use decides whether a replica is idle."""
    return frozenset(name for group in askers(cluster).values() for name in group)
