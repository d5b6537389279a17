"""Whole stories of a fleet: what starts, what stays, what moves, and what a restart of anything does not change."""

from __future__ import annotations

from datetime import timedelta

import pytest

from agent import protocol
from catalog import models as catalog
from llmgw.core.models import Revision
from nodes import actions
from nodes.models import Backoff, Command, ModelStatus, Node, Replica, ReplicaLoad, Shard
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.factories import make_model
from tests.worlds import World

pytestmark = pytest.mark.django_db


@pytest.fixture
def world() -> World:
    return World()


def test_a_fresh_node_registers_and_serves(world: World) -> None:
    make_model()
    world.add("one")
    before = Revision.current()
    world.run(6)
    [replica] = world.ready("smollm2")
    endpoint = Replica.objects.endpoints()[0]
    assert (endpoint.node, endpoint.host, endpoint.slots, endpoint.profile) == ("one", "127.0.0.1", 2, "cpu")
    assert endpoint.port
    assert Revision.current() > before
    assert world.told()[-1] == f"Replica {replica} of smollm2 is ready"


def test_a_spec_says_all_that_the_catalog_says(world: World) -> None:
    make_model(source="/models/x.gguf", profiles=({"args": ["--a"], "env": {"A": "1"}, "startup_timeout_s": 77},))
    agent = world.add("one", cores=6)
    world.run(2)
    [engine] = agent.engines.values()
    spec = engine.spec
    assert (spec.source, spec.args, spec.env, spec.slots) == ("/models/x.gguf", ("--a",), {"A": "1"}, 2)
    assert (spec.cores, spec.startup_timeout_s, spec.model, spec.profile) == (3, 77, "smollm2", "cpu")


def test_replicas_spread_over_nodes(world: World) -> None:
    make_model(min=3, max=3)
    for name in ("one", "two", "three"):
        world.add(name)
    world.run(6)
    assert sorted(Shard.objects.values_list("node", flat=True)) == ["one", "three", "two"]


def test_a_model_that_fits_nowhere_says_why_for_every_node(world: World) -> None:
    make_model(required_memory_gb=500)
    world.add("one")
    agent = world.add("two")
    actions.cordon_node(node=agent.node, actor=SYSTEM)
    world.run(2)
    assert ModelStatus.objects.get(model="smollm2").reasons == [
        "one (cpu): has 17.2 GB of memory, 500.0 GB are required; add a larger node, or lower required_memory_gb",
        "two (cpu): is cordoned; to use it: llmgw ctl uncordon two",
    ]
    assert world.told()[-1].startswith("Model smollm2 finds no place: one (cpu): has 17.2 GB")
    actions.uncordon_node(node=agent.node, actor=SYSTEM)
    catalog.Model.objects.update(required_memory_gb=1)
    world.run(6)
    assert world.ready("smollm2")
    assert ModelStatus.objects.get(model="smollm2").reasons == []


