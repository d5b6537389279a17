"""The frozen values that nodes, the gateway and the pages speak in, and what follows from them alone. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from agent.protocol import ENDED, Build, Fabric, Gpu, Progress, State
from catalog import spec

Life = Literal["joining", "ready", "unreachable", "lost"]
Want = Literal["run", "drain", "stop"]
At = State | Literal["waiting"]
"""Where a shard is; waiting: its agent has not been told yet, as its leader does not listen yet (ND-43)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica's leader as something a gateway can send to. `slots`: requests it serves at once."""

    replica: str
    node: str
    model: str
    profile: str
    engine: str
    host: str
    port: int | None
    slots: int
    state: str
    draining: bool
    lost: bool
    adapters: tuple[str, ...] = ()
    """Names of the adapters that it was started with, in the order of llama.cpp's numbers."""
    adapter_sources: tuple[str, ...] = ()
    """Where each of them came from."""
    max_loaded_adapters: int | None = None
    """How many it holds at most, loaded while it runs; None: those that it was started with."""

    @property
    def usable(self) -> bool:
        return self.state == "ready" and not self.draining and not self.lost and self.port is not None


@dataclass(frozen=True, slots=True)
class Rules:
    """How patient the control plane is."""

    unreachable_after: timedelta = timedelta(seconds=15)
    lost_after: timedelta = timedelta(minutes=5)
    settle: timedelta = timedelta(seconds=5)
    drain: timedelta = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine as its agent reported it; `state` and times by the control plane's clock alone (ND-10)."""

    name: str
    state: Life = "ready"
    cordoned: bool = False
    draining: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    address: str = ""
    disabled_engines: frozenset[str] = frozenset()
    reserved_cores: float = 0
    cores: int | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    disk_bytes: int | None = None
    """The whole disk of its work directory, as it is free or not."""
    disk_free_bytes: int | None = None
    cpu_percent: float | None = None
    load_1m: float | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_fault: str = ""
    """Why its cards could not be read lately."""
    fabrics: tuple[Fabric, ...] = ()
    builds: tuple[Build, ...] = ()
    files: int = 0
    agent_version: str = ""
    registered_at: datetime | None = None
    last_seen_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    node: str
    rank: int = 0
    state: At = "starting"
    cores: float = 0
    gpus: tuple[str, ...] = ()
    note: str = ""
    """How far its start has come, in words."""
    rendezvous: int | None = None
    """The port on which a leader awaits the other ranks, once it listens."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class Load:
    """What the gateways together see of a replica; `None` is unknown, never idle. `at`: the oldest of their reports."""

    at: datetime
    in_flight: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    model: str
    profile: str
    profile_digest: str
    made_at: datetime
    engine: str = "llamacpp"
    weight: int = 1
    wanted: Want = "run"
    wanted_at: datetime | None = None
    state: State = "starting"
    state_at: datetime | None = None
    ready_at: datetime | None = None
    reason: str = ""
    tail: str = ""
    shards: tuple[Shard, ...] = ()
    load: Load | None = None


@dataclass(frozen=True, slots=True)
class Backoff:
    """A profile that failed `failures` times in a row and is left alone until `next_try_at`; on one `node` where only
    its starts there failed, everywhere otherwise."""

    model: str
    profile: str
    profile_digest: str
    failures: int
    next_try_at: datetime
    reason: str = ""
    tail: str = ""
    node: str = ""


class TurnedDown(msgspec.Struct, frozen=True, gc=False):
    """Why a node did not get a replica under a profile. `node` is empty when there is no node at all.

    There may be a million of them, which the garbage collector is not to walk through: hence a struct.
    """

    node: str
    profile: str
    reason: str
    anywhere: bool = False
    """Whether the reason is the profile's own, and so the same on every node."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is remembered about a model: why its last placement failed, in lines, and when it was last asked for."""

    model: str
    reasons: tuple[str, ...] = ()
    demand_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """All that a pass decides on. `since`: when this control plane took the lead; nothing was heard before."""

    nodes: tuple[Node, ...] = ()
    models: tuple[spec.Model, ...] = ()
    replicas: tuple[Replica, ...] = ()
    backoffs: tuple[Backoff, ...] = ()
    statuses: tuple[Status, ...] = ()
    quotas: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By team (its slug; every team is in it) and GPU class, how many cards the team's models may hold (TN-6)."""
    rules: Rules = Rules()
    since: datetime | None = None


_UNCHANGING = frozenset(
    (
        "name",
        "priority",
        "startup_timeout_s",
        "reserved_cores",
        "required_memory_gb",
        "capacity_class",
        "min_disk_gb",
        "metrics",
        "labels",
        "only_nodes",
    )
)
"""Fields of a profile that do not change what runs: changing them replaces nothing."""


def profile_digest(model: spec.Model, profile: spec.Profile) -> str:
    """SHA-256 over the model's source, what the profile says about running it, and adapters fixed at the start."""
    named = {each.name: getattr(profile, each.name) for each in fields(profile) if each.name not in _UNCHANGING}
    if profile.max_loaded_adapters is None:
        del named["max_loaded_adapters"]
        if model.adapters:
            named["adapters"] = [[adapter.name, adapter.source] for adapter in model.adapters]
    text = json.dumps({"source": model.source, **named}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def replica_state(shards: Iterable[tuple[int, str]]) -> str:
    """The state of a replica from its shards' ranks and states: any that failed or ends takes the others with it, else
    the leader speaks for it."""
    by_rank = dict(shards)
    states = set(by_rank.values())
    if "failed" in states:
        return "failed"
    if states == {"stopped"}:
        return "stopped"
    return "stopping" if "stopped" in states else by_rank.get(0, "starting")


def required_memory_bytes(model: spec.Model, profile: spec.Profile) -> int | None:
    """What the catalog says one replica needs, in its cards' memory or, on CPUs, the node's; `None`: not said."""
    wanted_gb = profile.required_memory_gb if profile.required_memory_gb is not None else model.required_memory_gb
    return None if wanted_gb is None else int(wanted_gb * 10**9)


def in_words(progress: Progress) -> str:
    """How far a start has come: "40 % of 105.6 MB", or what is known of it."""
    done, total = progress.done_bytes, progress.total_bytes
    if done is not None and total:
        share = f"{100 * done // total} % of {_size(total)}"
        return f"{progress.note}: {share}" if progress.note else share
    if done is not None:
        return f"{progress.note or 'fetched'}: {_size(done)}"
    return progress.note


def _size(count: int) -> str:
    """In MB, from a thousand of them in GB."""
    return f"{count / 10**6:.1f} MB" if count < 10**9 else f"{count / 10**9:.1f} GB"
