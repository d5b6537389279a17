"""What to do about the difference between the catalog and the fleet. Pure: `plan(cluster, now) -> Plan`.

In this order: (1) nodes that fell silent, (2) replicas that ended, left or are to leave, (3) models with too many
or outdated replicas, (4) one new replica, once the fleet has had time to register, (5) backoffs that are over.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from catalog import spec
from nodes import backoff
from nodes.expiry import Expired, expire
from nodes.placement import Placed, Unplaced, by_priority, place
from nodes.plans import Action, BackOff, Drain, Forget, Plan, Recover, Start, Stop
from nodes.state import Backoff, Cluster, Node, Replica, TurnedDown, profile_digest

STOP_LIMIT = timedelta(minutes=2)
"""A stop that a reachable node has not confirmed by then is taken as done; its next register tells."""
HEARD = timedelta(seconds=2)
"""Load figures count as idle only when they are this much younger than the drain: gateways hear of it by then."""


def plan(cluster: Cluster, now: datetime) -> Plan:
    """Everything to do now. Order of nodes, models and replicas in `cluster` does not matter."""
    expired = expire(cluster, now)
    view = _view(cluster, expired, now)
    fates = [_fate(replica, view) for replica in view.cluster.replicas]
    live: dict[str, list[Replica]] = {}
    for replica, fate in zip(view.cluster.replicas, fates, strict=True):
        if not fate and replica.wanted == "run":
            live.setdefault(replica.model, []).append(replica)
    demands = [_demand(model, live.get(model.name, []), view) for model in view.cluster.models]
    retired = [action for demand in demands for action in demand.actions]
    backoffs = _failures(view, fates)
    placed, reasons = _one_placement(demands, view, backoffs)
    ended = [action for fate in fates for action in fate if not isinstance(action, Failed)]
    return Plan((*expired, *ended, *retired, *backoffs, *placed, *_recoveries(view, backoffs)), reasons)


@dataclass(frozen=True, slots=True)
class View:
    """The cluster in an order of its own, with the states that its nodes have from now on, and what is looked up."""

    cluster: Cluster
    now: datetime
    nodes: dict[str, Node]
    models: dict[str, spec.Model]
    digests: dict[tuple[str, str], str]
    """By model and profile."""
    asked: dict[str, datetime]
    """When each on-demand model was last asked for."""


def _view(cluster: Cluster, expired: Iterable[Expired], now: datetime) -> View:
    states = {change.node: change.state for change in expired}
    nodes = (replace(node, state=states.get(node.name, node.state)) for node in cluster.nodes)
    cluster = replace(
        cluster,
        nodes=tuple(sorted(nodes, key=lambda node: node.name)),
        models=tuple(sorted(cluster.models, key=lambda model: model.name)),
        replicas=tuple(sorted(cluster.replicas, key=lambda replica: (replica.made_at, replica.name))),
        backoffs=tuple(sorted(cluster.backoffs, key=lambda held: (held.model, held.profile))),
    )
    return View(
        cluster,
        now,
        nodes={node.name: node for node in cluster.nodes},
        models={model.name: model for model in cluster.models},
        digests={(m.name, p.name): profile_digest(m, p) for m in cluster.models for p in m.profiles},
        asked={status.model: status.demand_at for status in cluster.statuses if status.demand_at},
    )


@dataclass(frozen=True, slots=True)
class Failed:
    """Not an action: the replica failed, and its profile is to be backed off."""

    replica: Replica
    reason: str


def _fate(replica: Replica, view: View) -> tuple[Stop | Drain | Forget | Failed, ...]:
    """What becomes of one replica whatever others do; empty when it may go on as it is."""
    homes = [view.nodes[shard.node] for shard in replica.shards if shard.node in view.nodes]
    lost = [node.name for node in homes if node.state == "lost"]
    reachable = all(node.state == "ready" for node in homes)
    if not homes or len(homes) < len(replica.shards):
        return _forget(replica, f"the node of replica {replica.name} was removed")
    if lost:
        return _forget(replica, f"replica {replica.name} was on node {lost[0]}, which is lost")
    if replica.wanted == "stop":
        if all(shard.state == "stopped" for shard in replica.shards):
            return _forget(replica, f"replica {replica.name} has stopped")
        if reachable and _age(replica.wanted_at or replica.made_at, view) > STOP_LIMIT:
            return _forget(replica, f"replica {replica.name} did not confirm its stop in {STOP_LIMIT.seconds} s")
        return ()
    model = view.models.get(replica.model)
    profile = next((p for p in model.profiles if p.name == replica.profile), None) if model else None
    if replica.state == "stopped":  # with its machine or its agent, which is nobody's fault
        why = replica.reason or "it stopped without being told to"
        return (Stop(replica.name, replica.model, f"replica {replica.name} is over: {why}"),)
    fault = _overdue(replica, profile, view) if profile and reachable else ""
    if replica.state == "failed":
        fault = replica.reason or "its engine failed"
    if fault:
        why = f"replica {replica.name} failed: {fault}"
        return Failed(replica, fault), Stop(replica.name, replica.model, why)
    if replica.wanted == "drain":
        return _drained(replica, view)
    if model is None:
        return (_retire(replica, f"model {replica.model} left the catalog"),)
    if profile is None:
        return (_retire(replica, f"profile {replica.profile} left model {replica.model}"),)
    if _bounds(model, view)[1] == 0:
        return (_retire(replica, f"model {replica.model} is switched off"),)
    return ()


def _age(at: datetime, view: View) -> timedelta:
    """How long something has lasted while we could have been told of its end."""
    return view.now - max(at, view.cluster.since or at)


def _forget(replica: Replica, why: str) -> tuple[Forget]:
    return (Forget(replica.name, replica.model, why),)


def _overdue(replica: Replica, profile: spec.Profile, view: View) -> str:
    """Starting and loading are bounded; fetching weights is not: it reports how it gets on (ND-44)."""
    limit_s = profile.startup_timeout_s
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


def _retire(replica: Replica, because: str) -> Drain | Stop:
    """Take it down gently; one that serves nobody yet just stops."""
    if replica.state == "ready":
        return Drain(replica.name, replica.model, f"replica {replica.name} is drained: {because}")
    return Stop(replica.name, replica.model, f"replica {replica.name} is stopped: {because}")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model's replicas ask for: some to retire, perhaps one to place; `leaving` make room if they must."""

    model: spec.Model
    live: int
    short: bool
    """Fewer run than must; otherwise the new one replaces one of `leaving`."""
    wants_one: bool
    actions: tuple[Drain | Stop, ...] = ()
    leaving: tuple[Replica, ...] = ()


