"""Finds a place for a model that runs short; where there is none, makes room at the cost of others. Pure.

1. What is on its way out anyway makes the room: wait for it.
2. One idle replica of another on-demand model makes way, with every "never" of ND-46.
3. The cheapest set of replicas of lower capacity classes makes way, one after the other (ND-33).
The nodes that are being cleared are kept for the model meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from catalog import spec
from nodes.fitting import ask_of
from nodes.outlook import View, least_missed, rank_in, rank_of, retire
from nodes.placement import Part, Placed, Unplaced, by_priority, seat, seat_among
from nodes.plans import Drain, Stop
from nodes.scene import Scene
from nodes.state import Replica

TRIED = 8
"""Cheapest places that are looked at more closely, where a team's quota might be in the way."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where a model will find its place, and what is done for it now: nothing while somebody is on the way out."""

    nodes: tuple[str, ...]
    action: Drain | Stop | None = None


def find(model: spec.Model, scene: Scene) -> tuple[Placed | Unplaced, Room | None]:
    """A place, rather where the model has not failed yet, even if its own last try has yet to leave there."""
    if not scene.is_wary(model):
        return scene.seek(model), None
    found = scene.seek(model, wary=True)
    if isinstance(found, Placed):
        return found, None
    going = scene.going_of.get(model.name)
    later = scene.spot(model, scene.ground.without(going), wary=True) if going else None
    if later:
        return found, Room(_homes(later.parts))
    return scene.seek(model), None


def make_room(model: spec.Model, scene: Scene) -> Room | None:
    """None where nothing that may be done would give the model a place."""
    later = scene.spot(model, scene.emptied) if scene.going else None
    if later:
        return Room(_homes(later.parts))
    if not (_may_evict(model, scene) or _may_preempt(model, scene)) or not scene.may_look(model):
        return None
    room = _evict(model, scene) or _preempt(model, scene)
    if room is None:
        scene.looked_in_vain(model)
    return room


def _homes(parts: Iterable[Part]) -> tuple[str, ...]:
    return tuple(part.node for part in parts)


# --- on demand -------------------------------------------------------------------------------------------------------
def _may_evict(model: spec.Model, scene: Scene) -> bool:
    """It would have a place on one node, had all idle replicas gone. Cheap, as the answers are remembered."""
    one = replace(model, profiles=tuple(profile for profile in model.profiles if profile.nodes == 1))
    return bool(scene.idle) and scene.spot(one, scene.vacated) is not None


def _evict(model: spec.Model, scene: Scene) -> Room | None:
    """The idle replica that was asked for the longest ago, if its place is enough."""
    best = max((rank_of(profile.capacity_class) for profile in model.profiles), default=0)
    for replica in scene.idle:
        home = replica.shards[0].node
        if rank_in(replica, scene.view) > best or not _would_do(model, [home], [replica.name], scene):
            continue
        found = scene.spot(model, scene.without([replica.name]))
        if found:
            because = f"nobody asks for {replica.model} now, and {model.name} is asked for and needs its place"
            return Room(_homes(found.parts), retire(replica, because))
    return None


def _would_do(model: spec.Model, nodes: Sequence[str], names: Iterable[str], scene: Scene) -> bool:
    """Whether these nodes alone have a place once the named have gone. Cheap, and blind to team quotas."""
    without = scene.without(names)
    for profile in model.profiles:
        ask, shut = ask_of(model, profile), scene.shut(model, profile)
        if "" not in shut and seat_among(ask, without.fits_on(nodes, ask), shut):
            return True
    return False


# --- capacity classes ------------------------------------------------------------------------------------------------
def _may_preempt(model: spec.Model, scene: Scene) -> bool:
    """It would have a place, had all replicas of lower classes gone. Cheap, as the answers are remembered."""
    return any(_gain(model, profile, scene) for profile in model.profiles)


def _gain(model: spec.Model, profile: spec.Profile, scene: Scene) -> tuple[Part, ...]:
    lower = scene.lower(rank_of(profile.capacity_class))
    return seat(model, profile, lower.cleared, scene.shut(model, profile)) if lower.replicas else ()


