"""The words that control plane and agent exchange: JSON messages over one websocket, tagged by `type` (ND-1..6).

Up: Register, Heartbeat, ShardStatus, Ack, CertificateRequest. Down: Welcome, Refused, Command, and what answers such a
request. Pure; both sides import it.
Sizes are bytes, durations seconds. `None` is unknown, never zero.
"""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Literal

import msgspec

VERSION = 1
PATH = "/agent/stream"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
TAIL_BYTES = 16 * 1024
MAX_FILES = 2000
MAX_GPUS = 128
MAX_ADAPTERS = 64
MAX_PORTS = 8
MAX_GIDS = 8
MAX_FABRICS = 16
MAX_LABELS = 64
MAX_SHARDS = 1024
MAX_TEXT = 400
"""Of one line in an inventory, in characters. A longer one is cut; a file's path is left out instead."""
MAX_PATH = 1000
MAX_REQUEST = 8 * 1024
"""Of a certificate signing request, in characters."""
MAX_BUILD_NAME = 80
AUTO, NONE = "auto", "none"
"""What is chosen of an engine's builds beside one of them by its name: the best that runs, or not one."""

State = Literal["fetching", "installing", "starting", "loading", "ready", "draining", "stopping", "stopped", "failed"]
STATES: tuple[State, ...] = State.__args__  # type: ignore[attr-defined]
ENDED: tuple[State, ...] = ("stopped", "failed")