def _demand(model: spec.Model, live: Sequence[Replica], view: View) -> Demand:
    lower, upper = _bounds(model, view)
    if upper == 0:
        return Demand(model, 0, short=False, wants_one=False)
    why = {replica.name: _why_leave(replica, view) for replica in live}
    staying = [replica for replica in live if not why[replica.name]]
    leaving = sorted((replica for replica in live if why[replica.name]), key=_least_missed)
    actions = [_retire(replica, why[replica.name]) for replica in leaving if replica.state != "ready"]
    leaving = leaving[len(actions) :]
    ready = [replica for replica in staying if replica.state == "ready"]
    keep = min(max(lower, len(leaving)), upper)
    count = len(staying) + len(leaving)
    settled = len(ready) == len(staying)
    wants_one = False
    if not leaving:
        surplus = sorted(staying, key=_least_missed)[: max(0, len(staying) - upper)]
        actions += [_retire(replica, f"{model.name} runs {count}, at most {upper} are wanted") for replica in surplus]
        wants_one = count < lower
    elif len(ready) + len(leaving) > keep:
        actions.append(_retire(leaving[0], why[leaving[0].name]))
    else:
        wants_one = count < lower or settled  # else a replacement is on the way
    return Demand(model, count, count < lower, wants_one, tuple(actions), tuple(leaving) if settled else ())


def _bounds(model: spec.Model, view: View) -> tuple[int, int]:
    """How many replicas the model must have and may have."""
    if model.external is not None or not model.profiles:
        return 0, 0
    lower, upper = model.scaling.min, max(model.scaling.min, model.scaling.max)
    asked_at = view.asked.get(model.name)
    if upper and asked_at and view.now - asked_at < timedelta(seconds=model.scaling.idle_timeout_s):
        lower = max(lower, 1)
    return lower, upper


def _why_leave(replica: Replica, view: View) -> str:
    if replica.profile_digest != view.digests[replica.model, replica.profile]:
        return f"profile {replica.profile} of {replica.model} changed"
    emptied = (shard.node for shard in replica.shards if view.nodes[shard.node].draining)
    return next((f"node {node} is being drained" for node in emptied), "")


def _least_missed(replica: Replica) -> tuple[bool, float, float, str]:
    """Those that do not serve yet first, then the least loaded, then the newest; unknown load counts as busy."""
    in_flight = replica.load.in_flight if replica.load else None
    busy = float("inf") if in_flight is None else in_flight
    return replica.state == "ready", busy, -replica.made_at.timestamp(), replica.name


Reasons = tuple[tuple[str, tuple[TurnedDown, ...]], ...]


def _one_placement(
    demands: Sequence[Demand], view: View, failed: Sequence[BackOff]
) -> tuple[tuple[Action, ...], Reasons]:
    """At most one new replica: first for models that run short, then for those with the fewest."""
    reasons: list[tuple[str, tuple[TurnedDown, ...]]] = [
        (demand.model.name, ()) for demand in demands if not demand.wants_one
    ]
    if not _settled(view):
        return (), tuple(reasons)
    held = _held(view, failed)
    wanting = [demand for demand in demands if demand.wants_one]
    for demand in sorted(wanting, key=lambda demand: (not demand.short, demand.live, demand.model.name)):
        model = demand.model
        waits = {p.name: why for p in model.profiles if (why := _waits(held.get((model.name, p.name)), view))}
        candidates = [profile for profile in model.profiles if profile.name not in waits]
        found = place(model, candidates, view.cluster)
        if isinstance(found, Placed):
            reasons.append((model.name, ()))
            return (_start(model, found, view.now),), tuple(reasons)
        nodes = list(view.nodes) or [""]
        waiting = [(node, p.name) for p in by_priority(model.profiles) if p.name in waits for node in nodes]
        held_back = (TurnedDown(node, profile, waits[profile]) for node, profile in waiting)
        reasons.append((model.name, (*found.reasons, *held_back)))
        swap = _swap(demand, candidates, view)
        if swap:
            return (swap,), tuple(reasons)
    return (), tuple(reasons)


