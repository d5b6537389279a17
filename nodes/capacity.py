"""Finds a place for a model that runs short; where there is none, makes room at the cost of others. Pure.

1. What is on its way out anyway makes the room: wait for it.
2. One idle replica of another on-demand model makes way, with every "never" of ND-46.
3. The cheapest set of replicas of lower capacity classes makes way, one after the other (ND-33).
The nodes that are being cleared are kept for the model meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from catalog import spec
from nodes.outlook import Holds, View, is_idle, least_missed, profile_of, rank_of, retire
from nodes.placement import NO_NODE, Placed, Unplaced, by_priority, place
from nodes.plans import Drain, Stop
from nodes.scaling import is_asked_for, is_on_demand
from nodes.state import Cluster, Replica, TurnedDown

RESIDENT = timedelta(minutes=3)
"""How long after becoming ready an on-demand replica makes way for no other."""
TRIED = 8
"""Cheapest places that are looked at more closely, where a team's quota might be in the way."""

Kept = Mapping[str, str]
"""Nodes that are being cleared, and what others who ask for them are told."""


def seek(model: spec.Model, cluster: Cluster, held: Holds, kept: Kept) -> Placed | Unplaced:
    """A place for one more replica, on nodes where it is not held back. One reason for every profile on every node."""
    if not kept and not any((model.name, profile.name) in held for profile in model.profiles):
        return place(model, model.profiles, cluster)
    reasons: list[TurnedDown] = []
    for profile in by_priority(model.profiles):
        waits = held.get((model.name, profile.name), {})
        if "" in waits:
            names = [node.name for node in cluster.nodes] or [""]
            reasons += [TurnedDown(name, profile.name, waits[""], anywhere=bool(name)) for name in names]
            continue
        closed = {**kept, **waits}
        open_nodes = tuple(node for node in cluster.nodes if node.name not in closed)
        found = place(model, [profile], replace(cluster, nodes=open_nodes), fleet=cluster.nodes)
        if isinstance(found, Placed):
            return found
        reasons += [turned for turned in found.reasons if turned.reason != NO_NODE or not cluster.nodes]
        here = [node.name for node in cluster.nodes if node.name in closed]
        reasons += [TurnedDown(name, profile.name, closed[name]) for name in here]
    return Unplaced(tuple(reasons))


@dataclass(frozen=True, slots=True)
class Room:
    """Where a model will find its place, and what is done for it now: nothing while somebody is on the way out."""

    nodes: tuple[str, ...]
    action: Drain | Stop | None = None


def find(model: spec.Model, view: View, held: Holds, wary: Holds, kept: Kept) -> tuple[Placed | Unplaced, Room | None]:
    """A place, rather where the model has not failed yet (`wary`), even if its own last try has yet to leave there."""
    found = seek(model, view.cluster, wary, kept)
    if isinstance(found, Placed) or all(_same(model, profile, held, wary) for profile in model.profiles):
        return found, None
    going = frozenset(r.name for r in view.cluster.replicas if r.wanted != "run" and r.model == model.name)
    if going and isinstance(later := _Wish(model, view, wary, kept, going).without(), Placed):
        return found, Room(_homes(later))
    return seek(model, view.cluster, held, kept), None


def _same(model: spec.Model, profile: spec.Profile, held: Holds, wary: Holds) -> bool:
    key = model.name, profile.name
    return held.get(key) == wary.get(key)


@dataclass(frozen=True, slots=True)
class _Wish:
    """A model that found no place, and all that its place depends on."""

    model: spec.Model
    view: View
    held: Holds
    kept: Kept
    going: frozenset[str]
    """Replicas on their way out."""

    def without(self, names: Iterable[str] = ()) -> Placed | Unplaced:
        """Its place once these have gone too."""
        return self._seek(self.view.cluster, {*self.going, *names})

    def on(self, nodes: Sequence[str], names: Iterable[str]) -> bool:
        """Whether these nodes alone have a place once the named have gone. Cheap, and blind to team quotas."""
        cluster = self.view.cluster
        here = frozenset(nodes)
        replicas = tuple(r for r in cluster.replicas if any(shard.node in here for shard in r.shards))
        models = {r.model: self.view.models[r.model] for r in replicas if r.model in self.view.models}
        part = replace(
            cluster,
            nodes=tuple(self.view.nodes[name] for name in nodes),
            replicas=replicas,
            models=tuple(models.values()),
            quotas={},
        )
        return isinstance(self._seek(part, {*self.going, *names}), Placed)

    def _seek(self, cluster: Cluster, gone: set[str]) -> Placed | Unplaced:
        replicas = tuple(replica for replica in cluster.replicas if replica.name not in gone)
        return seek(self.model, replace(cluster, replicas=replicas), self.held, self.kept)


def make_room(model: spec.Model, view: View, held: Holds, kept: Kept) -> Room | None:
    """None where nothing that may be done would give the model a place."""
    going = frozenset(replica.name for replica in view.cluster.replicas if replica.wanted != "run")
    wish = _Wish(model, view, held, kept, going)
    if going and isinstance(found := wish.without(), Placed):
        return Room(_homes(found))
    return _evict(wish) or _preempt(wish)


def _homes(found: Placed) -> tuple[str, ...]:
    return tuple(part.node for part in found.parts)


