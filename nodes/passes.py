"""One pass: look at the cluster, plan, carry the plan out in one transaction (ND-40).

Every step is a conditional update on what the plan saw, so a step that came too late, or again, changes nothing.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import assert_never

import msgspec
from django.db import transaction
from django.db.models import Q

from agent import protocol
from catalog import spec
from llmgw.core import doorbell, lease, traces
from nodes import commands, reconcile, reports, snapshot, state, timeline
from nodes.expiry import Expired
from nodes.models import Backoff, ModelStatus, Node, Replica, ReplicaLoad, Shard, Wanted
from nodes.plans import Action, BackOff, Drain, Forget, Join, Plan, Recover, Start, Stop
from nodes.reasons import Lines
from nodes.scene import Memory

log = logging.getLogger(__name__)

_memory, _lines = Memory(), Lines()
"""Of this process, whose passes follow each other."""


def run_pass(now: datetime, *, held: lease.Held | None = None, since: datetime | None = None) -> bool:
    """Whether anything was done, so that another pass should follow.

    `held`: the lease that it is done under, none where nobody else could act. `since`: when the lead was taken.
    """
    with _uncollected():
        cluster = snapshot.take(now, since=held.since if held else since)
        plan = reconcile.plan(cluster, now, _memory)
        changed_reasons = _changed(plan, cluster)
    if not plan.actions and not changed_reasons:
        return plan.unfinished
    with traces.within(), transaction.atomic():
        if held and not lease.advance(held):
            log.info("A pass was dropped: another one acted meanwhile")
            return False
        _remember(changed_reasons, now, said={a.backoff.model for a in plan.actions if isinstance(a, BackOff)})
        return apply(plan, now) or plan.unfinished


@contextmanager
def _uncollected() -> Iterator[None]:
    """A pass makes ten thousands of values without a cycle, and the garbage collector would walk through all that the
    process knows several times meanwhile: a third of a pass's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def apply(plan: Plan, now: datetime) -> bool:
    """Carry out the actions that still fit; whether there were any. Call inside a transaction."""
    acted = False
    changed = {action.replica for action in plan.actions if isinstance(action, Join | Drain | Stop | Forget)}
    if len(changed) > 1:
        reports.take_in_order(Q(pk__in=changed))
    for action in plan.actions:
        if _do(action, now):
            acted = True
        elif isinstance(action, Expired):
            break  # the node has spoken meanwhile: what follows was decided without it
    if acted:
        doorbell.table_changed()
    return acted


def _do(action: Action, now: datetime) -> bool:
    match action:
        case Expired():
            return _expire(action, now)
        case Start():
            return _start(action, now)
        case Join():
            return _join(action, now)
        case Drain():
            return _drain(action, now)
        case Stop():
            return _stop(action, now)
        case Forget():
            return _forget(action, now)
        case BackOff():
            return _back_off(action, now)
        case Recover():
            return _recover(action, now)
        case _:
            assert_never(action)


def _expire(action: Expired, now: datetime) -> bool:
    rows = Node.objects.filter(name=action.node, state=action.was, last_seen_at=action.last_seen_at)
    changed = rows.update(state=action.state)
    if changed:
        timeline.note(action.state, action.why, at=now, node=action.node)
    return bool(changed)


def _start(action: Start, now: datetime) -> bool:
    model, profile = action.model, action.profile
    _, made = Replica.objects.get_or_create(
        name=action.replica,
        defaults={
            "model": model.name,
            "profile": profile.name,
            "profile_digest": state.profile_digest(model, profile),
            "engine": profile.engine,
            "made_at": now,
            "state_at": now,
            "wanted_at": now,
            "weight": profile.weight,
            "max_loaded_adapters": profile.max_loaded_adapters,
            "adapters": msgspec.to_builtins(_adapters(model)),
            "wanted_why": action.why[:400],
        },
    )
    if not made:
        return False
    for part in action.parts:
        shard = Shard.objects.create(
            replica_id=action.replica,
            rank=part.rank,
            node_id=part.node,
            state="waiting" if part.rank else "starting",
            gpus=list(part.gpus),
            cores=part.cores,
            fabric=part.fabric,
            changed_at=now,
        )
        if part.rank == 0:
            _tell_to_start(shard, model, profile, made_at=now, rendezvous="", now=now)
        timeline.note("start", action.why, at=now, model=model.name, replica=action.replica, node=part.node)
    return True


def _join(action: Join, now: datetime) -> bool:
    leader = Shard.objects.select_related("node", "replica").filter(replica=action.replica, rank=0).first()
    if leader is None or leader.rendezvous is None or leader.replica.wanted != Wanted.RUN:
        return False
    waiting = Shard.objects.filter(replica=action.replica, rank__in=action.ranks, state="waiting")
    told = list(waiting.order_by("rank"))
    if not waiting.update(state="starting", changed_at=now):
        return False
    host = f"[{leader.node.address}]" if ":" in leader.node.address else leader.node.address
    for shard in told:
        made_at, rendezvous = leader.replica.made_at, f"{host}:{leader.rendezvous}"
        _tell_to_start(shard, action.model, action.profile, made_at=made_at, rendezvous=rendezvous, now=now)
        timeline.note("join", action.why, at=now, model=action.model.name, replica=action.replica, node=shard.node_id)
    return True