def _settled(view: View) -> bool:
    """Whether what runs is known (ND-45): every node has told it lately, or has had the time to since we lead."""
    since, settle = view.cluster.since, view.cluster.rules.settle
    if since is None or view.now - since >= settle:
        return True
    return all(_told(node, since, settle) for node in view.nodes.values())


def _told(node: Node, since: datetime, settle: timedelta) -> bool:
    """A register, which rebuilds the rows, counts from shortly before too; a heartbeat comes only after a register."""
    if node.registered_at is None or node.last_seen_at is None:
        return False
    return node.registered_at >= since - settle or node.last_seen_at > since


def _held(view: View, failed: Sequence[BackOff]) -> dict[tuple[str, str], Backoff]:
    backoffs = (*view.cluster.backoffs, *(action.backoff for action in failed))
    return {(held.model, held.profile): held for held in backoffs}


def _waits(held: Backoff | None, view: View) -> str:
    """Why a profile is not tried now; empty when it is, as it is at once after it changed."""
    if held is None or held.next_try_at <= view.now:
        return ""
    if held.profile_digest != view.digests[held.model, held.profile]:
        return ""
    failures = "1 failure" if held.failures == 1 else f"{held.failures} failures in a row"
    return f"waits until {held.next_try_at:%H:%M:%S} UTC after {failures}: {held.reason}"


def _swap(demand: Demand, candidates: Sequence[spec.Profile], view: View) -> Drain | Stop | None:
    """Where there is no room for old and new at once, take one old down first; never for nothing, nor two at a time."""
    on_its_way = any(r.model == demand.model.name and r.wanted != "run" for r in view.cluster.replicas)
    if on_its_way or not demand.leaving:
        return None
    victim = demand.leaving[0]
    if any(view.nodes[shard.node].draining for shard in victim.shards):
        return _retire(victim, f"node {victim.shards[0].node} is being drained, and no other has room")
    others = tuple(replica for replica in view.cluster.replicas if replica != victim)
    without = replace(view.cluster, replicas=others)
    if isinstance(place(demand.model, candidates, without), Unplaced):
        return None
    return _retire(victim, f"profile {victim.profile} changed, and there is no room for both")


def _start(model: spec.Model, placed: Placed, now: datetime) -> Start:
    slug = re.sub(r"[^a-z0-9]+", "-", model.name.lower()).strip("-")[:60] or "model"
    profile, nodes = placed.profile, ", ".join(part.node for part in placed.parts)
    seed = f"{model.name} {profile.name} {nodes} {now.isoformat()}"
    name = f"{slug}-{hashlib.sha256(seed.encode()).hexdigest()[:6]}"
    why = f"replica {name} of {model.name} ({profile.name}) starts on {nodes}"
    return Start(name, model, profile, placed.parts, why)


def _failures(view: View, fates: Iterable[Sequence[object]]) -> tuple[BackOff, ...]:
    """One more failure for every profile under which a replica failed; a replaced profile's failures do not count."""
    before = {(held.model, held.profile): held for held in view.cluster.backoffs}
    found: dict[tuple[str, str], BackOff] = {}
    for failed in (each for fate in fates for each in fate if isinstance(each, Failed)):
        replica = failed.replica
        key = replica.model, replica.profile
        if view.digests.get(key) != replica.profile_digest:
            continue
        held = before.get(key)
        failures = held.failures + 1 if held and held.profile_digest == replica.profile_digest else 1
        next_try_at = view.now + backoff.delay(failures, backoff.jitter_of(*key, str(failures)))
        step = Backoff(*key, replica.profile_digest, failures, next_try_at, failed.reason, replica.tail)
        again = f"is tried again at {next_try_at:%H:%M:%S} UTC, failure {failures}"
        why = f"model {replica.model} ({replica.profile}) {again}"
        found[key] = BackOff(step, why)
    return tuple(found.values())


def _recoveries(view: View, failed: Sequence[BackOff]) -> tuple[Recover, ...]:
    failing = {(action.backoff.model, action.backoff.profile) for action in failed}
    healthy = {
        (replica.model, replica.profile)
        for replica in view.cluster.replicas
        if replica.state == "ready" and replica.ready_at and view.now - replica.ready_at >= backoff.HEALTHY
    }
    found = []
    for held in view.cluster.backoffs:
        key = held.model, held.profile
        if key in failing:
            continue
        if view.digests.get(key) != held.profile_digest:
            found.append(Recover(*key, f"model {held.model} ({held.profile}) is tried afresh: it changed"))
        elif key in healthy:
            found.append(Recover(*key, f"model {held.model} ({held.profile}) is healthy again"))
    return tuple(found)
