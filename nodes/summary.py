"""The cluster in one value: what dashboard, API and `llmgw ctl status` all print. Pure.

`None` is unknown (shown as "-"), never zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from types import MappingProxyType

from nodes import alerts, totals
from nodes.alerts import Alert
from nodes.holdings import in_use
from nodes.idle import IdleLine, idle
from nodes.lines import ModelLine, NodeLine, ReplicaLine, model_lines, node_lines, replica_lines
from nodes.state import Backoff, Cluster, Replica
from nodes.totals import CapacityLine, QuotaLine
from nodes.wholes import WholeLine, wholes


@dataclass(frozen=True, slots=True)
class UsageLine:
    """Finished requests since midnight UTC."""

    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    spend: Decimal | None = None
    """What they cost, in the currency; unknown where none of them had a price."""
    unpriced: int = 0
    """How many of them had none, and are not in it."""


@dataclass(frozen=True, slots=True)
class ProjectLine:
    """A project that used the cluster since midnight UTC."""

    project_id: int
    project: str
    team: str
    usage: UsageLine


@dataclass(frozen=True, slots=True)
class FlightLine:
    """Requests on their way through the replicas now."""

    requests: int | None
    """As far as it is known; None: of no replica."""
    silent: int
    """Ready replicas of which no gateway tells."""


@dataclass(frozen=True, slots=True)
class UserLine:
    """What a project asked of one model in the last minutes. Requests that have not ended are not in it."""

    project_id: int
    project: str
    team: str
    model: str
    requests: int
    tokens_per_minute: float
    """Read and written; of requests that did not tell, none."""


@dataclass(frozen=True, slots=True)
class Summary:
    at: datetime
    alerts: tuple[Alert, ...]
    capacity: tuple[CapacityLine, ...]
    fabrics: tuple[WholeLine, ...]
    """Whole nodes that are free, for replicas that span nodes."""
    quotas: tuple[QuotaLine, ...]
    users: tuple[UserLine, ...]
    """Who has used the cluster in the last five minutes, and what they run."""
    in_flight: FlightLine
    idle: tuple[IdleLine, ...]
    """Replicas holding hardware that nobody asks for."""
    nodes: tuple[NodeLine, ...]
    models: tuple[ModelLine, ...]
    replicas: tuple[ReplicaLine, ...]
    usage_today: UsageLine
    projects_today: tuple[ProjectLine, ...]
    """Who used the cluster today, the busiest first."""
    currency: str


def summarise(
    cluster: Cluster,
    usage_today: UsageLine,
    now: datetime,
    *,
    users: tuple[UserLine, ...] = (),
    projects_today: tuple[ProjectLine, ...] = (),
    currency: str = "",
    used: Mapping[str, datetime] = MappingProxyType({}),
    certified: Sequence[alerts.Certified] = (),
) -> Summary:
    """The lines that a person reads, in a settled order: nodes and models by name, replicas by model and age. `used`:
    when requests for models last ended."""
    nodes = sorted(cluster.nodes, key=lambda node: node.name)
    held: dict[str, list[Backoff]] = defaultdict(list)
    for backoff in cluster.backoffs:
        held[backoff.model].append(backoff)
    models = model_lines(cluster, now)
    taken = in_use(cluster)
    return Summary(
        at=now,
        alerts=(
            *alerts.of_nodes(nodes),
            *_model_alerts(models, held),
            *alerts.of_teams(cluster),
            *alerts.of_certificates(certified, now),
        ),
        capacity=totals.capacity(nodes, cluster.replicas, taken),
        fabrics=wholes(nodes, {node: used.cards for node, used in taken.items()}),
        quotas=totals.quotas(cluster),
        users=users,
        in_flight=_flight(cluster.replicas),
        idle=idle(cluster, used, now),
        nodes=node_lines(cluster, taken),
        models=models,
        replicas=replica_lines(cluster),
        usage_today=usage_today,
        projects_today=projects_today,
        currency=currency,
    )


def _flight(replicas: Iterable[Replica]) -> FlightLine:
    """Over all replicas that a gateway tells of, on their way out or not."""
    known, silent = [], 0
    for replica in replicas:
        if replica.load is not None and replica.load.in_flight is not None:
            known.append(replica.load.in_flight)
        elif replica.state == "ready":
            silent += 1
    return FlightLine(sum(known) if known else None, silent)


def _model_alerts(models: Iterable[ModelLine], held: Mapping[str, list[Backoff]]) -> tuple[Alert, ...]:
    found = []
    for line in models:
        if line.state == "failed":
            failures = max((backoff.failures for backoff in held.get(line.name, ())), default=1)
            text = f"{line.name} does not start ({failures} in a row): {line.note}"
            found.append(Alert("failed", line.name, text, line.next_try_at))
        elif line.state == "cannot run":
            found.append(Alert("failed", line.name, f"{line.name} finds no place: {line.why_not[0]}", None))
        elif line.note and line.state == "ready":
            found.append(Alert("warn", line.name, f"{line.name}: {line.note}", None))
    return tuple(found)
