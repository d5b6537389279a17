"""A fleet of values: time passes, agents obey, engines come up, and the pure plan is carried out until it rests.

No rows and no processes, so that long stories and generated ones are cheap. After every pass the rules that hold at any
time are checked. `tests.worlds` plays the same with rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from agent.protocol import Build, Fabric, Gpu
from catalog import spec
from nodes.expiry import Expired
from nodes.plans import Action, BackOff, Drain, Forget, Start, Stop
from nodes.reconcile import plan
from nodes.state import Cluster, Load, Node, Replica, Shard, Status, replica_state
from tests.nodes.fleets import NOW, carried_out

BUILDS = tuple(Build(engine=name, name=name, version="1") for name in spec.ENGINES)


def machine(name: str, *, cards: int = 0, cores: int = 64, fabric: str = "") -> Node:
    """A node that can run anything, with `cards` of one class."""
    return Node(
        name,
        cores=cores,
        memory_bytes=512 * 10**9,
        disk_free_bytes=10**13,
        builds=BUILDS,
        gpus=tuple(Gpu(uuid=f"{name}-{i}", index=i, name="H100", gpu_class="h100-80g") for i in range(cards)),
        fabrics=(Fabric(name=fabric, link_layer="InfiniBand", rate_gbit_s=400),) if fabric else (),
        registered_at=NOW,
        last_seen_at=NOW,
    )


def a_model(
    name: str, *, least: int = 0, most: int = 1, cards: int = 1, capacity_class: str = "standard", **fields: object
) -> spec.Model:
    """A model with one profile, on `cards` of a node, or of each of `nodes`."""
    profile = spec.Profile(
        "only",
        engine="vllm",
        gpu_class="h100-80g",
        gpus_per_node=cards,
        tp=cards,
        capacity_class=capacity_class,
        **fields,  # type: ignore[arg-type]
    )
    return spec.Model(name, source="/w", profiles=(profile,), scaling=spec.Scaling(least, most, idle_timeout_s=900))


@dataclass
class Simulation:
    cluster: Cluster
    now: datetime = NOW
    silent: set[str] = field(default_factory=set)
    """Nodes that nothing is heard of, though their engines run on."""
    stuck: set[str] = field(default_factory=set)
    """Nodes that are heard, and whose engines do not end when they are told to."""
    broken: set[tuple[str, str]] = field(default_factory=set)
    """Models and the nodes that they fail to load on."""
    busy: dict[str, int | None] = field(default_factory=dict)
    """By model, the requests that each of its replicas has; others have none, `None`: nobody knows."""
    done: list[Action] = field(default_factory=list)
    ghosts: list[Replica] = field(default_factory=list)
    """What runs on silent nodes and was given up."""

    def ask(self, *models: str) -> None:
        kept = tuple(status for status in self.cluster.statuses if status.model not in models)
        new = tuple(Status(model, demand_at=self.now) for model in models)
        self.cluster = replace(self.cluster, statuses=(*kept, *new))

    def change(self, model: spec.Model) -> None:
        others = tuple(each for each in self.cluster.models if each.name != model.name)
        self.cluster = replace(self.cluster, models=(*others, model))

    def run(self, seconds: int, *, step: int = 5) -> None:
        for _ in range(0, seconds, step):
            self.now += timedelta(seconds=step)
            self._hear()
            self.passes()

    def passes(self) -> None:
        for _ in range(60):
            decided = plan(self.cluster, self.now)
            if not decided.actions:
                return
            assert sum(isinstance(action, Start) for action in decided.actions) <= 1
            for action in decided.actions:
                if isinstance(action, Forget):
                    self._check_over(action, {e.node for e in decided.actions if isinstance(e, Expired)})
                    self.ghosts += [r for r in self.replicas() if r.name == action.replica and self._is_heard_not(r)]
            self.done += decided.actions
            self.cluster = carried_out(self.cluster, decided, self.now)
            self._check()
        raise AssertionError("passes do not come to rest")

    def comes_back(self, name: str) -> None:
        """The node speaks again, and registers what it runs."""
        self.silent.discard(name)
        back = tuple(
            replace(ghost, wanted="run", shards=tuple(shard for shard in ghost.shards if shard.node == name))
            for ghost in self.ghosts
            if any(shard.node == name for shard in ghost.shards)
        )
        self.ghosts = [ghost for ghost in self.ghosts if all(shard.node != name for shard in ghost.shards)]
        nodes = tuple(
            replace(node, state="ready", registered_at=self.now, last_seen_at=self.now) if node.name == name else node
            for node in self.cluster.nodes
        )
        self.cluster = replace(self.cluster, nodes=nodes, replicas=(*self.cluster.replicas, *back))

    # --- what tests look at --------------------------------------------------------------------------------------
    def replicas(self, model: str = "") -> list[Replica]:
        return [replica for replica in self.cluster.replicas if model in ("", replica.model)]

    def ready(self, model: str) -> list[Replica]:
        return [each for each in self.replicas(model) if each.state == "ready" and each.wanted == "run"]

    def homes(self, model: str) -> list[str]:
        return sorted(shard.node for each in self.ready(model) for shard in each.shards)

    def count(self, kind: type[Action], model: str) -> int:
        found = (action for action in self.done if isinstance(action, Start | Stop | Drain | Forget | BackOff))
        named = [a for a in found if isinstance(a, kind) and _model_of(a) == model]
        return len(named)

    # --- what agents and gateways do -----------------------------------------------------------------------------
    def _hear(self) -> None:
        nodes = tuple(
            node if node.name in self.silent else replace(node, state="ready", last_seen_at=self.now)
            for node in self.cluster.nodes
        )
        replicas = tuple(self._moved(replica) for replica in self.cluster.replicas)
        self.cluster = replace(self.cluster, nodes=nodes, replicas=replicas)

    def _moved(self, replica: Replica) -> Replica:
        shards = tuple(self._shard(shard, replica) for shard in replica.shards)
        state = replica_state((shard.rank, shard.state) for shard in shards)
        in_flight = self.busy.get(replica.model, 0)
        moved = replace(replica, shards=shards, load=Load(at=self.now, in_flight=in_flight))
        if state == replica.state:
            return moved
        changed = replace(moved, state=state, state_at=self.now)  # type: ignore[arg-type]
        if state == "failed":
            changed = replace(changed, reason="cannot load")
        return replace(changed, ready_at=self.now) if state == "ready" else changed

    def _shard(self, shard: Shard, replica: Replica) -> Shard:
        if shard.node in self.silent or (shard.node in self.stuck and replica.wanted == "stop"):
            return shard
        if shard.ended:
            return shard if replica.wanted != "stop" else replace(shard, state="stopped")
        if replica.wanted == "stop":
            return replace(shard, state="stopped")
        if shard.rank == 0:
            return self._leader(shard, replica)
        return shard

    def _leader(self, shard: Shard, replica: Replica) -> Shard:
        if any(other.state == "waiting" for other in replica.shards):
            return replace(shard, rendezvous=29500)
        if shard.state == "loading" and (replica.model, shard.node) in self.broken:
            return replace(shard, state="failed")
        if shard.state == "starting":
            return replace(shard, state="loading")
        return replace(shard, state="ready")

    def _is_heard_not(self, replica: Replica) -> bool:
        return any(shard.node in self.silent and not shard.ended for shard in replica.shards)

    def _check_over(self, action: Forget, expired: set[str]) -> None:
        """What is forgotten has ended, or is where nobody hears of it: its cards are somebody else's from now on."""
        heard = {node.name for node in self.cluster.nodes if node.state != "lost"} - expired
        [replica] = [replica for replica in self.replicas() if replica.name == action.replica]
        assert all(shard.ended or shard.node not in heard for shard in replica.shards), action.why

    def _check(self) -> None:
        """No card is given twice, and none that is not there; CPU cores are not counted twice."""
        cards = {gpu.uuid for node in self.cluster.nodes for gpu in node.gpus if gpu.healthy}
        given: Mapping[str, str] = {}
        for replica in self.cluster.replicas:
            for shard in replica.shards:
                for card in () if shard.ended else shard.gpus:
                    assert card in cards
                    assert card not in given, f"{card} is given to {replica.name} and {given[card]}"
                    given = {**given, card: replica.name}


def _model_of(action: Start | Stop | Drain | Forget | BackOff) -> str:
    match action:
        case Start():
            return action.model.name
        case BackOff():
            return action.backoff.model
        case _:
            return action.model