class Struct(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Every message and its parts. The subclasses repeat `frozen` because type checkers read it class by class."""


# --- what a node is --------------------------------------------------------------------------------------------------
class Cpu(Struct, frozen=True, kw_only=True):
    model: str | None = None
    cores: int | None = None
    numa_nodes: int | None = None


class Gpu(Struct, frozen=True, kw_only=True):
    """A card, or a MIG slice of one: what a replica can be given. Facts only; what changes by the second is a reading.

    `healthy` False: `fault` says why nothing may be placed on it, such as memory that a stranger's process holds.
    """

    uuid: str
    index: int
    """In the order of the PCI bus."""
    name: str
    gpu_class: str
    memory_bytes: int | None = None
    healthy: bool = True
    fault: str = ""
    pci: str = ""
    compute_capability: str = ""
    numa: int | None = None
    peers: tuple[str, ...] | None = None
    """UUIDs of the cards it reaches over NVLink: none where () is written, unknown where nothing is."""
    nvlink_cluster: str = ""
    nvlink_clique: int | None = None
    """Cards of one cluster and clique are one NVLink domain, whichever nodes they are in."""
    slice_of: str = ""
    """The card that a MIG slice is cut from. Slices are never joined."""


class Gid(Struct, frozen=True, kw_only=True):
    index: int
    gid: str
    kind: str = ""
    """As the kernel says: "RoCE v2", "IB/RoCE v1"."""


class AdapterPort(Struct, frozen=True, kw_only=True):
    """A port of a network adapter; `fault` names what could not be read of it."""

    number: int
    state: str = ""
    """ACTIVE, DOWN, INIT, ARMED, or empty where it is unknown."""
    rate_gbit_s: float | None = None
    link_layer: str = ""
    """InfiniBand, or Ethernet for RoCE."""
    subnet_prefix: str = ""
    sm_lid: int | None = None
    """The subnet manager's address. Equal prefixes alone prove nothing: most networks have the default one."""
    network: str = ""
    """The interface behind a RoCE port."""
    gids: tuple[Gid, ...] = ()
    fault: str = ""


class RdmaAdapter(Struct, frozen=True, kw_only=True):
    """An InfiniBand or RoCE adapter as the kernel names it: mlx5_0."""

    name: str
    numa: int | None = None
    ports: tuple[AdapterPort, ...] = ()
    fault: str = ""


class Fabric(Struct, frozen=True, kw_only=True):
    """A declared fabric. `up` False: not advertised, and `reason` says why."""

    name: str
    adapters: tuple[str, ...] = ()
    up: bool = True
    reason: str = ""
    rate_gbit_s: float | None = None
    """Of its slowest active link."""
    link_layer: str = ""


class Disk(Struct, frozen=True, kw_only=True):
    path: str
    total_bytes: int | None = None
    free_bytes: int | None = None


class Build(Struct, frozen=True, kw_only=True):
    """An engine build on the node. `usable` False: `reason` says why it cannot be installed or run."""

    engine: str
    name: str
    version: str
    usable: bool = True
    reason: str = ""


class File(Struct, frozen=True, kw_only=True):
    path: str
    size_bytes: int


class Inventory(Struct, frozen=True, kw_only=True):
    """What the scheduler sees of a machine."""

    hostname: str
    os: str | None = None
    kernel: str | None = None
    cpu: Cpu = Cpu()
    memory_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpus_fault: str = ""
    """Why the cards could not be read lately, so that nothing new is placed on them; those known before stay listed."""
    driver: str = ""
    cuda: str = ""
    fabrics: tuple[Fabric, ...] = ()
    adapters: tuple[RdmaAdapter, ...] = ()
    """All of the machine's, declared in a fabric or not."""
    builds: tuple[Build, ...] = ()
    engine_builds: dict[str, str] | None = None
    """By engine, the build that a control plane chose, where that is not AUTO. None: the agent takes no choice."""
    files: tuple[File, ...] = ()
    cut: tuple[str, ...] = ()
    """Names of the lists above that were cut to fit the message."""


class Sensor(Struct, frozen=True, kw_only=True):
    name: str
    value: float | None
    unit: str


class GpuReading(Struct, frozen=True, kw_only=True):
    """What changes of a card by the second. `throttled` names the bad reasons; empty: none, or unknown."""

    uuid: str
    memory_used_bytes: int | None = None
    utilisation_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    fan_percent: float | None = None
    throttled: str = ""


class NodeLoad(Struct, frozen=True, kw_only=True):
    load_1m: float | None = None
    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    sensors: tuple[Sensor, ...] = ()
    gpus: tuple[GpuReading, ...] = ()
    gpus_age_s: float | None = None
    """How old these readings are: cards are read apart from heartbeats, which never wait for them."""


# --- what runs -------------------------------------------------------------------------------------------------------
class Adapter(Struct, frozen=True, kw_only=True):
    """A LoRA adapter of the model. Its place in the list is the number that llama.cpp knows it by."""

    name: str
    source: str


def engine_name(adapter: str, source: str) -> str:
    """What engines that have names for adapters know one by, and gateways ask for: other weights, another name."""
    return f"{adapter}@{hashlib.sha256(source.encode()).hexdigest()[:8]}"


class ShardSpec(Struct, frozen=True, kw_only=True):
    """Everything an agent needs to run one shard; also what it writes beside the pid and sends back on register."""

    replica: str
    rank: int = 0
    model: str
    """The canonical name, which is the served name."""
    profile: str
    profile_digest: str
    engine: str
    source: str
    adapters: tuple[Adapter, ...] = ()
    max_loaded_adapters: int | None = None
    """How many adapters the engine holds at most, loaded and unloaded as it runs; None: those above, from its start."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    gpus: tuple[str, ...] = ()
    fabric: str = ""
    """What the shards of a replica on several nodes talk over; empty on one node."""
    cores: float = 0
    slots: int = 1
    tp: int = 1
    pp: int = 1
    nodes: int = 1
    launch_mode: str = "mp"
    """How ranks on several nodes are started: by the engine itself, or over Ray."""
    startup_timeout_s: float = 1200
    rendezvous: str = ""
    """`host:port` where the leader awaits this rank; empty for the leader itself, and on one node."""
    made_at: datetime | None = None
    """When the replica was made, by the control plane's clock, so that a store that forgot knows its age."""
    seal: str = ""
    """Added when the command is sent: proves to a store that forgot that this node was told to run this shard."""


class Progress(Struct, frozen=True, kw_only=True):
    done_bytes: int | None = None
    total_bytes: int | None = None
    rate_bytes_s: float | None = None
    note: str = ""


class ShardState(Struct, frozen=True, kw_only=True):
    """One shard as it is now."""

    replica: str
    rank: int = 0
    state: State
    port: int | None = None
    pid: int | None = None
    reason: str = ""
    progress: Progress | None = None
    adopted: bool = False
    rendezvous: int | None = None
    """The port on which a leader awaits its replica's other ranks, once it listens there."""


class Running(Struct, frozen=True, kw_only=True):
    """A shard the agent runs or has adopted: its full spec, so that a store that forgot can rebuild its rows."""

    spec: ShardSpec
    status: ShardState


# --- up --------------------------------------------------------------------------------------------------------------
class Register(Struct, frozen=True, kw_only=True, tag="register", omit_defaults=False):
    """First message of every connection, and the whole truth about the node.

    Whole: an omitted `protocol` says nothing.
    """

    node: str
    protocol: int = VERSION
    agent_version: str
    machine_id: str
    instance: str = ""
    """Another one for each process of an agent, so that copies of one machine are told apart."""
    address: str
    inventory: Inventory
    labels: dict[str, str] = {}
    shards: tuple[Running, ...] = ()


class Errand(Struct, frozen=True, kw_only=True):
    """A fetch or an installation that a command asked for, under way or ended lately."""

    command: int
    what: str
    """The source, or the engine."""
    state: Literal["running", "done", "failed"] = "running"
    reason: str = ""
    progress: Progress | None = None


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    load: NodeLoad
    shards: tuple[ShardState, ...] = ()
    errands: tuple[Errand, ...] = ()
    inventory: Inventory | None = None
    """Told anew when anything but free space is other than this stream last heard of."""


class ShardStatus(Struct, frozen=True, kw_only=True, tag="shard_status"):
    """Sent on every transition; `tail` holds the engine's last lines when it failed."""

    status: ShardState
    tail: str = ""


class Ack(Struct, frozen=True, kw_only=True, tag="ack"):
    """The result of a command; the same id always gets the same answer."""

    id: int
    ok: bool = True
    error: str = ""


class CertificateRequest(Struct, frozen=True, kw_only=True, tag="certificate_request"):
    """Asks for another certificate in the name of this stream's: a certificate signing request as PEM."""

    request: str


Up = Register | Heartbeat | ShardStatus | Ack | CertificateRequest


# --- down ------------------------------------------------------------------------------------------------------------
class StartShard(Struct, frozen=True, kw_only=True, tag="start_shard"):
    spec: ShardSpec
    engine_key: str | None = None
    """Added when the command is sent; never stored with it."""


class StopShard(Struct, frozen=True, kw_only=True, tag="stop_shard"):
    replica: str
    rank: int = 0
    grace_s: float = 10


class Fetch(Struct, frozen=True, kw_only=True, tag="fetch"):
    """Bring weights onto the node before anything there needs them. The answer says that it has begun."""

    source: str


class InstallEngine(Struct, frozen=True, kw_only=True, tag="install_engine"):
    """Install the best build of an engine before anything needs it. The answer says that it has begun."""

    engine: str


class SetEngineBuild(Struct, frozen=True, kw_only=True, tag="set_engine_build"):
    """Which build of an engine starts from now on: AUTO, NONE, or one of the inventory's by name. Kept over restarts;
    what runs is left as it is."""

    engine: str
    build: str


Body = StartShard | StopShard | Fetch | InstallEngine | SetEngineBuild


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    node: str
    heartbeat_s: float = 5
    renews: bool = False
    """Whether a CertificateRequest is answered on this stream."""


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    reason: str
    retry_after_s: float | None = None


class Command(Struct, frozen=True, kw_only=True, tag="command"):
    id: int
    body: Body
    traceparent: str = ""
    """Of the decision it belongs to, as W3C Trace Context writes it."""


class Certificate(Struct, frozen=True, kw_only=True, tag="certificate"):
    """What was asked for, as PEM."""

    certificate: str


class NotRenewed(Struct, frozen=True, kw_only=True, tag="not_renewed"):
    reason: str


Down = Welcome | Refused | Command | Certificate | NotRenewed

_encoder = msgspec.json.Encoder()
_up = msgspec.json.Decoder(Up)
_down = msgspec.json.Decoder(Down)
encode = _encoder.encode
decode_up = _up.decode
decode_down = _down.decode
"""Both raise msgspec.DecodeError (ValidationError for a wrong shape, naming the field)."""
