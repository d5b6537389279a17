"""The cluster in one value: what dashboard, API and `llmgw ctl status` all print. Pure.

`None` is unknown (shown as "-"), never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class NodeLine:
    name: str
    state: str
    cordoned: bool
    draining: bool
    address: str
    cores: int | None
    cores_used: float
    memory_bytes: int | None
    memory_used_bytes: int | None
    cpu_percent: float | None
    load_1m: float | None
    disk_free_bytes: int | None
    gpus: int
    gpus_faulty: int
    replicas: int
    files: int
    engines: tuple[str, ...]
    agent_version: str
    last_seen_at: datetime | None


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    name: str
    model: str
    profile: str
    engine: str
    node: str
    state: str
    note: str
    """Why it is not ready, or how far its start has come."""
    slots: int
    in_flight: int | None
    running: int | None
    waiting: int | None
    kv_used: float | None
    made_at: datetime
    ready_at: datetime | None
    tail: str


@dataclass(frozen=True, slots=True)
class ModelLine:
    name: str
    aliases: tuple[str, ...]
    state: str
    """ready, loading, failed, cannot run, on demand, off or external."""
    wanted: int
    ready: int
    replicas: int
    slots: int
    in_flight: int | None
    waiting: int | None
    note: str
    """What a person needs to know beside the state; empty when all is well."""
    why_not: tuple[str, ...]
    """One line a node that was turned down."""
    next_try_at: datetime | None


@dataclass(frozen=True, slots=True)
class CapacityLine:
    """Of one GPU class in cards, or of "cpu" in cores."""

    gpu_class: str
    unit: str
    total: float
    used: float
    starting: float
    free: float
    faulty: float
    reserved: float
    nodes: int


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that needs a person. `state`: failed, warn."""

    state: str
    subject: str
    text: str
    at: datetime | None


@dataclass(frozen=True, slots=True)
class UsageLine:
    """Finished requests since midnight UTC."""

    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    at: datetime
    alerts: tuple[Alert, ...]
    capacity: tuple[CapacityLine, ...]
    nodes: tuple[NodeLine, ...]
    models: tuple[ModelLine, ...]
    replicas: tuple[ReplicaLine, ...]
    usage_today: UsageLine
