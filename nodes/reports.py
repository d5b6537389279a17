"""Makes replica rows follow what agents report about their shards. Called inside the transactions of nodes.actions."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta

import msgspec
from django.db import connection
from django.db.models import Q

from agent import protocol
from catalog.models import Profile
from llmgw.core import doorbell
from llmgw.core.models import Secret
from nodes import commands, timeline
from nodes.engine_keys import SECRET_NAME, is_sealed
from nodes.models import Event, Node, Replica, Shard, Wanted
from nodes.names import some
from nodes.poke import poke
from nodes.state import replica_state

log = logging.getLogger(__name__)

OVER = (*protocol.ENDED, "stopping")
"""States of a shard that nobody needs to know again."""
NAMED = 4
"""How many replicas a line of the timeline names."""
NOTED_EVERY = timedelta(minutes=10)
"""How often the timeline says of a node and a replica that the one reports what is not its own."""


def observe(node: str, status: protocol.ShardState, tail: str, now: datetime) -> bool:
    """Write one shard's state down. False when no row is known for a shard that runs: its agent must register.

    A node speaks for its own shards only: what it tells of another's replica is refused, and it is told to stop it.
    """
    rows = Shard.objects.filter(replica=status.replica, rank=status.rank, node=node)
    # One at a time for each replica: what its shards add up to is written beside what one of them became.
    shard = rows.select_related("replica").select_for_update(no_key=True, of=("replica",)).first()
    if shard is None:
        model = Replica.objects.filter(pk=status.replica).values_list("model", flat=True).first()
        if model is not None:
            _refuse(node, model, status, now)
            return True
        return status.state in OVER
    moved = shard.port != status.port
    over = shard.state != status.state and status.state in protocol.ENDED
    listens = shard.rendezvous is None and status.rendezvous is not None
    shard.state, shard.port, shard.pid, shard.changed_at = status.state, status.port, status.pid, now
    shard.reason, shard.rendezvous = status.reason[:1000], status.rendezvous
    shard.progress = msgspec.to_builtins(status.progress) if status.progress else {}
    shard.save(update_fields=["state", "port", "pid", "changed_at", "reason", "progress", "rendezvous"])
    if over or listens:
        poke()
    if _follow(shard.replica, node, status.reason, tail, now) or moved:
        doorbell.table_changed()
    return True


def _follow(replica: Replica, node: str, reason: str, tail: str, now: datetime) -> bool:
    """Give the replica the state that its shards add up to; whether that is another than before."""
    state = replica_state(Shard.objects.filter(replica=replica).values_list("rank", "state"))
    changed = {"state": state, "state_at": now, "reason": reason[:1000]}
    if tail:
        changed["tail"] = tail[-protocol.TAIL_BYTES :]
    if state == "ready":
        changed["ready_at"] = now
    if not Replica.objects.filter(pk=replica.pk).exclude(state=state).update(**changed):
        late = {name: value for name, value in changed.items() if name in ("reason", "tail") and value}
        Replica.objects.filter(pk=replica.pk).update(**late)
        return False
    if state in ("ready", "failed", "stopped", "loading"):
        text = f"replica {replica.name} of {replica.model} is {state}" + (f": {reason}" if reason else "")
        timeline.note(state, text, at=now, model=replica.model, replica=replica.name, node=node)
    if state == "ready":
        poke()
    return True


def rebuild(node: str, running: Iterable[protocol.Running], now: datetime) -> None:
    """A register is the whole truth about its node: rows that we lack are made, rows of what is gone are ended.

    Rows are made for replicas that the store does not know, and for no others: a node adds nothing to those of others.
    And only for shards whose seal shows that this node was told to run them.
    """
    unasked: list[str] = []
    running = tuple(running)
    told: set[tuple[str, int]] = set()
    adopted: set[str] = set()
    take_in_order(Q(pk__in=[each.spec.replica for each in running]) | Q(shards__node=node))
    known = {(row.replica_id, row.rank): row for row in Shard.objects.filter(node=node).select_related("replica")}
    for each in running:
        spec, status = each.spec, each.status
        key = spec.replica, spec.rank
        shard, again = known.get(key), key in told
        told.add(key)
        if shard is None and status.state not in OVER:
            if is_sealed(Secret.named(SECRET_NAME), node, spec):
                shard = _adopt(node, spec, now, adopted)
            elif not Replica.objects.filter(pk=spec.replica).exists():
                unasked.append(spec.replica)
                _tell_to_stop(node, spec.replica, spec.rank, now)
                continue
        if shard and status.state not in OVER and shard.replica.wanted == Wanted.STOP:
            _stop_again(node, shard.replica, spec.rank, now)
        if shard is None or again or not _is_known(shard, status):
            observe(node, status, "", now)
        if shard:
            known[key] = shard
    for key, shard in known.items():
        if key not in told:
            _gone(node, shard, now)
    if unasked:
        _disown(node, unasked, now)


def take_in_order(which: Q) -> None:
    """Whoever writes several replicas in one transaction takes them by name first, so that no two wait for each other.
    SQLite has one writer at a time anyway."""
    if connection.features.has_select_for_update:
        names = Replica.objects.filter(which).values("pk")
        list(Replica.objects.filter(pk__in=names).order_by("pk").select_for_update(no_key=True).values_list("pk"))


def _is_known(shard: Shard, status: protocol.ShardState) -> bool:
    """The row says all of this already, as mostly when a whole fleet comes back to a control plane at once."""
    progress = msgspec.to_builtins(status.progress) if status.progress else {}
    told = status.state, status.state, status.port, status.pid, status.reason[:1000], status.rendezvous, progress
    row = shard.state, shard.replica.state, shard.port, shard.pid, shard.reason, shard.rendezvous, shard.progress
    return told == row


def _adopt(node: str, spec: protocol.ShardSpec, now: datetime, adopted: set[str]) -> Shard | None:
    """Rows for a shard that runs, if the store does not know its replica, or learned of it in this very register, or
    of a part of it from another node's."""
    replica, made = Replica.objects.get_or_create(
        name=spec.replica,
        defaults={
            "model": spec.model,
            "profile": spec.profile,
            "profile_digest": spec.profile_digest,
            "engine": spec.engine,
            "weight": spec.slots,
            "adapters": msgspec.to_builtins(spec.adapters),
            "max_loaded_adapters": spec.max_loaded_adapters,
            "wanted_at": now,
            "wanted_why": f"found running on node {node}",
            "state_at": now,
            "made_at": min(spec.made_at or now, now),
        },
    )
    if made:
        text = f"replica {replica.name} of {replica.model} was found running on node {node}, and is kept"
        timeline.note("adopted", text, at=now, model=replica.model, replica=replica.name, node=node)
        adopted.add(replica.name)
    elif replica.name not in adopted and not _lacks(replica, spec):
        return None
    return Shard.objects.create(
        replica=replica,
        rank=spec.rank,
        node_id=node,
        gpus=list(spec.gpus),
        cores=spec.cores,
        fabric=spec.fabric,
        changed_at=now,
    )