def test_a_killed_engine_is_rebuilt_after_its_backoff(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    [engine] = agent.engines.values()
    agent.kill(engine)
    world.run(1)
    held = Backoff.objects.get()
    assert (held.failures, held.reason, held.tail) == (1, "killed by signal 9", "the last line")
    assert held.next_try_at > world.now
    assert not world.engines()
    world.run(8)
    [again] = world.engines()
    assert again.pid != engine.pid
    assert world.ready("smollm2") == [again.spec.replica]
    world.run(125, step=5)
    assert not Backoff.objects.exists()
    assert world.told()[-1] == "Model smollm2 (cpu) is healthy again"


def test_an_engine_that_never_comes_up_is_tried_ever_more_rarely(world: World) -> None:
    make_model()
    world.add("one").broken = "cannot load the weights"
    world.run(300, step=5)
    assert 5 <= world.starts <= 9
    assert Backoff.objects.get().failures in (world.starts - 1, world.starts)
    assert any("smollm2 (cpu) is tried again at" in text.lower() for text in world.told())
    assert Replica.objects.count() <= 1


def test_a_changed_profile_is_tried_at_once(world: World) -> None:
    make_model()
    agent = world.add("one")
    agent.broken = "cannot load the weights"
    world.run(100, step=5)
    agent.broken = ""
    catalog.Profile.objects.update(args=["--better"])
    world.run(6)
    assert world.ready("smollm2")
    assert not Backoff.objects.exists()


def test_a_blip_moves_nothing(world: World) -> None:
    make_model()
    one = world.add("one")
    world.add("two")
    world.run(6)
    [before] = world.engines()
    home = next(agent for agent in world.agents.values() if agent.engines)
    home.silent = True
    world.run(60, step=3)
    assert Node.objects.get(name=home.node.name).state == "unreachable"
    assert world.ready("smollm2") == [before.spec.replica]
    home.silent = False
    world.run(5)
    assert Node.objects.get(name=home.node.name).state == "ready"
    assert world.engines() == [before]
    assert world.starts == 1
    assert one.connection == "stream1"


def test_a_lost_nodes_replica_moves_and_of_two_after_its_return_the_oldest_stays(world: World) -> None:
    make_model()
    world.add("one")
    world.add("two")
    world.run(6)
    [before] = world.engines()
    home = next(agent for agent in world.agents.values() if agent.engines)
    home.silent = True
    world.run(310, step=5)
    world.run(4)
    assert Node.objects.get(name=home.node.name).state == "lost"
    [moved] = world.ready("smollm2")
    assert moved != before.spec.replica
    assert len(world.engines()) == 2  # the old one cannot be told to stop
    home.silent = False
    world.run(70, step=2)
    assert world.engines() == [before]
    assert world.ready("smollm2") == [before.spec.replica]


def test_a_start_that_a_lost_node_never_heard_is_not_replayed(world: World) -> None:
    make_model()
    home = world.add("one")
    home.deaf = True
    world.run(2)
    home.silent = True
    world.run(310, step=5)
    world.add("two")
    world.run(6)
    home.silent = home.deaf = False
    world.run(20)
    assert not home.engines
    assert len(world.engines()) == 1


@pytest.mark.parametrize("forgets", [False, True])
def test_a_restarted_control_plane_adopts_and_places_nothing_new(world: World, forgets: bool) -> None:
    make_model(min=2, max=2)
    world.add("one")
    world.add("two")
    world.run(8)
    before = {engine.pid for engine in world.engines()}
    if forgets:
        Replica.objects.all().delete()
        Command.objects.all().delete()
    world.restart_control_plane()
    world.run(2)
    world.agents["one"].connect()
    world.run(1)
    world.agents["two"].connect()
    world.run(30)
    assert {engine.pid for engine in world.engines()} == before
    assert len(world.ready("smollm2")) == 2
    assert world.starts == 2


def test_after_a_restart_placing_waits_for_nodes_but_not_for_ever(world: World) -> None:
    make_model()
    world.add("one")
    world.add("gone", connect=False)
    world.restart_control_plane()
    world.agents["one"].connect()
    world.run(3)
    assert world.starts == 0
    world.run(6)
    assert world.starts == 1


def test_after_a_restart_placing_does_not_wait_once_all_have_registered(world: World) -> None:
    make_model()
    world.add("one")
    world.restart_control_plane()
    world.agents["one"].connect()
    world.run(1)
    assert world.starts == 1


def test_a_restarted_worker_need_not_wait_for_streams_that_go_on(world: World) -> None:
    make_model()
    world.add("one")
    world.now += timedelta(seconds=10)
    world.since = world.now
    world.run(1)  # with a heartbeat in it
    assert world.starts == 1


def test_a_register_from_just_before_the_lead_was_taken_counts(world: World) -> None:
    make_model()
    world.add("one").silent = True
    world.now += timedelta(seconds=1)
    world.since = world.now
    world.reconcile()
    assert world.starts == 1


def test_a_long_pause_of_the_control_plane_loses_no_node(world: World) -> None:
    make_model()
    world.add("one")
    world.run(6)
    world.now += timedelta(hours=1)
    world.since = world.now
    world.run(10)
    assert Node.objects.get().state == "ready"
    assert world.starts == 1


def test_a_store_that_forgot_its_replicas_is_rebuilt_from_the_register(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    kept = Replica.objects.values("name", "model", "profile", "profile_digest", "engine", "weight", "state").get()
    shard = Shard.objects.values("rank", "node", "cores", "state", "port", "pid").get()
    Replica.objects.all().delete()
    agent.connect()
    assert Replica.objects.values(*kept).get() == kept
    assert Shard.objects.values(*shard).get() == shard
    assert world.ready("smollm2")


def test_a_heartbeat_about_an_unknown_engine_asks_for_a_register(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    Replica.objects.all().delete()
    assert agent.beat() == "register again"
    assert world.ready("smollm2")


def test_a_machine_that_rebooted_gets_its_replica_again(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    agent.engines.clear()
    agent.connect()
    assert Replica.objects.get().reason == "node one no longer runs it"
    world.run(4)
    assert not Backoff.objects.exists()
    assert len(world.ready("smollm2")) == 1
    assert world.starts == 2


def test_a_command_that_was_lost_is_sent_again_and_applied_once(world: World) -> None:
    make_model()
    agent = world.add("one")
    agent.deaf = True
    world.run(3)
    assert Command.objects.get().acknowledged_at is None
    agent.deaf, agent.mute_acks = False, True
    world.run(40)
    agent.mute_acks = False
    world.run(15)
    assert agent.applied == [Command.objects.get().pk]
    assert Command.objects.get().ok is True
    assert world.starts == 1


def test_a_new_stream_gets_what_the_old_one_left_unanswered(world: World) -> None:
    make_model()
    agent = world.add("one")
    agent.deaf = True
    world.run(2)
    agent.deaf = False
    agent.connect()
    world.run(1)
    assert len(agent.engines) == 1


def test_a_start_that_the_agent_refuses_fails_the_replica(world: World) -> None:
    make_model()
    agent = world.add("one")
    agent.deaf = True
    world.run(2)
    command = Command.objects.get()
    refusal = protocol.Ack(id=command.pk, ok=False, error="the weights are not there")
    actions.acknowledge(node="one", ack=refusal, now=world.now)
    world.reconcile()
    assert Backoff.objects.get().reason == "the weights are not there"


def test_a_start_that_takes_too_long_is_given_up(world: World) -> None:
    make_model(profiles=({"startup_timeout_s": 30},))
    agent = world.add("one")
    agent.deaf = True
    world.run(35)
    assert Backoff.objects.get().reason.startswith("still starting after 30 s")


def test_a_model_that_left_the_catalog_is_drained_and_stopped(world: World) -> None:
    make_model()
    world.add("one")
    world.run(6)
    catalog.Model.objects.all().delete()
    world.run(1)
    assert Replica.objects.get().wanted == "drain"
    assert not world.ready("smollm2")
    assert world.engines()  # how busy it is is not known, and that is not idle
    world.run(65, step=5)
    assert not world.engines()
    assert not Replica.objects.exists()


def report_load(world: World, in_flight: int) -> None:
    for name in Replica.objects.values_list("name", flat=True):
        ReplicaLoad.objects.update_or_create(
            gateway="g", replica=name, defaults={"in_flight": in_flight, "at": world.now}
        )


@pytest.mark.parametrize(("in_flight", "stops"), [(0, True), (1, False)])
def test_a_drain_ends_when_no_gateway_has_a_request_there(world: World, in_flight: int, stops: bool) -> None:
    make_model()
    world.add("one")
    world.run(6)
    world.loads = lambda: report_load(world, in_flight)
    catalog.Model.objects.update(scaling_min=0, scaling_max=0)
    world.run(10)
    assert bool(world.engines()) is not stops


def test_fewer_wanted_drains_the_newest(world: World) -> None:
    make_model(min=2, max=2)
    world.add("one")
    world.add("two")
    world.run(8)
    oldest = Replica.objects.order_by("made_at", "name")[0]
    catalog.Model.objects.update(scaling_min=1, scaling_max=1)
    world.loads = lambda: report_load(world, 0)
    world.run(10)
    assert len(world.ready("smollm2")) == 1
    assert oldest.made_at == Replica.objects.get().made_at


def test_a_changed_profile_rolls_new_first_where_there_is_room(world: World) -> None:
    make_model(min=2, max=2)
    for name in ("one", "two", "three"):
        world.add(name)
    world.run(10)
    old = {engine.pid for engine in world.engines()}
    catalog.Profile.objects.update(args=["--new"])
    world.loads = lambda: report_load(world, 0)
    least = 2
    for _ in range(30):
        world.run(1)
        least = min(least, len(world.ready("smollm2")))
    assert least == 2
    assert not old & {engine.pid for engine in world.engines()}
    assert [engine.spec.args for engine in world.engines()] == [("--new",)] * 2


def test_a_changed_profile_swaps_where_there_is_no_room_for_both(world: World) -> None:
    make_model(min=2, max=2, profiles=({"reserved_cores": 6},))
    world.add("one")
    world.add("two")
    world.run(10)
    catalog.Profile.objects.update(args=["--new"])
    world.loads = lambda: report_load(world, 0)
    least = 2
    for _ in range(30):
        world.run(1)
        least = min(least, len(world.ready("smollm2")))
    assert least == 1  # one at a time
    assert [engine.spec.args for engine in world.engines()] == [("--new",)] * 2


def test_a_profile_that_changed_for_the_worse_takes_nothing_down(world: World) -> None:
    make_model()
    world.add("one", cores=32)
    world.add("two", cores=32)
    world.run(6)
    [good] = world.ready("smollm2")
    catalog.Profile.objects.update(args=["--typo"])
    for agent in world.agents.values():
        agent.broken = "unknown argument --typo"
    world.run(60, step=3)
    assert world.ready("smollm2") == [good]


def test_a_drained_node_is_emptied_and_gets_nothing_new(world: World) -> None:
    make_model()
    world.add("one")
    world.add("two")
    world.run(6)
    home = Shard.objects.get().node
    assert actions.drain_node(node=home, actor=SYSTEM)
    world.loads = lambda: report_load(world, 0)
    world.run(20)
    assert Shard.objects.get().node != home
    assert len(world.engines()) == 1


def test_the_only_node_is_drained_all_the_same(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    actions.drain_node(node=agent.node, actor=SYSTEM)
    world.loads = lambda: report_load(world, 0)
    world.run(10)
    assert not world.engines()
    assert actions.uncordon_node(node=agent.node, actor=SYSTEM)
    world.run(6)
    assert world.ready("smollm2")


def test_a_removed_nodes_replicas_are_forgotten_and_rebuilt(world: World) -> None:
    make_model()
    world.add("one")
    world.add("two")
    world.run(6)
    home = Shard.objects.get().node
    with pytest.raises(actions.NodeInUse, match="drain it"):
        actions.remove_node(node=home, actor=SYSTEM)
    name = home.name
    actions.remove_node(node=home, actor=SYSTEM, force=True)
    assert world.agents[name].beat() == "replaced"
    world.agents[name].silent = True
    world.run(6)
    assert Shard.objects.get().node_id != name
    assert AuditEntry.objects.filter(action="remove node", target=name).exists()


def test_an_on_demand_model_starts_when_it_is_asked_for(world: World) -> None:
    make_model(min=0, max=1)
    world.add("one")
    world.run(5)
    assert not world.engines()
    ModelStatus.objects.update_or_create(model="smollm2", defaults={"demand_at": world.now})
    world.run(6)
    assert world.ready("smollm2")


def test_another_machine_with_the_same_token_is_refused_until_the_first_is_lost(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    agent.machine_id = "another"
    connection = agent.connection
    refused = agent.connect()
    assert isinstance(refused, protocol.Refused)
    assert "machine machine-one, and machine another" in refused.reason
    assert world.told()[-1] == refused.reason[:1].upper() + refused.reason[1:]
    assert Node.objects.get().connection == connection
    agent.silent = True
    world.run(310, step=5)
    assert isinstance(agent.connect(), protocol.Welcome)


def test_a_second_stream_of_the_same_machine_replaces_the_first(world: World) -> None:
    agent = world.add("one")
    first = agent.connection
    agent.connect()
    agent.connection = first
    assert agent.beat() == "replaced"


def test_a_stop_that_is_never_confirmed_does_not_hold_its_place_for_ever(world: World) -> None:
    make_model()
    agent = world.add("one")
    world.run(6)
    agent.deaf = True
    catalog.Model.objects.update(scaling_min=0, scaling_max=0)
    world.run(200, step=5)
    assert world.ready("smollm2") == []
    assert Command.objects.filter(acknowledged_at=None, body__type="stop_shard").exists()
    agent.deaf = False
    world.run(80, step=5)
    assert not world.engines()
