"""What people do to nodes leaves a row each; what the store is told twice it does once."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from celery import Celery
from django.db import OperationalError
from django.utils import timezone

from agent import protocol
from llmgw.core import lease
from llmgw.core.models import Lease, Revision, Secret
from nodes import actions, commands, identity, passes, poke, reconcile, snapshot, tasks
from nodes.engine_keys import SECRET_NAME, engine_key
from nodes.models import Command, Event, Node, Replica, Shard
from tenants.audit import SYSTEM
from tenants.models import AuditEntry
from tests.factories import make_model, make_node, make_replica, sealed

pytestmark = pytest.mark.django_db

lonely = Celery(broker="redis://127.0.0.1:1/0", set_as_current=False)
"""Nobody listens on port 1."""


def audited() -> list[tuple[str, str]]:
    return list(AuditEntry.objects.order_by("pk").values_list("action", "target"))


def test_a_new_node_is_proven_by_its_token_alone() -> None:
    node, token = actions.make_node(name="one", actor=SYSTEM)
    assert node.state == "joining"
    assert identity.node_of_token(token) == node
    assert token not in str(list(Node.objects.values()))
    assert audited() == [("make node", "one")]


@pytest.mark.parametrize("token", ["", "nt-wrong", "sk-" + "x" * 43, "nt-" + "x" * 500, "nt-\udcff"])
def test_any_other_token_proves_nothing(token: str) -> None:
    actions.make_node(name="one", actor=SYSTEM)
    assert identity.node_of_token(token) is None


def test_a_renewed_token_voids_the_old_one() -> None:
    node, old = actions.make_node(name="one", actor=SYSTEM)
    new = actions.renew_join_token(node=node, actor=SYSTEM)
    assert identity.node_of_token(old) is None
    assert identity.node_of_token(new) == node


def test_cordon_drain_and_uncordon_say_who_and_do_nothing_twice() -> None:
    node = make_node("one")
    assert actions.cordon_node(node=node, actor=SYSTEM)
    assert not actions.cordon_node(node=node, actor=SYSTEM)
    assert actions.drain_node(node=node, actor=SYSTEM)
    assert not actions.drain_node(node=node, actor=SYSTEM)
    assert actions.uncordon_node(node=node, actor=SYSTEM)
    assert not actions.uncordon_node(node=node, actor=SYSTEM)
    assert audited() == [("cordon node", "one"), ("drain node", "one"), ("uncordon node", "one")]
    assert Event.objects.filter(node="one").count() == 3


def test_a_lost_node_is_removed_and_its_token_with_it() -> None:
    node, token = actions.make_node(name="one", actor=SYSTEM)
    Node.objects.update(state="lost")
    actions.remove_node(node=node, actor=SYSTEM)
    assert identity.node_of_token(token) is None
    assert audited()[-1] == ("remove node", "one")


def test_a_heartbeat_of_a_lost_node_asks_for_a_register() -> None:
    node = make_node("one", state="lost", connection="c")
    heard = actions.heartbeat(node=node.name, connection="c", load=protocol.NodeLoad(), changed=(), now=timezone.now())
    assert heard == "register again"


def test_a_stream_that_was_replaced_changes_nothing() -> None:
    replica = make_replica(node=make_node("one", connection="new"))
    report = protocol.ShardStatus(status=protocol.ShardState(replica=replica.name, state="failed"))
    heard = actions.shard_status(node="one", connection="old", report=report, now=timezone.now())
    assert heard == "replaced"
    assert Replica.objects.get().state == "ready"
    actions.leave(node="one", connection="old")
    assert Node.objects.get().connection == "new"


def test_a_port_that_moved_reaches_the_gateways() -> None:
    replica = make_replica(node=make_node("one", connection="c"), port=9000)
    before = Revision.current()
    status = protocol.ShardState(replica=replica.name, state="ready", port=9000)
    actions.shard_status(node="one", connection="c", report=protocol.ShardStatus(status=status), now=timezone.now())
    assert Revision.current() == before
    status = protocol.ShardState(replica=replica.name, state="ready", port=9001)
    actions.shard_status(node="one", connection="c", report=protocol.ShardStatus(status=status), now=timezone.now())
    assert Revision.current() > before
    assert Replica.objects.endpoints()[0].port == 9001


def test_the_end_of_an_unknown_shard_is_no_reason_to_register() -> None:
    make_node("one", connection="c")
    status = protocol.ShardState(replica="unknown", state="stopped")
    report = protocol.ShardStatus(status=status)
    assert actions.shard_status(node="one", connection="c", report=report, now=timezone.now()) == "ok"


def test_progress_and_a_late_tail_are_kept() -> None:
    replica = make_replica(node=make_node("one", connection="c"), state="fetching")
    status = protocol.ShardState(
        replica=replica.name, state="fetching", progress=protocol.Progress(done_bytes=1, total_bytes=4)
    )
    now = timezone.now()
    actions.shard_status(node="one", connection="c", report=protocol.ShardStatus(status=status), now=now)
    assert replica.shards.get().progress == {"done_bytes": 1, "total_bytes": 4}
    failed = protocol.ShardState(replica=replica.name, state="failed", reason="no")
    actions.shard_status(node="one", connection="c", report=protocol.ShardStatus(status=failed), now=now)
    report = protocol.ShardStatus(status=failed, tail="x" * 20000 + "last")
    actions.shard_status(node="one", connection="c", report=report, now=now)
    assert len(Replica.objects.get().tail) == protocol.TAIL_BYTES
    assert Replica.objects.get().tail.endswith("last")


def register(node: Node, *shards: protocol.Running) -> None:
    actions.register_node(
        node=node,
        register=protocol.Register(
            node=node.name,
            agent_version="1",
            machine_id=node.machine_id,
            address="127.0.0.1",
            inventory=protocol.Inventory(hostname="h"),
            shards=shards,
        ),
        connection="c",
        now=timezone.now(),
    )


def running(replica: str, state: protocol.State = "ready", rank: int = 0, port: int = 9000) -> protocol.Running:
    spec = protocol.ShardSpec(
        replica=replica,
        rank=rank,
        model="smollm2",
        profile="cpu",
        profile_digest="d" * 64,
        engine="llamacpp",
        source="x",
    )
    return protocol.Running(spec=spec, status=protocol.ShardState(replica=replica, rank=rank, state=state, port=port))


def test_what_was_to_stop_and_still_runs_is_told_once_more() -> None:
    node = make_node("one")
    replica = make_replica(node=node, wanted="stop")
    register(node, running(replica.name))
    register(node, running(replica.name))
    assert [row.body for row in Command.objects.all()] == [{"type": "stop_shard", "replica": replica.name}]


def test_what_was_to_stop_and_no_longer_runs_has_stopped() -> None:
    node = make_node("one")
    replica = make_replica(node=node, wanted="stop")
    register(node)
    assert replica.shards.get().state == "stopped"


def test_a_replica_that_another_node_has_is_stopped_here() -> None:
    replica = make_replica(node=make_node("one"))
    two = make_node("two")
    register(two, running(replica.name))
    assert Command.objects.get().node == two
    assert replica.shards.get().node_id == "one"


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("state", ["fetching", "loading", "ready", "failed", "stopping", "stopped"])
@pytest.mark.parametrize("by", ["register", "status", "heartbeat"])
def test_a_node_changes_and_adds_nothing_of_a_replica_that_another_node_has(
    by: str, state: protocol.State, rank: int
) -> None:
    replica = make_replica(node=make_node("one"))
    two = make_node("two", connection="c")
    before = (list(Shard.objects.values()), list(Replica.objects.values()), Revision.current())
    now = timezone.now()
    told = running(replica.name, state, rank=rank, port=1234)
    for _ in range(3):
        if by == "register":
            register(two, told)
        elif by == "status":
            report = protocol.ShardStatus(status=told.status, tail="lies")
            assert actions.shard_status(node="two", connection="c", report=report, now=now) == "ok"
        else:
            heard = actions.heartbeat(
                node="two", connection="c", load=protocol.NodeLoad(), changed=(told.status,), now=now
            )
            assert heard == "ok"
    rows = (list(Shard.objects.values()), list(Replica.objects.values()))
    assert rows == before[:2]
    assert by == "register" or Revision.current() == before[2]
    events = list(Event.objects.filter(kind="refused").values_list("node", "replica"))
    runs = state in ("fetching", "loading", "ready")
    assert events == ([("two", replica.name)] if runs or state == "failed" else [])
    stops = [{"type": "stop_shard", "replica": replica.name} | ({"rank": rank} if rank else {})] if runs else []
    assert [row.body for row in Command.objects.filter(node="two")] == stops


def test_a_refused_report_is_said_in_words() -> None:
    replica = make_replica("r", node=make_node("one"))
    two = make_node("two")
    register(two, running(replica.name))
    assert Event.objects.get(kind="refused").text == (
        "Node two reports rank 0 of replica r, which is node one's; it is not listened to, and told to stop it"
    )
    Event.objects.all().delete()
    report = protocol.ShardStatus(status=protocol.ShardState(replica="r", rank=3, state="failed"))
    actions.shard_status(node="two", connection="c", report=report, now=timezone.now())
    assert Event.objects.get().text == (
        "Node two reports rank 3 of replica r, which has no rank 3 there; it is not listened to"
    )


def test_a_node_brings_all_ranks_of_a_replica_that_nobody_knows() -> None:
    node = make_node("one")
    ranks = [
        msgspec.structs.replace(each, spec=sealed("one", each.spec)) for each in (running("r"), running("r", rank=1))
    ]
    register(node, *ranks, ranks[1])
    register(node, *ranks)
    assert list(Shard.objects.order_by("rank").values_list("rank", "node", "state")) == [
        (0, "one", "ready"),
        (1, "one", "ready"),
    ]
    assert not Event.objects.filter(kind="refused").exists()
    assert not Command.objects.exists()


def test_what_ended_is_not_taken_for_running() -> None:
    node = make_node("one")
    register(node, running("a", "failed"), running("b", "stopping"))
    assert not Replica.objects.exists()
    failed = make_replica(node=node, state="failed")
    register(node)
    assert Replica.objects.get(pk=failed.pk).reason == ""


def start(replica: str = "r") -> protocol.StartShard:
    return protocol.StartShard(spec=running(replica).spec)


def test_a_stored_command_holds_no_key_and_a_sent_one_does() -> None:
    make_node("one", connection="c")
    now = timezone.now()
    row = commands.store(node="one", body=start(), now=now)
    [sent] = commands.take_due(node="one", connection="c", now=now)
    assert isinstance(sent.body, protocol.StartShard)
    key = engine_key(Secret.named(SECRET_NAME), "r")
    assert sent.body.engine_key == key
    row.refresh_from_db()
    assert key not in str(row.body)


def test_commands_go_out_in_order_once_and_only_on_the_stream_that_speaks_for_the_node() -> None:
    make_node("one", connection="c")
    now = timezone.now()
    rows = [commands.store(node="one", body=start(name), now=now) for name in "ab"]
    assert commands.take_due(node="one", connection="old", now=now) == ()
    assert [each.id for each in commands.take_due(node="one", connection="c", now=now)] == [row.pk for row in rows]
    assert commands.take_due(node="one", connection="c", now=now) == ()
    again = commands.take_due(node="one", connection="c", now=now + commands.RESEND_AFTER)
    assert len(again) == 2


def test_an_answer_counts_once_and_from_its_own_node_only() -> None:
    make_node("one")
    make_node("two")
    row = commands.store(node="one", body=start(), now=timezone.now())
    ack = protocol.Ack(id=row.pk)
    assert commands.acknowledge(node="two", ack=ack, now=timezone.now()) is None
    assert commands.acknowledge(node="one", ack=ack, now=timezone.now()) == row
    assert commands.acknowledge(node="one", ack=ack, now=timezone.now()) is None


def test_the_answer_about_a_replica_that_is_over_is_dropped_with_its_command() -> None:
    make_node("one")
    row = commands.store(node="one", body=protocol.StopShard(replica="over"), now=timezone.now())
    actions.acknowledge(node="one", ack=protocol.Ack(id=row.pk), now=timezone.now())
    assert not Command.objects.exists()
    actions.acknowledge(node="one", ack=protocol.Ack(id=row.pk), now=timezone.now())


def test_a_stop_that_the_agent_cannot_do_is_said() -> None:
    replica = make_replica(node=make_node("one"), wanted="stop")
    row = commands.store(node="one", body=protocol.StopShard(replica=replica.name), now=timezone.now())
    actions.acknowledge(node="one", ack=protocol.Ack(id=row.pk, ok=False, error="why"), now=timezone.now())
    assert Event.objects.get().text == f"Replica {replica.name} could not be stopped on node one: why"


def test_a_start_that_was_never_sent_leaves_nothing_to_stop() -> None:
    model = make_model()
    make_node("one")
    now = timezone.now()
    assert passes.run_pass(now)
    model.delete()
    assert passes.run_pass(now)
    assert not Command.objects.exists()
    assert passes.run_pass(now)
    assert not Replica.objects.exists()
    assert not passes.run_pass(now)


def test_a_quiet_pass_costs_nine_queries(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    make_model()
    for _ in range(3):
        make_node()
    now = timezone.now()
    while passes.run_pass(now):
        pass
    with django_assert_num_queries(9):
        assert not passes.run_pass(now)


def test_a_node_made_twice_at_once_is_made_once() -> None:
    actions.make_node(name="one", actor=SYSTEM)
    with pytest.raises(actions.NodeExists, match="choose another name"):
        actions.make_node(name="one", actor=SYSTEM)
    assert Node.objects.count() == 1


def test_a_placement_costs_few_queries(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    make_model()
    make_node()
    with django_assert_num_queries(23):
        assert passes.run_pass(timezone.now())


def test_a_pass_under_a_lease_that_went_to_another_changes_nothing() -> None:
    make_model()
    make_node()
    held = lease.acquire("leader", ttl_s=10, holder="a")
    Lease.objects.update(holder="b", fence=2)
    assert not passes.run_pass(timezone.now(), held=held)
    assert not Replica.objects.exists()


def test_the_task_runs_passes_until_nothing_is_left_to_do_under_the_leaders_lease() -> None:
    make_model(min=2, max=2)
    assert lease.acquire(lease.LEADER, ttl_s=60, holder="the leader, which is another process")
    for _ in range(2):
        make_node(seen_at=timezone.now() + timedelta(seconds=1))  # since then they have registered
    tasks.reconcile()
    assert Replica.objects.count() == 2
    assert Lease.objects.get().turn == 2


def test_the_task_does_nothing_while_nobody_leads() -> None:
    make_model()
    make_node()
    tasks.reconcile()
    lease.acquire(lease.LEADER, ttl_s=60, holder="a")
    lease.release(lease.LEADER, holder="a")
    tasks.reconcile()
    assert not Replica.objects.exists()


def test_a_pass_that_breaks_is_logged_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    tasks.reconcile()
    make_node()
    Node.objects.update(inventory={"gpus": "of a wrong shape"})
    lease.acquire(lease.LEADER, ttl_s=60)
    for _ in range(3):
        tasks.reconcile()
    assert caplog.text.count("A pass failed; the next one runs within 3 s") == 1
    assert caplog.text.count("Traceback") == 1


def test_a_store_that_no_pass_can_use_is_said_in_one_line_and_in_one_when_it_is_over(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bool:
        raise OperationalError("database or disk is full")

    tasks.reconcile()
    caplog.set_level("INFO")
    caplog.clear()  # of what an earlier failure's end has said
    monkeypatch.setattr(passes, "run_pass", fail)
    lease.acquire(lease.LEADER, ttl_s=60)
    for _ in range(3):
        tasks.reconcile()
    monkeypatch.undo()
    for _ in range(2):
        tasks.reconcile()
    assert [line for line in caplog.messages if "Pass" in line or "pass" in line] == [
        "A pass failed, as the store cannot be used (database or disk is full); the next one runs within 3 s",
        "Passes succeed again",
    ]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("speaks", [False, True])
def test_a_node_that_speaks_while_a_pass_gives_it_up_keeps_its_replicas(speaks: bool) -> None:
    now = timezone.now()
    make_model(min=0, max=1)
    node = make_node("one", seen_at=now - timedelta(hours=1), connection="c")
    make_replica(node=node)
    plan = reconcile.plan(snapshot.take(now), now)
    if speaks:
        actions.heartbeat(node="one", connection="c", load=protocol.NodeLoad(), changed=(), now=now)
    assert passes.apply(plan, now) is not speaks
    assert Replica.objects.exists() is speaks


def test_a_broker_that_is_away_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, django_capture_on_commit_callbacks
) -> None:  # type: ignore[no-untyped-def]
    for app in (poke.APP, "tests.nodes.test_actions.lonely"):
        monkeypatch.setattr(poke, "APP", app)
        with django_capture_on_commit_callbacks(execute=True):
            poke.poke()
    assert "passes run every 3 s meanwhile" in caplog.text


def test_a_poke_puts_a_pass_into_the_queue_on_commit(django_capture_on_commit_callbacks) -> None:  # type: ignore[no-untyped-def]
    from llmgw.celery import app

    with django_capture_on_commit_callbacks(execute=True) as callbacks:
        poke.poke()
    assert len(callbacks) == 1
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("celery").get(timeout=30)
        message.ack()
        assert message.headers["task"] == "nodes.tasks.reconcile"