def _lacks(replica: Replica, spec: protocol.ShardSpec) -> bool:
    """The store knows other ranks of this very replica and not this one, which its profile has."""
    told = spec.model, spec.profile, spec.profile_digest
    if (replica.model, replica.profile, replica.profile_digest) != told or replica.wanted != Wanted.RUN:
        return False
    if Shard.objects.filter(replica=replica, rank=spec.rank).exists():
        return False
    return Profile.objects.filter(model__name=spec.model, name=spec.profile, nodes__gt=spec.rank).exists()


def _stop_again(node: str, replica: Replica, rank: int, now: datetime) -> None:
    """A shard that is not to run is still there."""
    if not _tell_to_stop(node, replica.name, rank, now):
        return
    text = f"replica {replica.name} still runs on node {node}, which is told again to stop it"
    timeline.note("stop", text, at=now, model=replica.model, replica=replica.name, node=node)


def _tell_to_stop(node: str, replica: str, rank: int, now: datetime) -> bool:
    """False when the agent is being told already."""
    if commands.unanswered(replica, "stop_shard").filter(node=node).exists() or commands.are_many(node):
        return False
    commands.store(node=node, body=protocol.StopShard(replica=replica, rank=rank), now=now)
    return True


def _refuse(node: str, model: str, status: protocol.ShardState, now: datetime) -> None:
    """A shard that the store knows to be elsewhere, or not at all: nothing of its replica changes."""
    if status.state in ("stopping", "stopped"):
        return  # as it was told to
    if status.state not in OVER:
        _tell_to_stop(node, status.replica, status.rank, now)
    noted = Event.objects.filter(kind="refused", replica=status.replica, node=node, at__gt=now - NOTED_EVERY)
    if noted.exists():
        return
    owner = Shard.objects.filter(replica=status.replica, rank=status.rank).values_list("node", flat=True).first()
    whose = f"is node {owner}'s" if owner else f"has no rank {status.rank} there"
    text = f"node {node} reports rank {status.rank} of replica {status.replica}, which {whose}; it is not listened to"
    if status.state not in OVER:
        text += ", and told to stop it"
    timeline.note("refused", text, at=now, model=model, replica=status.replica, node=node)


