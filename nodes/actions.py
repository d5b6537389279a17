"""What agents report and what people do to nodes, written down: one transaction each, and a ring where it matters.

Reports are the truth about what runs: replica rows follow them (ND-2, ND-45). What people do leaves an audit row.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Literal

import msgspec
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from agent import protocol
from llmgw.core import doorbell, lease
from nodes import choosing, commands, contest, identity, intake, labels, reports, timeline
from nodes.models import ModelStatus, Node, NodeState, Shard
from nodes.poke import poke
from tenants import audit
from tenants.audit import Actor
from tenants.keys import new_secret

Heard = Literal["ok", "replaced", "register again"]
"""The stream that spoke goes on, or another one speaks for its node now, or its agent must tell everything again."""


@transaction.atomic
def register_node(
    *,
    node: Node,
    register: protocol.Register,
    connection: str,
    now: datetime,
    proof: identity.Kind = "token",
    peer: str = "",
) -> protocol.Welcome | protocol.Refused:
    """The first message of a stream: from now on `connection` speaks for the node, and its rows are rebuilt. `peer`:
    the address that the stream comes from."""
    if register.node != node.name:
        return protocol.Refused(
            reason=f"this {proof} is node {node.name}'s, but the agent says it is {register.node}; "
            f"set the node's name to {node.name}, or use the {proof} of {register.node}"
        )
    node = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
    known = node.machine_id and node.state not in (NodeState.JOINING, NodeState.LOST)
    if known and node.machine_id != register.machine_id:
        reason = (
            f"node {node.name} is machine {node.machine_id}, and machine {register.machine_id} uses its {proof}; "
            f"give this machine a node of its own, or wait until the other one is lost, or remove the node"
        )
        timeline.note("refused", reason, at=now, node=node.name)
        return protocol.Refused(reason=reason, retry_after_s=60)
    if refused := _contested(node, register, peer or register.address, proof, now):
        return refused
    before = node.state
    node.state = NodeState.READY
    node.machine_id = register.machine_id
    node.address = node.pinned_address or register.address
    node.told_labels = register.labels
    node.labels = labels.effective(register.labels, node.set_labels)
    node.agent_version = register.agent_version
    node.inventory = msgspec.to_builtins(register.inventory)
    node.connection = connection
    node.registered_at = node.last_seen_at = now
    choosing.agree(node, register.inventory.engine_builds, now)
    node.save()
    if before != NodeState.READY:
        text = f"node {node.name} has joined" if before == NodeState.JOINING else f"node {node.name} is back"
        timeline.note("ready", text, at=now, node=node.name)
    commands.send_again(node=node.name)
    reports.rebuild(node.name, register.shards, now)
    doorbell.table_changed()
    doorbell.ring_on_commit(doorbell.commands_for(node.name))  # a stream that this one replaces notices
    poke()
    return protocol.Welcome(node=node.name, heartbeat_s=settings.LLMGW.nodes.heartbeat_s)


def _contested(
    node: Node, register: protocol.Register, peer: str, proof: identity.Kind, now: datetime
) -> protocol.Refused | None:
    """Why an agent may not speak for the node that a copy of its machine speaks for; None when it may."""
    whence = f"{intake.shown(register.inventory.hostname)[:80]} at {peer[:80]}"
    comer = contest.Turn(instance=register.instance or peer, whence=whence, at=now)
    past = msgspec.convert(node.turns, tuple[contest.Turn, ...])
    quiet = timedelta(seconds=settings.LLMGW.nodes.unreachable_after_s)
    heard = bool(node.connection) and node.last_seen_at is not None and now - node.last_seen_at < quiet
    judged = contest.judge(past, comer, spoken_for=heard)
    node.turns = msgspec.to_builtins(judged.turns)
    if isinstance(judged, contest.Taken):
        return None
    known = node.contested_at is not None and now - node.contested_at < contest.WITHIN
    node.contested, node.contested_at = f"{judged.kept.whence}, which is kept, and {whence}", now
    node.save(update_fields=["turns", "contested", "contested_at"])
    reason = (
        f"two agents take turns to speak for node {node.name}: {node.contested}. If one machine is a copy of the other,"
        f" give the copy a node, a {proof} and a machine id of its own; if both are one machine, stop one of its agents"
    )
    if not known:
        timeline.note("refused", reason, at=now, node=node.name)
    return protocol.Refused(reason=reason, retry_after_s=60)


@transaction.atomic
def heartbeat(
    *,
    node: str,
    connection: str,
    load: protocol.NodeLoad,
    changed: Iterable[protocol.ShardState],
    now: datetime,
    inventory: protocol.Inventory | None = None,
    errands: tuple[protocol.Errand, ...] = (),
    ended: Iterable[tuple[str, int]] = (),
) -> Heard:
    """A sign of life. `changed`: the shards whose state differs from what this stream last told; `inventory`: what the
    machine holds, where that is news; `errands`: fetches and installations that commands asked for; `ended`: shards
    (replica and rank) whose stop this stream's agent has answered, and that it does not run any more."""
    rows = Node.objects.filter(pk=node, connection=connection)
    beat = {"last_seen_at": now, "load": msgspec.to_builtins(load)}
    if errands:
        reports.note_ended(node, errands, now)
        beat["errands"] = msgspec.to_builtins(errands)
    if inventory is not None:
        beat["inventory"] = msgspec.to_builtins(inventory)
    if not rows.filter(state=NodeState.READY).update(**beat):
        if not rows.filter(state=NodeState.UNREACHABLE).update(**beat, state=NodeState.READY):
            return "register again" if rows.exists() else "replaced"
        timeline.note("ready", f"node {node} is back", at=now, node=node)
        poke()
    in_order = sorted(changed, key=lambda status: status.replica)
    known = [reports.observe(node, status, "", now) for status in in_order]
    reports.not_listed(node, ended, now)
    return "ok" if all(known) else "register again"


