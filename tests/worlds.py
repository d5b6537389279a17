"""A whole fleet in a test: a clock that tests turn, agents that speak the protocol's values, passes that run when told.

Rows, plans, commands and reports are the real ones; only machines, engines and the websocket are played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import msgspec
from django.db import transaction

from agent import protocol
from nodes import actions, commands, passes, plans
from nodes.models import Backoff, Command, Event, Node, Replica, Shard
from tenants.audit import SYSTEM
from tests.factories import inventory

START = datetime(2026, 11, 29, 12, tzinfo=UTC)


@dataclass
class Engine:
    """A process on a played machine. `pid` tells whether it is still the same one."""

    spec: protocol.ShardSpec
    pid: int
    state: protocol.State = "starting"
    reason: str = ""
    rendezvous: int | None = None

    def status(self) -> protocol.ShardState:
        return protocol.ShardState(
            replica=self.spec.replica,
            rank=self.spec.rank,
            state=self.state,
            pid=self.pid,
            port=9000 + self.pid if self.state == "ready" else None,
            reason=self.reason,
            rendezvous=self.rendezvous,
        )


@dataclass
class Agent:
    """One machine and its agent. `deaf` loses every command; `silent` sends nothing, though its engines run on."""

    world: World
    node: Node
    machine_id: str
    inventory: protocol.Inventory
    engines: dict[tuple[str, int], Engine] = field(default_factory=dict)
    answered: dict[int, protocol.Ack] = field(default_factory=dict)
    applied: list[int] = field(default_factory=list)
    connection: str = ""
    deaf: bool = False
    silent: bool = False
    mute_acks: bool = False
    forgot: bool = False
    """Its process was started anew since it began: it knows what runs, and not what it was told."""
    stuck: bool = False
    """Its engines do not end when they are told to."""
    broken: str = ""
    """Why engines fail here when they load; empty when they come up."""

    def connect(self) -> protocol.Welcome | protocol.Refused:
        self.connection = f"stream{self.world.next_number()}"
        running = tuple(protocol.Running(spec=e.spec, status=e.status()) for e in self.engines.values())
        register = protocol.Register(
            node=self.node.name,
            agent_version="1",
            machine_id=self.machine_id,
            address="127.0.0.1",
            inventory=self.inventory,
            shards=running,
        )
        return actions.register_node(node=self.node, register=register, connection=self.connection, now=self.world.now)

    def beat(self) -> actions.Heard | None:
        """One heartbeat, registering again when that is asked for."""
        if self.silent or not self.connection:
            return None
        states = tuple(engine.status() for engine in self.engines.values() if engine.state not in protocol.ENDED)
        heard = actions.heartbeat(
            node=self.node.name,
            connection=self.connection,
            load=protocol.NodeLoad(load_1m=1.0),
            changed=states,
            now=self.world.now,
        )
        if heard == "register again":
            self.connect()
        return heard

    def start_anew(self) -> protocol.Welcome | protocol.Refused:
        self.answered.clear()
        self.forgot = True
        return self.connect()

    def obey(self) -> None:
        """Take the commands that are due, and do each once."""
        if self.silent or not self.connection:
            return
        for command in commands.take_due(node=self.node.name, connection=self.connection, now=self.world.now):
            if self.deaf:
                continue
            if command.id not in self.answered:
                self.applied.append(command.id)
                self.answered[command.id] = protocol.Ack(id=command.id)
                self._do(command.body)
            if not self.mute_acks:
                actions.acknowledge(node=self.node.name, ack=self.answered[command.id], now=self.world.now)

    def _do(self, body: protocol.Body) -> None:
        match body:
            case protocol.StartShard():
                assert body.engine_key
                key = (body.spec.replica, body.spec.rank)
                if key in self.engines:
                    assert self.forgot, f"{key} was started twice"
                    return  # an agent leaves what runs as it is
                self.engines[key] = Engine(body.spec, pid=self.world.next_number())
                self.tell(self.engines[key])
            case protocol.StopShard() if self.stuck and (body.replica, body.rank) in self.engines:
                engine = self.engines[body.replica, body.rank]
                engine.state = "stopping"
                self.tell(engine)
            case protocol.StopShard():
                engine = self.engines.pop((body.replica, body.rank), None)
                stopped = protocol.ShardState(replica=body.replica, rank=body.rank, state="stopped")
                if engine:
                    engine.state = "stopped"
                self._report(stopped)

    def work(self) -> None:
        """Engines come one step nearer to ready, or fail where this machine is broken. Workers only live; a leader
        listens, and loads when all of them are there."""
        steps: dict[protocol.State, protocol.State] = {"starting": "loading", "loading": "ready"}
        for engine in self.engines.values():
            if engine.spec.rank or (engine.spec.nodes > 1 and engine.state == "starting" and not self._joined(engine)):
                continue
            if self.broken and engine.state == "loading":
                self.kill(engine, self.broken)
            elif engine.state in steps:
                engine.state = steps[engine.state]
                self.tell(engine)

    def _joined(self, leader: Engine) -> bool:
        if leader.rendezvous is None:
            leader.rendezvous = 29500
            self.tell(leader)
        there = [engine for engine in self.world.engines() if engine.spec.replica == leader.spec.replica]
        return len(there) == leader.spec.nodes

    def kill(self, engine: Engine, reason: str = "killed by signal 9") -> None:
        engine.state, engine.reason = "failed", reason
        self.tell(engine, tail="the last line")

    def tell(self, engine: Engine, tail: str = "") -> None:
        self._report(engine.status(), tail)

    def _report(self, status: protocol.ShardState, tail: str = "") -> None:
        if self.silent or not self.connection:
            return
        report = protocol.ShardStatus(status=status, tail=tail)
        actions.shard_status(node=self.node.name, connection=self.connection, report=report, now=self.world.now)


@contextmanager
def carried_out() -> Iterator[list[plans.Plan]]:
    """The plans that passes carry out meanwhile."""
    done: list[plans.Plan] = []
    really = passes.apply

    def apply(plan: plans.Plan, now: datetime) -> bool:
        done.append(plan)
        return really(plan, now)

    passes.apply = apply
    try:
        yield done
    finally:
        passes.apply = really


class World:
    """`run(seconds)` lets time pass: each `step` engines work, agents beat and obey, and passes run until they rest."""

    def __init__(self) -> None:
        self.now = START
        self.since: datetime | None = None
        """When the control plane that passes run in took the lead."""
        self.agents: dict[str, Agent] = {}
        self.starts = 0
        self._numbers = 0
        self.loads: Callable[[], None] = lambda: None
        """What gateways report each second."""

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def add(self, name: str, *, cores: int = 8, connect: bool = True, **fields: object) -> Agent:
        node, _ = actions.make_node(name=name, actor=SYSTEM)
        facts = inventory(cpu=protocol.Cpu(model="a CPU", cores=cores), **fields)
        agent = self.agents[name] = Agent(self, node, f"machine-{name}", facts)
        if connect:
            agent.connect()
        return agent

    def run(self, seconds: int, *, step: int = 1) -> None:
        for _ in range(0, seconds, step):
            self.now += timedelta(seconds=step)
            for agent in self.agents.values():
                agent.work()
                agent.beat()
                agent.obey()
            self.loads()
            self.reconcile()

    def reconcile(self) -> None:
        """Passes until nothing is left to do. Each plan is carried out twice: the second time must change nothing."""
        for _ in range(50):
            with carried_out() as done:
                acted = passes.run_pass(self.now, since=self.since)
            starts = [action for plan in done for action in plan.actions if isinstance(action, plans.Start)]
            assert len(starts) <= 1
            self.starts += len(starts)
            if not acted:
                return
            before = everything()
            with transaction.atomic():
                assert not any(passes.apply(plan, self.now) for plan in done)
            assert everything() == before
        raise AssertionError("passes do not come to rest")

    def add_cards(self, name: str, cards: int = 2, *, fabric: str = "ib0") -> Agent:
        """A machine with cards of one class, a fabric, and vLLM."""
        gpus = tuple(
            protocol.Gpu(uuid=f"{name}-{index}", index=index, name="H100", gpu_class="h100-80g")
            for index in range(cards)
        )
        link = protocol.Fabric(name=fabric, link_layer="InfiniBand", rate_gbit_s=400)
        builds = (protocol.Build(engine="vllm", name="vllm", version="1"),)
        return self.add(name, cores=64, gpus=gpus, fabrics=(link,) if fabric else (), builds=builds)

    def restart_control_plane(self) -> None:
        """Streams end; a new one takes the lead and knows nothing but rows. Agents connect when told to."""
        self.since = self.now
        for agent in self.agents.values():
            actions.leave(node=agent.node.name, connection=agent.connection)
            agent.connection = ""

    def engines(self) -> list[Engine]:
        """Everything that really runs, on whichever machine."""
        found = (engine for agent in self.agents.values() for engine in agent.engines.values())
        return [engine for engine in found if engine.state not in protocol.ENDED]

    def ready(self, model: str) -> list[str]:
        """Names of replicas that gateways may send to."""
        return [e.replica for e in Replica.objects.endpoints() if e.usable and e.model == model]

    def told(self) -> list[str]:
        """The timeline, oldest first."""
        return list(Event.objects.order_by("pk").values_list("text", flat=True))


def everything() -> bytes:
    """All rows that a pass may change, as one value to compare."""
    tables = (Node, Replica, Shard, Command, Event, Backoff)
    return msgspec.json.encode([list(table.objects.order_by("pk").values()) for table in tables])
