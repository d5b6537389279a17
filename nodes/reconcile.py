"""What to do about the difference between the catalog and the fleet. Pure: `plan(cluster, now) -> Plan`.

In this order: (1) nodes that fell silent, (2) replicas that ended, left or are to leave, (3) models with too many
or outdated replicas, (4) leaders that listen get their workers, (5) one new replica, once the fleet has had time to
register, or the next step towards room for it, (6) backoffs that are over.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence, Set
from datetime import datetime, timedelta

from catalog import spec
from nodes.capacity import find, make_room
from nodes.expiry import expire
from nodes.failures import Failed, back_off, recoveries
from nodes.outlook import View, look, profile_of, rank_of, retire
from nodes.placement import Placed
from nodes.plans import Action, BackOff, Drain, Forget, Join, Plan, Start, Stop
from nodes.scaling import Demand, bounds, demand
from nodes.scene import Memory, Scene
from nodes.state import Cluster, Replica, Shard, TurnedDown

HEARD = timedelta(seconds=2)
"""Load figures count as idle only when they are this much younger than the drain: gateways hear of it by then."""


def plan(cluster: Cluster, now: datetime, memory: Memory | None = None) -> Plan:
    """Everything to do now. Order of nodes, models and replicas in `cluster` does not matter.

    `memory`: what earlier passes found out, and this one adds to; it spares work and changes no plan.
    """
    expired = expire(cluster, now)
    view = look(cluster, expired, now)
    fates = [_fate(replica, view) for replica in view.cluster.replicas]
    live: dict[str, list[Replica]] = {}
    for replica, fate in zip(view.cluster.replicas, fates, strict=True):
        if not fate and replica.wanted == "run":
            live.setdefault(replica.model, []).append(replica)
    demands = [demand(model, live.get(model.name, []), view) for model in view.cluster.models]
    retired = [action for each in demands for action in each.actions]
    ended = [action for fate in fates for action in fate if not isinstance(action, Failed)]
    joins = _joins(live, {action.replica for action in retired}, view)
    backoffs = back_off(view, (each for fate in fates for each in fate if isinstance(each, Failed)))
    ending = {action.replica for action in (*ended, *retired)}
    placed, reasons, unfinished = _one_placement(demands, view, backoffs, ending, memory or Memory())
    recovered = recoveries(view, backoffs)
    return Plan((*expired, *ended, *retired, *joins, *backoffs, *placed, *recovered), reasons, unfinished)


def _fate(replica: Replica, view: View) -> tuple[Stop | Drain | Forget | Failed, ...]:
    """What becomes of one replica whatever others do; empty when it may go on as it is."""
    homes = [view.nodes[shard.node] for shard in replica.shards if shard.node in view.nodes]
    away = [shard.node for shard in replica.shards if _is_away(shard, view)]
    reachable = all(node.state == "ready" for node in homes if node.state != "lost")
    if len(away) == len(replica.shards):
        return (_forget(replica, f"replica {replica.name} was on {_lost(away, view)}"),)
    if replica.wanted == "stop":
        if all(shard.state == "stopped" or _is_away(shard, view) for shard in replica.shards):
            return (_forget(replica, f"replica {replica.name} has stopped"),)
        return ()  # however long that takes: what its node does not call ended still has its cards
    if away:
        return (_over(replica, f"a part of it was on {_lost(away, view)}"),)
    profile = profile_of(replica, view)
    fault = _overdue(replica, profile, view) if profile and reachable else ""
    if replica.state == "failed":
        fault = replica.reason or "its engine failed"
    if fault:
        why = f"replica {replica.name} failed: {fault}"
        return Failed(replica, fault), Stop(replica.name, replica.model, why)
    ended = next((shard for shard in replica.shards if shard.state == "stopped"), None)
    if ended:  # with its machine or its agent, which is nobody's fault
        which = f"rank {ended.rank} on node {ended.node}" if len(replica.shards) > 1 else "it"
        return (_over(replica, replica.reason or f"{which} stopped without being told to"),)
    if replica.wanted == "drain":
        return _drained(replica, view)
    if profile is None:
        gone = f"profile {replica.profile} left model {replica.model}"
        left = gone if replica.model in view.models else f"model {replica.model} left the catalog"
        return (retire(replica, left),)
    if bounds(view.models[replica.model], view)[1] == 0:
        return (retire(replica, f"model {replica.model} is switched off"),)
    if _is_incomplete(replica, profile, view):
        return (_over(replica, f"{len(replica.shards)} of its {profile.nodes} shards are known"),)
    return ()


def _is_away(shard: Shard, view: View) -> bool:
    """Its node can no longer be spoken to: what runs there is told to stop should it come back."""
    return shard.node not in view.nodes or view.nodes[shard.node].state == "lost"


def _lost(away: Sequence[str], view: View) -> str:
    if not away:
        return "a node that was removed"
    return f"node {away[0]}, which is lost" if away[0] in view.nodes else f"node {away[0]}, which was removed"


def _age(at: datetime, view: View) -> timedelta:
    """How long something has lasted while we could have been told of its end."""
    return view.now - max(at, view.cluster.since or at)


def _forget(replica: Replica, why: str) -> Forget:
    return Forget(replica.name, replica.model, why)


def _over(replica: Replica, why: str) -> Stop:
    """Nothing of it serves any more, so what is left of it stops at once."""
    return Stop(replica.name, replica.model, f"replica {replica.name} is over: {why}")


def _overdue(replica: Replica, profile: spec.Profile, view: View) -> str:
    """Starting and loading are bounded; fetching weights is not, whichever rank does: it says how far it is (ND-44)."""
    limit_s = profile.startup_timeout_s
    if any(shard.state in ("fetching", "installing") for shard in replica.shards):
        return ""
    late = _age(replica.state_at or replica.made_at, view) > timedelta(seconds=limit_s)
    if replica.state in ("starting", "loading") and late:
        return f"still {replica.state} after {limit_s} s (startup_timeout_s of profile {replica.profile})"
    return ""


def _drained(replica: Replica, view: View) -> tuple[Stop, ...]:
    begun = replica.wanted_at or replica.made_at
    load = replica.load
    limit = view.cluster.rules.drain
    if load and load.in_flight == 0 and load.at - begun >= HEARD:
        return (Stop(replica.name, replica.model, f"replica {replica.name} is drained"),)
    if view.now - begun >= limit:
        why = f"replica {replica.name} had {limit.total_seconds():g} s to drain, and is stopped now"
        return (Stop(replica.name, replica.model, why),)
    return ()


def _is_incomplete(replica: Replica, profile: spec.Profile, view: View) -> bool:
    """A rank was on a node that was removed, or has not been found again after the store forgot it."""
    current = replica.profile_digest == view.digests[replica.model, replica.profile]
    return view.settled and current and len(replica.shards) < profile.nodes


def _joins(live: dict[str, list[Replica]], leaving: Set[str], view: View) -> Iterator[Join]:
    """Leaders that listen, and the workers that wait for them (ND-43)."""
    for replica in (each for mine in live.values() for each in mine):
        waiting = tuple(shard for shard in replica.shards if shard.state == "waiting")
        listens = any(shard.rank == 0 and shard.rendezvous is not None for shard in replica.shards)
        profile = profile_of(replica, view)
        if waiting and listens and profile and replica.name not in leaving:
            nodes = ", ".join(shard.node for shard in waiting)
            why = f"the leader of replica {replica.name} listens, and its other shards start on {nodes}"
            ranks = tuple(shard.rank for shard in waiting)
            yield Join(replica.name, view.models[replica.model], profile, ranks, why)


Reasons = tuple[tuple[str, tuple[TurnedDown, ...]], ...]


def _one_placement(
    demands: Sequence[Demand], view: View, failed: Sequence[BackOff], ending: Set[str], memory: Memory
) -> tuple[tuple[Action, ...], Reasons, bool]:
    """At most one new replica: first for models that run short, the higher class first, then those with the fewest."""
    reasons: list[tuple[str, tuple[TurnedDown, ...]]] = []
    reasons += [(each.model.name, ()) for each in demands if not each.wants_one]
    wanting = sorted((each for each in demands if each.wants_one), key=_urgency)
    if not view.settled or not wanting:
        return (), tuple(reasons), False
    memory.forget_all_but(each.model for each in wanting)
    scene = Scene(view, failed, ending, memory)
    for each in wanting:
        if scene.is_long:
            return (), tuple(reasons), True
        found, room = find(each.model, scene)
        if isinstance(found, Placed):
            return (_start(each.model, found, view),), (*reasons, (each.model.name, ())), False
        reasons.append((each.model.name, found.reasons))
        step = None if room else _swap(each, scene)
        if each.short and not room and not step:
            room = make_room(each.model, scene)
        if room:
            step = room.action
            scene.keep(room.nodes, each.model)
        if step:
            return (step,), tuple(reasons), False
    return (), tuple(reasons), False


def _urgency(each: Demand) -> tuple[bool, int, int, str]:
    highest = max(rank_of(profile.capacity_class) for profile in each.model.profiles)
    return not each.short, -highest, each.live, each.model.name


def _swap(each: Demand, scene: Scene) -> Drain | Stop | None:
    """Where there is no room for old and new at once, take one old down first; never for nothing, nor two at a time."""
    if scene.going_of.get(each.model.name) or not each.leaving:
        return None
    victim = each.leaving[0]
    nodes = scene.view.nodes
    emptied = next((shard.node for shard in victim.shards if nodes[shard.node].draining), "")
    if emptied:
        return retire(victim, f"node {emptied} is being drained, and no other has room")
    if scene.spot(each.model, scene.ground.without({victim.name})) is None:
        return None
    return retire(victim, f"profile {victim.profile} changed, and there is no room for both")


def _start(model: spec.Model, placed: Placed, view: View) -> Start:
    slug = re.sub(r"[^a-z0-9]+", "-", model.name.lower()).strip("-")[:60] or "model"
    profile, nodes = placed.profile, ", ".join(part.node for part in placed.parts)
    seed = f"{model.name} {profile.name} {nodes} {view.now.isoformat()}"
    taken = {replica.name for replica in view.cluster.replicas}
    names = (f"{slug}-{hashlib.sha256(f'{seed} {turn}'.encode()).hexdigest()[:6]}" for turn in itertools.count())
    name = next(name for name in names if name not in taken)
    why = f"replica {name} of {model.name} ({profile.name}) starts on {nodes}"
    return Start(name, model, profile, placed.parts, why)