@transaction.atomic
def shard_status(*, node: str, connection: str, report: protocol.ShardStatus, now: datetime) -> Heard:
    """A shard went from one state to another."""
    rows = Node.objects.filter(pk=node, connection=connection)
    if not rows.select_for_update(no_key=True).values_list("pk").first():  # until then no other stream registers
        return "replaced"
    return "ok" if reports.observe(node, report.status, report.tail, now) else "register again"


@transaction.atomic
def acknowledge(*, node: str, ack: protocol.Ack, now: datetime) -> None:
    """An agent has done, or refused, what a command says."""
    row = commands.acknowledge(node=node, ack=ack, now=now)
    if row is None:
        return
    if not row.replica:
        if not ack.ok:
            timeline.note("refused", f"node {node} does not do as asked: {ack.error}", at=now, node=node)
        return
    shard = Shard.objects.filter(replica=row.replica, rank=commands.rank_of(row), node=node).first()
    if shard is None:
        row.delete()  # the replica is over, so nobody asks for the answer
        return
    if row.body["type"] == "start_shard" and not ack.ok:
        refused = protocol.ShardState(replica=row.replica, rank=shard.rank, state="failed", reason=ack.error)
        reports.observe(node, refused, "", now)
    if row.body["type"] == "stop_shard":
        reports.stop_answered(shard, ack, now)


def leave(*, node: str, connection: str) -> None:
    """The stream ended. Only the clock says what that means for the node (ND-10)."""
    Node.objects.filter(pk=node, connection=connection).update(connection="")


class NodeExists(Exception):
    """There is a node of that name, perhaps since this very moment."""


@transaction.atomic
def make_node(*, name: str, actor: Actor) -> tuple[Node, str]:
    """A node that may join, and its join token, which is nowhere else and cannot be shown again."""
    secret = new_secret("nt")
    node, made = Node.objects.get_or_create(name=name, defaults={"token_digest": secret.digest})
    if not made:
        raise NodeExists(
            f"There is a node {name} already; choose another name, or renew its token: "
            f"llmgw ctl node-token {name} --renew"
        )
    audit.record(actor, "make node", name)
    timeline.note("made", f"node {name} may join, as {actor.name} decided", at=timezone.now(), node=name)
    return node, secret.text


