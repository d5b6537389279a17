"""Agents that lie and reports that race: what may be told, by whom, and what becomes of rows when two speak at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone as clock

from agent import protocol
from catalog.models import Model
from llmgw.core import lease
from nodes import actions, consumers, intake, passes
from nodes.models import Command, Event, Node, Replica, Shard
from nodes.placement import Part
from nodes.plans import Action, Drain, Plan, Start, Stop
from tenants.audit import SYSTEM
from tests.factories import inventory, make_model, make_node, make_replica, sealed
from tests.nodes.test_intake import running
from tests.nodes.test_stream import a_register
from tests.services import wait_until

races = pytest.mark.django_db(transaction=True)
EAST = timezone(timedelta(hours=14))


@pytest.mark.parametrize(
    ("shard", "fault"),
    [
        ({"rendezvous": 65536}, "port 65536 of replica r is none"),
        ({"rendezvous": 0}, "port 0 of replica r is none"),
        ({"fabric": "x" * 121}, "the name of the fabric of replica r is longer than 120 characters"),
        ({"gpus": tuple(map(str, range(129)))}, "129 cards of replica r are more than 128"),
        ({"cores": -1.0}, "rank, slots or cores of replica r is out of range"),
        ({"cores": 1e300}, "a number has more than 63 bits"),
        ({"made_at": datetime(2026, 1, 1)}, "made_at of replica r has no time zone, or is not of our time"),
        ({"made_at": datetime(1, 1, 1, tzinfo=EAST)}, "made_at of replica r has no time zone, or is not of our time"),
        ({"made_at": datetime(9999, 12, 31, tzinfo=UTC)}, "made_at of replica r has no time zone"),
    ],
)
def test_a_shard_that_no_row_could_hold_is_refused_by_name(shard: dict[str, Any], fault: str) -> None:
    with pytest.raises(intake.Unfit, match=fault):
        intake.fitted(a_register(shards=(running(**shard),)))


@pytest.mark.parametrize("name", ["node", "machine_id", "agent_version"])
@pytest.mark.parametrize("value", ["x" * 129, "a\n12:00:00 all is well"])
def test_what_logs_say_of_a_machine_is_one_short_line(name: str, value: str) -> None:
    with pytest.raises(intake.Unfit, match=f"{name} is not one line of at most"):
        intake.fitted(a_register(**{name: value}))


@pytest.mark.parametrize("name", ["", "x" * 121, "a\n12:00:00 all is well"])
def test_a_state_names_its_replica_in_one_line(name: str) -> None:
    with pytest.raises(intake.Unfit, match="the replica of a state is not one line of 1 to 120 characters"):
        intake.fitted(protocol.ShardStatus(status=protocol.ShardState(replica=name, state="ready")))


@pytest.mark.parametrize(
    "told",
    [
        {"cpu": protocol.Cpu(cores=-1)},
        {"memory_bytes": -1},
        {"disks": (protocol.Disk(path="/", free_bytes=-1),)},
        {"disks": (protocol.Disk(path="/", total_bytes=-1),)},
    ],
)
def test_a_machine_has_no_less_than_nothing(told: dict[str, Any]) -> None:
    with pytest.raises(intake.Unfit, match="less than nothing"):
        intake.fitted(a_register(inventory=inventory(**told)))


@pytest.mark.parametrize("age_s", [-1.0, 2.0**31])
def test_readings_are_no_older_than_pages_can_say(age_s: float) -> None:
    with pytest.raises(intake.Unfit, match="the age of the cards' readings is out of range"):
        intake.fitted(protocol.Heartbeat(load=protocol.NodeLoad(gpus_age_s=age_s)))


def test_one_message_is_about_no_more_shards_than_one_transaction_should_hold() -> None:
    too_many = protocol.MAX_SHARDS + 1
    states = tuple(protocol.ShardState(replica=str(each), state="ready") for each in range(too_many))
    for message in (
        a_register(shards=(running(),) * too_many),
        protocol.Heartbeat(load=protocol.NodeLoad(), shards=states),
    ):
        with pytest.raises(intake.Unfit, match="1025 shards are more than 1024"):
            intake.fitted(message)


# --- one stream ------------------------------------------------------------------------------------------------------
def test_a_stream_keeps_no_more_of_what_it_told_than_a_heartbeat_holds() -> None:
    stream = consumers.AgentStream()
    for number in range(3 * protocol.MAX_SHARDS):
        stream._remember(protocol.ShardState(replica=str(number), state="stopped"))
    assert 1 <= len(stream.told) <= protocol.MAX_SHARDS


# --- replicas that nobody asked for ----------------------------------------------------------------------------------
def invented(replica: str, **fields: Any) -> protocol.Running:
    spec = protocol.ShardSpec(
        replica=replica, model="smollm2", profile="cpu", profile_digest="d" * 64, engine="llamacpp", source="/x"
    )
    status = protocol.ShardState(replica=replica, state="ready", port=9000)
    return protocol.Running(spec=msgspec.structs.replace(spec, **fields), status=status)


@pytest.mark.django_db
def test_a_node_cannot_invent_replicas_that_would_take_the_place_of_those_that_serve() -> None:
    make_model("smollm2")
    real = make_replica("real", node=a_node("one"))
    a_node("two")
    names = [f"invented{number}" for number in range(6)]
    for _ in range(2):
        registered("two", "two", *map(invented, names))()
    assert list(Replica.objects.values_list("pk", flat=True)) == [real.pk]
    assert set(Command.objects.values_list("node", "replica", "body__type")) == {
        ("two", n, "stop_shard") for n in names
    }
    [line] = Event.objects.filter(kind="refused").values_list("text", flat=True)
    assert line == (
        "Node two says that it runs invented0, invented1, invented2, invented3 and 2 more, "
        "which no control plane of this store told it to; it is told to stop"
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    "change",
    [{"replica": "s"}, {"rank": 1}, {"model": "other"}, {"profile": "x"}, {"made_at": clock.now()}, {"seal": ""}],
)
def test_a_seal_is_good_for_one_shard_of_one_node(change: dict[str, Any]) -> None:
    a_node("one")
    a_node("two")
    spec = sealed("one", invented("r").spec)
    for node, told in (("two", spec), ("one", msgspec.structs.replace(spec, **change))):
        shard = msgspec.structs.replace(invented("r"), spec=told)
        registered(node, node, shard)()
        assert not Replica.objects.exists()
    registered("one", "one", msgspec.structs.replace(invented("r"), spec=spec))()
    assert Shard.objects.get().node_id == "one"


@pytest.mark.django_db
def test_a_node_that_invents_replicas_for_ever_is_told_to_stop_no_more_than_it_can_hear() -> None:
    a_node("one")
    rows = [Command(node_id="one", body={"type": "fetch", "source": "x"}) for _ in range(protocol.MAX_SHARDS)]
    Command.objects.bulk_create(rows)
    registered("one", "one", invented("r"))()
    assert Command.objects.count() == protocol.MAX_SHARDS


# --- two at once -----------------------------------------------------------------------------------------------------
def race(first: Callable[[], object], second: Callable[[], object], then: Callable[[], object] = list) -> None:
    """`first` in a transaction; `second` beside it, until that has to wait; `then` before the transaction is over.

    Nobody may be refused. SQLite has one writer at a time, so that there `second` begins once the others are done.
    """
    refused: list[DatabaseError] = []

    def run() -> None:
        try:
            second()
        except DatabaseError as error:
            refused.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    with transaction.atomic():
        first()
        if connection.vendor == "postgresql":
            thread.start()
            wait_until("the second waits for the first, or is done", lambda: _waits() or not thread.is_alive())
        then()
    if connection.vendor == "postgresql":
        thread.join(60)
        assert not thread.is_alive()
    else:
        second()
    assert not refused


def _waits() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone()[0])


def told(node: str, replica: str, state: protocol.State, rank: int = 0) -> Callable[[], object]:
    status = protocol.ShardStatus(status=protocol.ShardState(replica=replica, rank=rank, state=state, port=9000))
    return lambda: actions.shard_status(node=node, connection=node, report=status, now=clock.now())


def beat(node: str, *replicas: str) -> Callable[[], object]:
    states = [protocol.ShardState(replica=replica, state="failed", reason="so") for replica in replicas]
    load = protocol.NodeLoad()
    return lambda: actions.heartbeat(node=node, connection=node, load=load, changed=states, now=clock.now())


def registered(node: str, connection: str, *shards: protocol.Running) -> Callable[[], object]:
    row, message = Node.objects.get(pk=node), a_register(node, machine_id=f"of {node}", shards=shards)
    return lambda: actions.register_node(node=row, register=message, connection=connection, now=clock.now())


def a_node(name: str) -> Node:
    return make_node(name, connection=name, machine_id=f"of {name}")


def apply(*plan: Action) -> Callable[[], object]:
    def carry_out() -> bool:
        with transaction.atomic():
            return passes.apply(Plan(plan), clock.now())

    return carry_out


@races
def test_a_part_that_failed_is_not_forgotten_for_another_that_became_ready_meanwhile() -> None:
    replica = make_replica("r", node=a_node("one"), state="loading")
    Shard.objects.create(replica=replica, rank=1, node=a_node("two"), state="ready")
    race(told("two", "r", "failed", rank=1), told("one", "r", "ready"))
    assert Replica.objects.get().state == "failed"


@races
def test_what_an_earlier_stream_said_last_does_not_outlive_the_register_of_the_next() -> None:
    make_replica("r", node=a_node("one"), state="starting")
    ready = protocol.Running(
        spec=protocol.ShardSpec(
            replica="r", model="smollm2", profile="cpu", profile_digest="d" * 64, engine="llamacpp", source="/x"
        ),
        status=protocol.ShardState(replica="r", state="ready", port=9000),
    )
    race(told("one", "r", "loading"), registered("one", "next", ready))
    assert Replica.objects.get().state == "ready"
    make_replica("s", node=a_node("two"), state="ready")
    race(registered("two", "next"), told("two", "s", "loading"))
    assert Replica.objects.get(pk="s").state == "stopped"


@races
@pytest.mark.parametrize("second", [beat("one", "b", "a"), apply(Drain("b", "m", "y"), Drain("a", "m", "y"))])
def test_whoever_writes_several_replicas_takes_them_in_one_order(second: Callable[[], object]) -> None:
    node = a_node("one")
    make_replica("a", node=node)
    make_replica("b", node=node)
    race(apply(Drain("a", "m", "why")), second, apply(Drain("b", "m", "why")))
    assert set(Replica.objects.values_list("wanted", flat=True)) == {"drain"}


@races
def test_a_register_takes_its_replicas_in_that_order_and_leaves_commands_to_be_stored() -> None:
    node = a_node("one")
    make_replica("a", node=node)
    make_replica("b", node=node)
    race(apply(Drain("a", "m", "why")), registered("one", "next"), apply(Drain("b", "m", "why"), Stop("b", "m", "why")))
    assert Replica.objects.get(pk="b").wanted == "stop"
    assert Command.objects.filter(node="one").exists()


@races
def test_a_node_is_removed_after_a_pass_that_starts_something_there_is_done() -> None:
    node = a_node("one")
    make_model("m")
    (model,) = Model.objects.snapshot()
    held = lease.acquire(lease.LEADER, ttl_s=60)
    assert held
    race(
        lambda: lease.advance(held),
        lambda: actions.remove_node(node=node, actor=SYSTEM, force=True),
        apply(Start("r", model, model.profiles[0], (Part("one"),), "why")),
    )
    assert not Node.objects.exists()
    assert not Shard.objects.exists()


@races
@pytest.mark.parametrize(
    "act",
    [
        lambda node: actions.remove_node(node=node, actor=SYSTEM, force=True),
        lambda node: actions.cordon_node(node=node, actor=SYSTEM),
        lambda node: actions.drain_node(node=node, actor=SYSTEM),
    ],
)
def test_a_pass_that_looked_before_an_operator_acted_on_a_node_decides_again(act: Callable[[Node], object]) -> None:
    node, held = a_node("one"), lease.acquire(lease.LEADER, ttl_s=60)
    assert held
    act(node)
    assert not lease.advance(held)
