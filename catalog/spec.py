"""What a model and a profile are, as frozen values, and whether a whole catalog of them is valid. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_LOAD = "least_load"
ROUTING_PROFILES = (LEAST_LOAD, "prefix_affinity", "round_robin", "weighted")
ENGINES = ("vllm", "sglang", "llamacpp")
CPU_ENGINES = ("llamacpp",)
CAPACITY_CLASSES = ("guaranteed", "standard", "spot")


@dataclass(frozen=True, slots=True)
class Scaling:
    """min 0 max 0: off. min 0 max > 0: on demand. min > 0: kept up."""

    min: int = 0
    max: int = 0
    idle_timeout_s: int = 900


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_p99_ms: int | None = None
    tpot_p99_ms: int | None = None


@dataclass(frozen=True, slots=True)
class External:
    url: str
    model: str
    api_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    source: str


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
    startup_timeout_s: int = 1200
    reserved_cores: float = 0
    required_memory_gb: float | None = None
    launch_mode: str = "mp"
    capacity_class: str = "standard"


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