@transaction.atomic
def renew_join_token(*, node: Node, actor: Actor) -> str:
    """A new join token for a node; the old one is void from its next connection on."""
    secret = new_secret("nt")
    Node.objects.filter(pk=node.pk).update(token_digest=secret.digest)
    audit.record(actor, "renew join token", node.name)
    text = f"the join token of node {node.name} was renewed by {actor.name}; the old one is void"
    timeline.note("renew join token", text, at=timezone.now(), node=node.name)
    return secret.text


def cordon_node(*, node: Node, actor: Actor) -> bool:
    """Nothing new goes there; what runs stays. False when it was so already."""
    text = f"node {node.name} was cordoned by {actor.name}: it gets no new replicas"
    return _mark(node, actor, "cordon node", text, was={"cordoned_at": None}, to={"cordoned_at": timezone.now()})


@transaction.atomic
def uncordon_node(*, node: Node, actor: Actor) -> bool:
    """Back in use, whether it was cordoned or being drained. False when it was in use."""
    rows = Node.objects.filter(pk=node.pk).exclude(cordoned_at=None, draining_at=None)
    if not rows.update(cordoned_at=None, draining_at=None):
        return False
    audit.record(actor, "uncordon node", node.name)
    text = f"node {node.name} was uncordoned by {actor.name}"
    timeline.note("uncordon node", text, at=timezone.now(), node=node.name)
    poke()
    return True


def drain_node(*, node: Node, actor: Actor) -> bool:
    """Its replicas move, new ones first where there is room. False when it was so already."""
    text = f"node {node.name} is drained for {actor.name}: its replicas move"
    return _mark(node, actor, "drain node", text, was={"draining_at": None}, to={"draining_at": timezone.now()})


class NodeInUse(Exception):
    """Removing a node that still speaks would leave its engines running with nobody to stop them."""


@transaction.atomic
def remove_node(*, node: Node, actor: Actor, force: bool = False) -> None:
    """Forget a lost node, or one that never joined, at once, with its token and certificates; another by `force`."""
    lease.overtake(lease.LEADER)
    node = Node.objects.select_for_update().get(pk=node.pk)
    if node.state not in (NodeState.LOST, NodeState.JOINING) and not force:
        raise NodeInUse(f"node {node.name} is {node.state}; drain it and stop its agent first, or force its removal")
    Node.objects.filter(pk=node.pk).delete()
    audit.record(actor, "remove node", node.name, before={"state": node.state})
    timeline.note("remove node", f"node {node.name} was removed by {actor.name}", at=timezone.now(), node=node.name)
    doorbell.table_changed()
    doorbell.ring_on_commit(doorbell.commands_for(node.name))  # its stream, if it has one, ends now
    poke()


@transaction.atomic
def _mark(node: Node, actor: Actor, action: str, text: str, *, was: dict[str, object], to: dict[str, object]) -> bool:
    lease.overtake(lease.LEADER)
    if not Node.objects.filter(pk=node.pk, **was).update(**to):
        return False
    audit.record(actor, action, node.name)
    timeline.note(action, text, at=timezone.now(), node=node.name)
    poke()
    return True


# --- on demand -------------------------------------------------------------------------------------------------------
def note_demand(models: Iterable[str], *, cold: bool, now: datetime) -> None:
    """Somebody asks for these on-demand models now, which starts them and keeps them. `cold`: one has no replica, so
    a pass is asked for at once."""
    with transaction.atomic():
        ModelStatus.objects.bulk_create(
            [ModelStatus(model=model, demand_at=now) for model in models],
            update_conflicts=True,
            unique_fields=["model"],
            update_fields=["demand_at"],
        )
        if cold:
            poke()
