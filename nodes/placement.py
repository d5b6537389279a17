"""Where a new replica goes, or why it goes nowhere: filter every node, then score what is left. Pure (ND-30 to ND-32).

1. Profiles by priority; a team's capacity quota turns a profile down everywhere.
2. Each node fits, or says why not (`fitting.consider`).
3. On CPUs the node with most room; on cards the one with the least left over; over several nodes, those that share a
   fabric that is up, in one NVLink clique where there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agent.protocol import Fabric, Gpu
from catalog import spec
from nodes.cards import Clique, choose, clique_of
from nodes.fitting import NAMED, Ask, Fit, ask_of, cores_counted, counted, gb
from nodes.ground import Ground, Without
from nodes.names import some
from nodes.state import Cluster, Node, TurnedDown

NO_NODE = "no node has joined yet; add one with `llmgw ctl node-token NAME`"


@dataclass(frozen=True, slots=True)
class Part:
    """What a shard gets: a node, the cores it is counted with, and cards."""

    node: str
    rank: int = 0
    cores: float = 0
    gpus: tuple[str, ...] = ()
    fabric: str = ""
    """What it reaches the other shards over; empty on one node."""


@dataclass(frozen=True, slots=True)
class Placed:
    """In the order of rank; the leader is on the node whose name comes first."""

    profile: spec.Profile
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Unplaced:
    """One reason for every profile on every node."""

    reasons: tuple[TurnedDown, ...]


Shut = Mapping[str, str]
"""Nodes that a profile is not tried on now, and why; all of them where the name is empty."""
OPEN: Shut = {}


def place(model: spec.Model, candidates: Sequence[spec.Profile], cluster: Cluster) -> Placed | Unplaced:
    """The first of `candidates`, by priority, that fits somewhere. The answer does not depend on the nodes' order."""
    ground = Ground(cluster)
    for profile in by_priority(candidates):
        parts = seat(model, profile, ground, OPEN)
        if parts:
            return Placed(profile, parts)
    return Unplaced(tuple(why for each in by_priority(candidates) for why in refusals(model, each, ground, OPEN)))


def seat(model: spec.Model, profile: spec.Profile, ground: Ground | Without, shut: Shut) -> tuple[Part, ...]:
    """The parts that a replica would get; none where it has no place."""
    if "" in shut or quota_fault(model, profile, ground):
        return ()
    ask = ask_of(model, profile)
    return seat_among(ask, ground.fits(ask), shut)


def seat_among(ask: Ask, fits: Mapping[str, Fit], shut: Shut) -> tuple[Part, ...]:
    """The same on these nodes, whatever quotas say."""
    return _parts([fit for name, fit in fits.items() if name not in shut], ask)


def refusals(model: spec.Model, profile: spec.Profile, ground: Ground, shut: Shut) -> Sequence[TurnedDown]:
    """Why a replica that has no place has none: one reason for every node, in the order of their names."""
    names = list(ground.nodes) or [""]
    ask = ask_of(model, profile)
    # Who raises a quota must not find out only then that there are no such cards.
    both = _nowhere(ask, ground), quota_fault(model, profile, ground)
    general = shut.get("") or "; besides: ".join(filter(None, both))
    if general:
        own = {} if "" in shut else shut
        return [
            TurnedDown(name, profile.name, own.get(name, general), anywhere=bool(name) and name not in own)
            for name in names
        ]
    answers, fits = ground.answers(ask), ground.fits(ask)
    others = [fit for name, fit in fits.items() if name not in shut]
    sizes = _sizes(others)
    why = {**{fit.node.name: _alone(fit.node, sizes, ask) for fit in others}, **shut}
    told = {**answers, **{name: TurnedDown(name, profile.name, why[name]) for name in why.keys() & answers.keys()}}
    return [answer for answer in told.values() if isinstance(answer, TurnedDown)]


def by_priority(profiles: Sequence[spec.Profile]) -> list[spec.Profile]:
    """The highest first; those of equal priority in the order in which they were declared."""
    return sorted(profiles, key=lambda profile: -profile.priority)


