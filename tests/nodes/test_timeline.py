"""Every decision is a line on the timelines of its model, its replica and its node (ND-48)."""

from __future__ import annotations

import pytest
from django.utils import timezone

from agent import protocol
from nodes import actions, identity, keeping
from nodes.models import Backoff, Command, Event, Node, Replica
from tenants.audit import Actor
from tenants.models import AuditEntry
from tests.factories import make_model, make_node, make_replica
from tests.worlds import World

pytestmark = pytest.mark.django_db
OPS = Actor(name="root", via="cli")


def told(**about: str) -> set[str]:
    return set(Event.objects.filter(**about).values_list("kind", flat=True))


def test_the_life_of_a_replica_is_on_all_three_timelines() -> None:
    world = World()
    model = make_model()
    world.add("one")
    world.run(10)
    [name] = world.ready("smollm2")
    model.delete()
    world.run(90)
    assert not Replica.objects.exists()
    life = {"start", "loading", "ready", "drain", "stop", "stopped", "gone"}
    for about in ({"model": "smollm2"}, {"replica": name}, {"node": "one"}):
        assert life <= told(**about), about
    assert not Event.objects.exclude(replica="").filter(node="").exists()
    assert not Event.objects.exclude(replica="").filter(model="").exists()


def test_a_failure_its_backoff_and_its_end_are_said() -> None:
    world = World()
    make_model()
    agent = world.add("one")
    agent.broken = "no memory"
    world.run(10)
    assert Backoff.objects.exists()
    agent.broken = ""
    world.run(600, step=5)
    assert {"failed", "backoff", "recovered", "ready"} <= told(model="smollm2")
    assert {"failed", "backoff"} <= told(node="one")


def test_the_silence_of_a_node_is_said_and_what_it_moved() -> None:
    world = World()
    make_model()
    one = world.add("one")
    world.run(10)
    [name] = world.ready("smollm2")
    one.silent = True
    world.run(400, step=5)
    assert {"unreachable", "lost", "gone"} <= told(node="one")
    assert "gone" in told(replica=name)
    assert "unplaced" in told(model="smollm2")
    one.silent = False
    one.connect()
    assert "ready" in told(node="one")


def test_a_shard_that_is_told_to_stop_once_more_is_said() -> None:
    replica = make_replica("r", node=make_node("one"), wanted="stop")
    spec = protocol.ShardSpec(
        replica="r", model="smollm2", profile="cpu", profile_digest="d", engine="llamacpp", source="x"
    )
    running = protocol.Running(spec=spec, status=protocol.ShardState(replica="r", state="ready", port=9000))
    register = protocol.Register(
        node="one", agent_version="1", machine_id=Node.objects.get().machine_id, address="127.0.0.1",
        inventory=protocol.Inventory(hostname="h"), shards=(running,),
    )  # fmt: skip
    for _ in range(2):
        actions.register_node(node=Node.objects.get(), register=register, connection="c", now=timezone.now())
    assert Command.objects.count() == 1
    event = Event.objects.get(kind="stop")
    assert (event.model, event.replica, event.node) == (replica.model, "r", "one")
    assert event.text == "Replica r still runs on node one, which is told again to stop it"


def test_whatever_people_do_to_a_node_says_who_and_is_audited() -> None:
    node, _ = actions.make_node(name="one", actor=OPS)
    actions.renew_join_token(node=node, actor=OPS)
    identity.admit_certificate(name="one", serial="1", expires_at=timezone.now(), actor=OPS)
    identity.revoke_certificates(node=node, actor=OPS)
    actions.cordon_node(node=node, actor=OPS)
    actions.drain_node(node=node, actor=OPS)
    actions.uncordon_node(node=node, actor=OPS)
    keeping.label_node(node=node, change={"a": "b"}, actor=OPS)
    keeping.reserve_cores(node=node, cores=1, actor=OPS)
    keeping.disable_engines(node=node, engines=["vllm"], actor=OPS)
    keeping.fetch_ahead(node=node, source="/x", actor=OPS)
    keeping.install_ahead(node=node, engine="vllm", actor=OPS)
    actions.remove_node(node=node, actor=OPS)
    events = list(Event.objects.filter(node="one").order_by("pk").values_list("text", flat=True))
    audited = AuditEntry.objects.filter(target="one", actor_name="root", via="cli")
    assert len(events) == audited.count() == 13
    assert [text for text in events if "root" not in text] == []