def _preempt(model: spec.Model, scene: Scene) -> Room | None:
    """The first step of clearing the cheapest place for the highest profile that can have one."""
    for profile in by_priority(model.profiles):
        rank, one = rank_of(profile.capacity_class), replace(model, profiles=(profile,))
        for victims in _sets(one, scene)[:TRIED] if _gain(model, profile, scene) else ():
            found = scene.spot(one, scene.without(victim.name for victim in victims))
            if not found:  # a team's quota is in the way, of which one node knows nothing
                continue
            if any(_is_leaving(name, rank, scene) for name in scene.going):
                return Room(_homes(found.parts))
            first = min(victims, key=least_missed)
            because = f"{model.name} ({profile.capacity_class}) needs its place, and is of a higher class"
            return Room(_homes(found.parts), retire(first, because))
    return None


def _is_leaving(name: str, rank: int, scene: Scene) -> bool:
    """One of a lower class is on its way out where it can be waited for: replicas are preempted one at a time."""
    replica, nodes = scene.ground.replicas[name], scene.view.nodes
    homes = [nodes[shard.node] for shard in replica.shards if shard.node in nodes]
    return rank_in(replica, scene.view) < rank and all(node.state == "ready" for node in homes)


def _sets(model: spec.Model, scene: Scene) -> Sequence[Sequence[Replica]]:
    """Replicas whose going makes room for a model of one profile, the cheapest set first; none when even all would
    not do."""
    [profile] = model.profiles
    lower = scene.lower(rank_of(profile.capacity_class))
    others = [replica for replica in lower.replicas if replica.model != model.name]
    cleared = lower.cleared if len(others) == len(lower.replicas) else scene.without(_names(others))
    ask, shut = ask_of(model, profile), scene.shut(model, profile)
    if not seat(model, profile, cleared, shut):
        return ()
    by_node: dict[str, list[Replica]] = {}
    for replica in others:
        for shard in replica.shards:
            by_node.setdefault(shard.node, []).append(replica)
    if profile.nodes > 1:
        return (_pruned(model, _fewest_nodes(model, by_node, scene), by_node, scene),)
    able = [node for node in cleared.fits(ask) if node in by_node and node not in shut]
    sets = [_pruned(model, [node], by_node, scene) for node in able]
    return sorted(sets, key=lambda victims: _cost(victims, scene.view))


def _fewest_nodes(model: spec.Model, by_node: Mapping[str, Sequence[Replica]], scene: Scene) -> Sequence[str]:
    """The nodes of a place over several, cleared of as little as possible: the least of those with the cheapest
    replicas that suffices is looked for by halves."""
    view = scene.view
    nodes = sorted(view.nodes, key=lambda node: (_cost(by_node.get(node, ()), view), node))

    def place_in(count: int) -> Placed | None:
        return scene.spot(model, scene.without(r.name for node in nodes[:count] for r in by_node.get(node, ())))

    found = place_in(_first(len(nodes), lambda count: place_in(count) is not None))
    assert found
    return _homes(found.parts)


def _first(most: int, suffices: Callable[[int], bool]) -> int:
    """The smallest count up to `most` that suffices, where every larger one does too."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def _pruned(
    model: spec.Model, nodes: Sequence[str], by_node: Mapping[str, Sequence[Replica]], scene: Scene
) -> Sequence[Replica]:
    """Of what could go from these nodes, what must: the dearest that need not go stay."""
    victims = {replica.name: replica for node in nodes for replica in by_node.get(node, ())}
    for replica in sorted(victims.values(), key=lambda r: (_cost([r], scene.view), r.name), reverse=True):
        rest = [name for name in victims if name != replica.name]
        if _would_do(model, nodes, rest, scene):
            del victims[replica.name]
    return list(victims.values())


def _names(replicas: Iterable[Replica]) -> list[str]:
    return [replica.name for replica in replicas]


def _cost(victims: Sequence[Replica], view: View) -> tuple[float, ...]:
    """What is lost with them: first their class, then how many, the cards, cores and requests, unknown as many."""
    shards = [shard for replica in victims for shard in replica.shards]
    return (
        max((rank_in(replica, view) for replica in victims), default=-len(spec.CAPACITY_CLASSES)),
        len(victims),
        sum(len(shard.gpus) for shard in shards),
        sum(shard.cores for shard in shards),
        sum(least_missed(replica)[1] for replica in victims),
        -sum(replica.made_at.timestamp() for replica in victims),
    )