def _disown(node: str, replicas: list[str], now: datetime) -> None:
    if Event.objects.filter(kind="refused", node=node, replica="", at__gt=now - NOTED_EVERY).exists():
        return
    text = f"node {node} says that it runs {some(replicas, NAMED)}, which no control plane of this store"
    timeline.note("refused", f"{text} told it to; it is told to stop", at=now, node=node)


def _gone(node: str, shard: Shard, now: datetime) -> None:
    """The agent does not know a shard that we do: it never got the command, was to stop it, or lost it."""
    if shard.state == "waiting" or (shard.state in protocol.ENDED and shard.replica.wanted != Wanted.STOP):
        return
    if commands.unanswered(shard.replica_id, "start_shard").filter(node=node).exists():
        return  # its start is sent again
    reason = "" if shard.replica.wanted == Wanted.STOP else f"node {node} no longer runs it"
    status = protocol.ShardState(replica=shard.replica_id, rank=shard.rank, state="stopped", reason=reason)
    observe(node, status, "", now)


def not_listed(node: str, ended: Iterable[tuple[str, int]], now: datetime) -> None:
    """A heartbeat is whole too: shards that their agent has been told to stop, and that are not in it, have ended."""
    for replica, rank in sorted(ended):
        shard = Shard.objects.filter(replica=replica, rank=rank, node=node).select_related("replica").first()
        if shard is not None and shard.replica.wanted == Wanted.STOP:
            _gone(node, shard, now)


def stop_answered(shard: Shard, ack: protocol.Ack, now: datetime) -> None:
    """A shard that had ended is released by its agent's answer; one that runs reports its end itself."""
    if not ack.ok:
        text = f"replica {shard.replica_id} could not be stopped on node {shard.node_id}: {ack.error}"
        model = shard.replica.model
        timeline.note("refused", text, at=now, model=model, replica=shard.replica_id, node=shard.node_id)
    elif shard.state in protocol.ENDED:
        Shard.objects.filter(pk=shard.pk, state__in=protocol.ENDED).update(state="stopped", changed_at=now)
        poke()


def note_ended(node: str, errands: Iterable[protocol.Errand], now: datetime) -> None:
    """Put the end of a fetch or an installation on the node's timeline, once."""
    known = msgspec.convert(
        Node.objects.filter(pk=node).values_list("errands", flat=True).first() or (), tuple[protocol.Errand, ...]
    )
    before = {each.command: each.state for each in known}
    for each in errands:
        if each.state != "running" and before.get(each.command) != each.state:
            what = each.what[:400]
            text = f"node {node} has {what} now" if each.state == "done" else f"node {node} lacks {what}: {each.reason}"
            timeline.note(f"errand {each.state}", text, at=now, node=node)