# --- on demand -------------------------------------------------------------------------------------------------------
def _evict(wish: _Wish) -> Room | None:
    """The idle replica that was asked for the longest ago, if its place is enough."""
    view = wish.view
    best = max((rank_of(profile.capacity_class) for profile in wish.model.profiles), default=0)
    idle = [r for r in view.cluster.replicas if _may_be_evicted(r, view) and _rank(r, view) <= best]
    for replica in sorted(idle, key=lambda r: (view.asked.get(r.model, r.made_at), r.made_at, r.name)):
        home = replica.shards[0].node
        if not wish.on([home], [replica.name]):
            continue
        found = wish.without([replica.name])
        if isinstance(found, Placed):
            because = f"nobody asks for {replica.model} now, and {wish.model.name} is asked for and needs its place"
            return Room(_homes(found), retire(replica, because))
    return None


def _may_be_evicted(replica: Replica, view: View) -> bool:
    """Never one of a model with a least number, over several nodes, of unknown use, or lately ready."""
    model = view.models.get(replica.model)
    return (
        model is not None
        and is_on_demand(model)
        and replica.wanted == "run"
        and len(replica.shards) == 1
        and is_idle(replica)
        and replica.ready_at is not None
        and view.now - replica.ready_at >= RESIDENT
        and not is_asked_for(model, view)
    )


# --- capacity classes ------------------------------------------------------------------------------------------------
def _preempt(wish: _Wish) -> Room | None:
    """The first step of clearing the cheapest place for the highest profile that can have one."""
    view = wish.view
    for profile in by_priority(wish.model.profiles):
        rank = rank_of(profile.capacity_class)
        running = (r for r in view.cluster.replicas if r.wanted == "run" and r.model != wish.model.name)
        lower = [replica for replica in running if _rank(replica, view) < rank]
        one = replace(wish, model=replace(wish.model, profiles=(profile,)))
        for victims in _sets(one, lower)[:TRIED] if lower else ():
            found = one.without(victim.name for victim in victims)
            if not isinstance(found, Placed):  # a team's quota is in the way, of which one node knows nothing
                continue
            if any(_is_leaving(replica, rank, view) for replica in view.cluster.replicas):
                return Room(_homes(found))
            first = min(victims, key=least_missed)
            because = f"{wish.model.name} ({profile.capacity_class}) needs its place, and is of a higher class"
            return Room(_homes(found), retire(first, because))
    return None


def _rank(replica: Replica, view: View) -> int:
    profile = profile_of(replica, view)
    return rank_of(profile.capacity_class if profile else spec.CAPACITY_CLASSES[-1])


def _is_leaving(replica: Replica, rank: int, view: View) -> bool:
    """One of a lower class is on its way out where it can be waited for: replicas are preempted one at a time."""
    homes = [view.nodes[shard.node] for shard in replica.shards if shard.node in view.nodes]
    return replica.wanted != "run" and _rank(replica, view) < rank and all(node.state == "ready" for node in homes)


def _sets(wish: _Wish, lower: Sequence[Replica]) -> Sequence[Sequence[Replica]]:
    """Replicas whose going makes room, the cheapest set first; none when even all of `lower` would not do."""
    found = wish.without(_names(lower))
    if isinstance(found, Unplaced):
        return ()
    by_node: dict[str, list[Replica]] = {}
    for replica in lower:
        for shard in replica.shards:
            by_node.setdefault(shard.node, []).append(replica)
    if len(found.parts) > 1:
        return (_pruned(wish, _fewest_nodes(wish, by_node), by_node),)
    sets = [_pruned(wish, [node], by_node) for node in by_node if wish.on([node], _names(by_node[node]))]
    return sorted(sets, key=lambda victims: _cost(victims, wish.view))


def _fewest_nodes(wish: _Wish, by_node: Mapping[str, Sequence[Replica]]) -> Sequence[str]:
    """The nodes of a place over several, cleared of as little as possible: the least of those with the cheapest
    replicas that suffices is looked for by halves."""
    view = wish.view
    nodes = sorted(view.nodes, key=lambda node: (_cost(by_node.get(node, ()), view), node))

    def place_in(count: int) -> Placed | Unplaced:
        return wish.without({r.name for node in nodes[:count] for r in by_node.get(node, ())})

    least = _first(len(nodes), lambda count: isinstance(place_in(count), Placed))
    found = place_in(least)
    assert isinstance(found, Placed)
    return _homes(found)


def _first(most: int, suffices: Callable[[int], bool]) -> int:
    """The smallest count up to `most` that suffices, where every larger one does too."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def _pruned(wish: _Wish, nodes: Sequence[str], by_node: Mapping[str, Sequence[Replica]]) -> Sequence[Replica]:
    """Of what could go from these nodes, what must: the dearest that need not go stay."""
    victims = {replica.name: replica for node in nodes for replica in by_node.get(node, ())}
    for replica in sorted(victims.values(), key=lambda r: (_cost([r], wish.view), r.name), reverse=True):
        rest = [name for name in victims if name != replica.name]
        if wish.on(nodes, rest):
            del victims[replica.name]
    return list(victims.values())


def _names(replicas: Iterable[Replica]) -> list[str]:
    return [replica.name for replica in replicas]


def _cost(victims: Sequence[Replica], view: View) -> tuple[float, ...]:
    """What is lost with them: first their class, then how many, the cards, cores and requests, unknown as many."""
    shards = [shard for replica in victims for shard in replica.shards]
    return (
        max((_rank(replica, view) for replica in victims), default=-len(spec.CAPACITY_CLASSES)),
        len(victims),
        sum(len(shard.gpus) for shard in shards),
        sum(shard.cores for shard in shards),
        sum(least_missed(replica)[1] for replica in victims),
        -sum(replica.made_at.timestamp() for replica in victims),
    )
