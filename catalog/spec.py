"""What a model and a profile are, as frozen values, and what is filled in where nothing was written. Pure.

catalog.validate says whether a whole catalog of them holds together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

LEAST_LOAD = "least_load"
PREFIX_AFFINITY = "prefix_affinity"
ROUTING_PROFILES = (LEAST_LOAD, PREFIX_AFFINITY, "round_robin", "weighted")
ENGINES = ("vllm", "sglang", "llamacpp")
CPU_ENGINES = ("llamacpp",)
CAPACITY_CLASSES = ("guaranteed", "standard", "spot")
LAUNCH_MODES = ("mp", "ray")
IDLE_TIMEOUT_S = 900
STARTUP_TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class Scaling:
    """min 0 max 0: off. min 0 max > 0: on demand. min > 0: kept up."""

    min: int = 0
    max: int = 0
    """As a value it is always written; `scaling()` fills it in where nobody wrote one."""
    idle_timeout_s: int = IDLE_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_p99_ms: int | None = None
    tpot_p99_ms: int | None = None


@dataclass(frozen=True, slots=True)
class External:
    """A provider's model. `url`: what stands before `/chat/completions` there. `model`: its name there.

    `api_key_file`: read by each gateway for each request, so that a changed key needs no restart; None: no key.
    """

    url: str
    model: str
    api_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """Names of an engine's metrics, newest first, in the place of those that are known for the engine (GW-41).

    Complete as it stands once it names `running`: what it leaves empty stays unknown.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    kv_used: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to run a model. `gpu_class` None: on CPUs. `weight`: requests that one replica serves at once."""

    name: str
    engine: str = "vllm"
    gpu_class: str | None = None
    tp: int = 1
    pp: int = 1
    nodes: int = 1
    gpus_per_node: int = 0
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    weight: int = 1
    priority: int = 0
    startup_timeout_s: int = STARTUP_TIMEOUT_S
    reserved_cores: float = 0
    required_memory_gb: float | None = None
    launch_mode: str = "mp"
    capacity_class: str = "standard"
    max_loaded_adapters: int | None = None
    """Adapters that one replica holds at most, loaded when asked for; None: all of the model's, from its start."""
    min_disk_gb: float | None = None
    """What a node must have free before a replica is placed there: room for its weights."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that each of its nodes must have."""
    only_nodes: tuple[str, ...] = ()
    """Names of the nodes that it may run on; empty: any."""
    metrics: Metrics = Metrics()


@dataclass(frozen=True, slots=True)
class Model:
    """A catalog entry as clients see it."""

    name: str
    aliases: tuple[str, ...] = ()
    source: str = ""
    profiles: tuple[Profile, ...] = ()
    scaling: Scaling = Scaling()
    fallbacks: tuple[str, ...] = ()
    routing_profile: str = LEAST_LOAD
    slo: Slo = Slo()
    band: str = ""
    required_memory_gb: float | None = None
    external: External | None = None
    adapters: tuple[Adapter, ...] = ()
    team: str = ""
    """Slug of the team whose capacity quota its replicas count against; empty: nobody's."""

    def names(self) -> tuple[str, ...]:
        """Every name a client may ask for it by: its own, its aliases, its adapters."""
        return (self.name, *self.aliases, *(adapter.name for adapter in self.adapters))


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a catalog is refused (or only remarked on), and where. `line` counts from 1 in the YAML it came from."""

    model: str
    profile: str
    field: str
    text: str
    line: int | None = None

    def __str__(self) -> str:
        place = [f"line {self.line}"] if self.line else []
        place += [f"model {self.model}"] if self.model else []
        place += [f"profile {self.profile}"] if self.profile else []
        where = ", ".join(place)
        return ": ".join(part for part in (where, self.field, self.text) if part)


def scaling(minimum: int = 0, maximum: int | None = None, idle_timeout_s: int = IDLE_TIMEOUT_S) -> Scaling:
    """What was written, filled in (CAT-4): a left out max is min, and stays 0 when min is 0."""
    low = max(minimum, 0)
    return Scaling(min=low, max=low if maximum is None else maximum, idle_timeout_s=idle_timeout_s)


def normalise(model: Model) -> Model:
    """`model` with every value that reads as left out replaced by its default (CAT-2). Twice is as once."""
    return replace(
        model,
        profiles=tuple(normalise_profile(profile) for profile in model.profiles),
        scaling=replace(model.scaling, min=max(model.scaling.min, 0)),
    )


def normalise_profile(profile: Profile) -> Profile:
    tp, nodes = _or(profile.tp, 1), _or(profile.nodes, 1)
    # pp is not counted in: a pipeline profile writes gpus_per_node, or the equation refuses it.
    cards = 0 if profile.gpu_class is None else profile.gpus_per_node or max(tp // nodes, 1)
    return replace(
        profile,
        tp=tp,
        nodes=nodes,
        pp=max(profile.pp, 1),
        gpus_per_node=cards,
        weight=_or(profile.weight, 1),
        startup_timeout_s=_or(profile.startup_timeout_s, STARTUP_TIMEOUT_S),
        max_loaded_adapters=_or(profile.max_loaded_adapters or 0, 0) or None,
        env=tuple(sorted(profile.env)),
        labels=tuple(sorted(profile.labels)),
    )


def normalise_all(models: Iterable[Model]) -> tuple[Model, ...]:
    return tuple(normalise(model) for model in models)


def _or(value: int, default: int) -> int:
    return value if value > 0 else default