def quota_fault(model: spec.Model, profile: spec.Profile, ground: Ground | Without) -> str:
    """Why the team that owns the model may not hold the cards (TN-6)."""
    if profile.gpu_class is None:
        return ""
    limit = ground.quotas.get(model.team, {}).get(profile.gpu_class)
    if limit is None:
        return ""
    mine = ground.teams.get((model.team, profile.gpu_class), {})
    asked, total = ask_of(model, profile).cards * profile.nodes, sum(mine.values())
    if total + asked <= limit:
        return ""
    by = ": " + ", ".join(f"{name} {count}" for name, count in sorted(mine.items())) if mine else ""
    step = "Stop one of its replicas, or" if mine else "Raise it"
    return (
        f"team {model.team} may hold {limit} {profile.gpu_class} and holds {total}{by}; this needs {asked} more. "
        f"{step}: llmgw ctl quota set {model.team} {profile.gpu_class} {total + asked}"
    )


def _nowhere(ask: Ask, ground: Ground) -> str:
    """What is asked for that no node has, so that only a change of the fleet or of the profile helps."""
    if not ground.nodes:
        return NO_NODE
    if ask.only_nodes and not any(name in ground.nodes for name in ask.only_nodes):
        return f"no node is named {some(ask.only_nodes, NAMED)}; correct only_nodes of profile {ask.profile}"
    for name, value in ask.labels:
        if (name, value) not in ground.labels:
            return (
                f"no node has the label {name}={value} that profile {ask.profile} asks for; "
                f"label a node so, or change the profile"
            )
    if ask.gpu_class is not None and ask.gpu_class not in ground.classes:
        return (
            f"no node has {ask.gpu_class}; the cluster has {counted(ground.classes) or 'no cards'}. "
            f"Add a node with them, or change gpu_class of profile {ask.profile}"
        )
    if ask.disk_bytes and ground.largest_disk and ground.largest_disk[0] < ask.disk_bytes:
        size, name = ground.largest_disk
        return (
            f"no node has a disk of {gb(ask.disk_bytes)}; the largest has {gb(size)}, on {name}. "
            f"Lower min_disk_gb of profile {ask.profile}, or add a node with a larger one"
        )
    if ask.disk_bytes and ground.most_disk and ground.most_disk[0] < ask.disk_bytes:
        free, name = ground.most_disk
        return (
            f"no node has {gb(ask.disk_bytes)} of disk free; the most is {gb(free)}, on {name}. "
            f"Lower min_disk_gb of profile {ask.profile}, add a node with more, or free some"
        )
    return ""


def _parts(fits: Sequence[Fit], ask: Ask) -> tuple[Part, ...]:
    """The parts of one replica on nodes that fit; none where they do not suffice."""
    if not fits:
        return ()
    if ask.nodes > 1:
        return _across(fits, ask)
    if ask.gpu_class is None:
        node = min(fits, key=_spread).node
        return (Part(node.name, cores=cores_counted(node, ask)),)
    fit = min(fits, key=lambda fit: (fit.free_cards, len(fit.node.gpus), fit.node.name))
    _, cards = min((len(gpus), name) for name, gpus in fit.free.items())
    return (_part(fit.node, 0, fit.free[cards], ask, ""),)


def _spread(fit: Fit) -> tuple[float, float, str]:
    """Most free cores first, then most free memory: nothing else keeps two CPU replicas off the same cores."""
    node, used = fit.node, fit.used
    free_cores = (node.cores or 0) - node.reserved_cores - used.cores
    return -free_cores, used.memory_bytes - (node.memory_bytes or 0), node.name


def _part(node: Node, rank: int, free: Sequence[Gpu], ask: Ask, fabric: str) -> Part:
    cards = choose(free, ask.cards, node.gpus)
    return Part(node.name, rank, cores_counted(node, ask), cards, fabric)