def _tell_to_start(
    shard: Shard, model: spec.Model, profile: spec.Profile, *, made_at: datetime, rendezvous: str, now: datetime
) -> None:
    told = protocol.ShardSpec(
        replica=shard.replica_id,
        rank=shard.rank,
        model=model.name,
        profile=profile.name,
        profile_digest=state.profile_digest(model, profile),
        engine=profile.engine,
        source=model.source,
        adapters=_adapters(model),
        max_loaded_adapters=profile.max_loaded_adapters,
        args=profile.args,
        env=dict(profile.env),
        gpus=tuple(shard.gpus),
        cores=shard.cores,
        slots=profile.weight,
        tp=profile.tp,
        pp=profile.pp,
        nodes=profile.nodes,
        launch_mode=profile.launch_mode,
        fabric=shard.fabric,
        startup_timeout_s=profile.startup_timeout_s,
        rendezvous=rendezvous,
        made_at=made_at,
    )
    commands.store(node=shard.node_id, body=protocol.StartShard(spec=told), now=now)


def _adapters(model: spec.Model) -> tuple[protocol.Adapter, ...]:
    return tuple(protocol.Adapter(name=each.name, source=each.source) for each in model.adapters)


def _want(action: Drain | Stop, wanted: Wanted, now: datetime, *, was: tuple[Wanted, ...]) -> bool:
    rows = Replica.objects.filter(name=action.replica, wanted__in=was)
    changed = rows.update(wanted=wanted, wanted_at=now, wanted_why=action.why[:400])
    if changed:
        home = _home(action.replica)
        timeline.note(wanted.value, action.why, at=now, model=action.model, replica=action.replica, node=home)
    return bool(changed)


def _drain(action: Drain, now: datetime) -> bool:
    return _want(action, Wanted.DRAIN, now, was=(Wanted.RUN,))


def _stop(action: Stop, now: datetime) -> bool:
    if not _want(action, Wanted.STOP, now, was=(Wanted.RUN, Wanted.DRAIN)):
        return False
    shards = Shard.objects.filter(replica=action.replica).order_by("rank")
    told = list(shards.exclude(state="waiting"))
    shards.filter(state="waiting").update(state="stopped", changed_at=now)
    if commands.withdraw_starts(action.replica):
        shards.update(state="stopped", changed_at=now)
        return True
    for shard in told:
        body = protocol.StopShard(replica=action.replica, rank=shard.rank)
        commands.store(node=shard.node_id, body=body, now=now)
    return True


def _forget(action: Forget, now: datetime) -> bool:
    home = _home(action.replica)
    gone, _ = Replica.objects.filter(name=action.replica).delete()
    if gone:
        commands.discard(action.replica)
        ReplicaLoad.objects.filter(replica=action.replica).delete()
        timeline.note("gone", action.why, at=now, model=action.model, replica=action.replica, node=home)
    return bool(gone)


def _home(replica: str) -> str:
    """The node of the leader, whose timeline tells of the replica too."""
    return Shard.objects.filter(replica=replica).order_by("rank").values_list("node_id", flat=True).first() or ""


def _back_off(action: BackOff, now: datetime) -> bool:
    held = action.backoff
    fields = {
        "profile_digest": held.profile_digest,
        "failures": held.failures,
        "next_try_at": held.next_try_at,
        "reason": held.reason[:1000],
        "tail": held.tail,
    }
    rows = Backoff.objects.filter(model=held.model, profile=held.profile, node=held.node)
    if rows.filter(profile_digest=held.profile_digest, failures__gte=held.failures).exists():
        return False
    if not rows.update(**fields):
        Backoff.objects.create(model=held.model, profile=held.profile, node=held.node, **fields)
    timeline.note("backoff", action.why, at=now, model=held.model, node=held.node)
    return True


def _recover(action: Recover, now: datetime) -> bool:
    gone, _ = Backoff.objects.filter(model=action.model, profile=action.profile, node=action.node).delete()
    if gone:
        timeline.note("recovered", action.why, at=now, model=action.model, node=action.node)
    return bool(gone)


Reasons = Mapping[str, Sequence[str]]


def _changed(plan: Plan, cluster: state.Cluster) -> Reasons:
    known = {status.model: status.reasons for status in cluster.statuses}
    told = _lines.of(plan.reasons, {model.name for model in cluster.models})
    return {model: lines for model, lines in told.items() if known.get(model, ()) != lines}


def _remember(changed: Reasons, now: datetime, *, said: set[str]) -> None:
    """Keep why models found no place, for the pages; put it on the timeline when that begins, unless it is `said`."""
    for model, reasons in changed.items():
        fields = {"reasons": list(reasons), "reasons_at": now}
        row, made = ModelStatus.objects.get_or_create(model=model, defaults=fields)
        begins = bool(reasons) and (made or not row.reasons) and model not in said
        if not made:
            ModelStatus.objects.filter(model=model).update(**fields)
        if begins:
            first, *others = reasons
            rest = f" (and {len(others)} more)" if others else ""
            timeline.note("unplaced", f"model {model} finds no place: {first}{rest}", at=now, model=model)
