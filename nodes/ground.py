"""What placement looks at: nodes, what is held of them, and what they answer to asks. Pure.

An answer is remembered from pass to pass while nothing changes that it depends on (`fitting.situation`): a fleet of a
thousand nodes is asked once, and then only the nodes where something happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property

from nodes.fitting import Ask, Fit, consider, disk_free, situation
from nodes.holdings import NOTHING, Used, held_by_teams, profiles, residents, used_by
from nodes.state import Cluster, Node, TurnedDown


@dataclass(slots=True)
class Answered:
    """What nodes answer to one ask, in the order of their names. `fits`: those that could take a shard."""

    at: int = 0
    by_node: dict[str, Fit | TurnedDown] = field(default_factory=dict)
    fits: dict[str, Fit] = field(default_factory=dict)


class Answers:
    """The answers of a fleet, as it is or as it would be without some replicas. `changed`: the look at which any last
    could; `asked`: how many had to be given."""

    def __init__(self) -> None:
        self.changed = self.asked = 0
        self._look = self._named = 0
        self._nodes: Sequence[Node] = ()
        self._used: Mapping[str, Used] = {}
        self._since: dict[str, tuple[tuple[object, ...], int]] = {}
        self._since_then: dict[int, Sequence[Node]] = {}
        self._known: dict[Ask, Answered] = {}

    def look(self, nodes: Sequence[Node], used: Mapping[str, Used]) -> None:
        """From now on these are asked."""
        self._look += 1
        before, self._since = self._since, {}
        for node in nodes:
            now = situation(node, used.get(node.name, NOTHING))
            was = before.get(node.name)
            self._since[node.name] = was if was and was[0] == now else (now, self._look)
        if self._since.keys() != before.keys():
            self._named = self.changed = self._look
        elif any(since == self._look for _, since in self._since.values()):
            self.changed = self._look
        self._nodes, self._used = nodes, used
        self._since_then = {}

    def forget_all_but(self, asks: Set[Ask]) -> None:
        self._known = {ask: known for ask, known in self._known.items() if ask in asks}

    def to(self, ask: Ask) -> Answered:
        known = self._known.setdefault(ask, Answered())
        if known.at < self._named:
            before = known.by_node
            known.by_node = {
                node.name: self._ask(node, ask) if self._since[node.name][1] > known.at else before[node.name]
                for node in self._nodes
            }
            known.fits = {name: answer for name, answer in known.by_node.items() if isinstance(answer, Fit)}
        elif known.at < self.changed:
            for node in self._news(known.at):
                known.by_node[node.name] = answer = self._ask(node, ask)
                known.fits.pop(node.name, None)
                if isinstance(answer, Fit):
                    known.fits[node.name] = answer
        known.at = self._look
        return known

    def _news(self, at: int) -> Sequence[Node]:
        """Nodes that something has happened to since that look."""
        if at not in self._since_then:
            self._since_then[at] = [node for node in self._nodes if self._since[node.name][1] > at]
        return self._since_then[at]

    def _ask(self, node: Node, ask: Ask) -> Fit | TurnedDown:
        self.asked += 1
        answer = consider(node, ask, self._used.get(node.name, NOTHING))
        return TurnedDown(node.name, ask.profile, answer) if isinstance(answer, str) else answer


class Ground:
    """A cluster to place on. `answers`: what is remembered of it."""

    def __init__(self, cluster: Cluster, answers: Answers | None = None) -> None:
        self.cluster = cluster
        self.nodes = {node.name: node for node in sorted(cluster.nodes, key=lambda node: node.name)}
        self.replicas = {replica.name: replica for replica in cluster.replicas}
        self._known = profiles(cluster)
        self._residents = residents(cluster.replicas)
        self.used = {name: used_by(here, self._known) for name, here in self._residents.items()}
        self._answers = answers or Answers()
        self._answers.look(tuple(self.nodes.values()), self.used)

    @property
    def changed(self) -> int:
        """While this stays the same, so does every answer."""
        return self._answers.changed

    def fits(self, ask: Ask) -> Mapping[str, Fit]:
        return self._answers.to(ask).fits

    def answers(self, ask: Ask) -> Mapping[str, Fit | TurnedDown]:
        return self._answers.to(ask).by_node

    @property
    def quotas(self) -> Mapping[str, Mapping[str, int]]:
        return self.cluster.quotas

    @cached_property
    def teams(self) -> Mapping[tuple[str, str], Mapping[str, int]]:
        return held_by_teams(self.cluster)

    @cached_property
    def labels(self) -> Set[tuple[str, str]]:
        return {label for node in self.nodes.values() for label in node.labels}

    @cached_property
    def classes(self) -> Mapping[str, int]:
        """How many cards of each class there are."""
        return Counter(gpu.gpu_class for node in self.nodes.values() for gpu in node.gpus)

    @cached_property
    def most_disk(self) -> tuple[int, str] | None:
        """What the node with the most disk has free, and its name; None where a node does not say."""
        return _most({name: disk_free(node) for name, node in self.nodes.items()})

    @cached_property
    def largest_disk(self) -> tuple[int, str] | None:
        """How large the largest disk is, free or not, and whose; None where a node does not say."""
        return _most({name: node.disk_bytes for name, node in self.nodes.items()})

    def without(self, gone: Set[str], answers: Answers | None = None) -> Without:
        """What it would be, had these replicas gone."""
        return Without(self, gone, answers)

    def used_without(self, node: str, gone: Set[str]) -> Used:
        here = self._residents.get(node, ())
        return used_by(((replica, shard) for replica, shard in here if replica.name not in gone), self._known)


class Without:
    """A ground without some replicas: only the nodes that they are on answer anew, or from `answers`, where so many
    would go that what they say is worth remembering."""

    def __init__(self, ground: Ground, gone: Set[str], answers: Answers | None) -> None:
        self.quotas = ground.quotas
        self._ground, self._gone, self._answers = ground, gone, answers
        homes = {shard.node for name in gone for shard in ground.replicas[name].shards}
        self._used = {name: ground.used_without(name, gone) for name in homes & ground.nodes.keys()}
        if answers:
            answers.look(tuple(ground.nodes.values()), {**ground.used, **self._used})

    @cached_property
    def teams(self) -> Mapping[tuple[str, str], Mapping[str, int]]:
        cluster = self._ground.cluster
        replicas = tuple(replica for replica in cluster.replicas if replica.name not in self._gone)
        return held_by_teams(replace(cluster, replicas=replicas))

    def fits(self, ask: Ask) -> Mapping[str, Fit]:
        if self._answers:
            return self._answers.to(ask).fits
        others = {name: fit for name, fit in self._ground.fits(ask).items() if name not in self._used}
        return others | self.fits_on(self._used, ask)

    def fits_on(self, nodes: Iterable[str], ask: Ask) -> dict[str, Fit]:
        """Of these nodes alone."""
        ground = self._ground
        used = {name: self._used.get(name) or ground.used.get(name, NOTHING) for name in nodes}
        answers = {name: consider(ground.nodes[name], ask, taken) for name, taken in used.items()}
        return {name: answer for name, answer in answers.items() if isinstance(answer, Fit)}


def _most(sizes: Mapping[str, int | None]) -> tuple[int, str] | None:
    known = [(size, name) for name, size in sizes.items() if size is not None]
    return max(known, key=lambda each: each[0]) if known and len(known) == len(sizes) else None