# --- over several nodes ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Island:
    """Nodes that one replica could span: cards of one type, and one fabric over links of one kind."""

    fabric: str
    free: dict[str, tuple[Fit, Sequence[Gpu]]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)


def _across(fits: Sequence[Fit], ask: Ask) -> tuple[Part, ...]:
    options = [
        (_score(island, chosen, in_clique), island.fabric, chosen)
        for _, island in sorted(_islands(fits).items())
        for in_clique, pool in _pools(island, ask)
        if len(chosen := _tightest(pool, ask.nodes)) == ask.nodes
    ]
    if not options:
        return ()
    _, fabric, chosen = min(options, key=lambda option: option[0])
    return tuple(_part(fit.node, rank, free, ask, fabric) for rank, (fit, free) in enumerate(chosen))


Pool = Sequence[tuple[Fit, Sequence[Gpu]]]


def _islands(fits: Sequence[Fit]) -> Mapping[tuple[str, str, str], _Island]:
    """By fabric, kind of link and type of card."""
    found: dict[tuple[str, str, str], _Island] = {}
    for fit in fits:
        for fabric in _up(fit.node):
            for name, gpus in fit.free.items():
                island = found.setdefault((fabric.name, fabric.link_layer, name), _Island(fabric.name))
                island.free[fit.node.name] = fit, gpus
                island.rates[fit.node.name] = fabric.rate_gbit_s or 0.0
    return found


def _sizes(fits: Sequence[Fit]) -> Mapping[str, int]:
    """By fabric, how many nodes could together take parts of one replica."""
    sizes: dict[str, int] = {}
    for (fabric, _, _), island in _islands(fits).items():
        sizes[fabric] = max(sizes.get(fabric, 0), len(island.free))
    return sizes


def _up(node: Node) -> Iterator[Fabric]:
    return (fabric for fabric in node.fabrics if fabric.up)


def _pools(island: _Island, ask: Ask) -> Iterator[tuple[bool, Pool]]:
    """Its nodes by NVLink clique, as far as they have enough cards in one; and all of them."""
    cliques: dict[Clique, list[tuple[Fit, Sequence[Gpu]]]] = defaultdict(list)
    for fit, gpus in island.free.values():
        inside: dict[Clique, list[Gpu]] = defaultdict(list)
        for gpu in gpus:
            clique = clique_of(gpu)
            if clique is not None:
                inside[clique].append(gpu)
        for clique, enough in inside.items():
            if len(enough) >= ask.cards:
                cliques[clique].append((fit, enough))
    for _, pool in sorted(cliques.items(), key=lambda item: item[0]):
        yield True, pool
    yield False, list(island.free.values())


def _tightest(pool: Pool, count: int) -> Pool:
    """The nodes with the least left over, in the order of their names."""
    tight = sorted(pool, key=lambda pair: (pair[0].free_cards, pair[0].node.name))[:count]
    return sorted(tight, key=lambda pair: pair[0].node.name)


def _score(island: _Island, chosen: Pool, in_clique: bool) -> tuple[object, ...]:
    """The lowest is best: one clique, then the least left over, then the fastest fabric; then by name."""
    names = tuple(fit.node.name for fit, _ in chosen)
    slowest = min(island.rates[name] for name in names)
    return not in_clique, sum(fit.free_cards for fit, _ in chosen), -slowest, island.fabric, names


def _alone(node: Node, sizes: Mapping[str, int], ask: Ask) -> str:
    """Why a node that could take a part has not enough others to share the replica with. `sizes`: by fabric."""
    if not node.fabrics:
        return (
            f"has no fabric, and a replica over {ask.nodes} nodes needs one that they share; "
            f"declare it in its agent.yaml"
        )
    return "; ".join(
        f"of the {ask.nodes} nodes needed on fabric {each.name}, with cards of one type, there is room on "
        f"{sizes[each.name]}; free some on another"
        if each.up
        else f"fabric {each.name} is down: {each.reason or 'its agent does not say why'}; repair its link"
        for each in sorted(node.fabrics, key=lambda fabric: fabric.name)
    )
