"""One pass's fleet as models that look for a place see it, and what is kept of that for the next pass. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

from catalog import spec
from nodes.fitting import ask_of
from nodes.ground import Answers, Ground, Without
from nodes.outlook import View, holds, is_idle, rank_in
from nodes.placement import OPEN, Placed, Shut, Unplaced, by_priority, quota_fault, refusals, seat
from nodes.plans import BackOff
from nodes.scaling import is_asked_for, is_on_demand
from nodes.state import Replica

RESIDENT = timedelta(minutes=3)
"""How long after becoming ready an on-demand replica makes way for no other."""
ASKED = 10_000
"""Questions to nodes after which a pass looks at no further model; the next one knows the answers and goes on."""
LOOKS = 4
"""Models that room is looked for in one pass, when what is remembered says that there might be some."""


@dataclass(frozen=True, slots=True)
class Lower:
    """Running replicas of lower capacity classes, and the fleet once all of them have gone."""

    replicas: Sequence[Replica]
    cleared: Without


class Memory:
    """What earlier passes found out, which spares later ones the same work; with an empty one plans are the same, but
    large fleets take several passes to be asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answers] = defaultdict(Answers)
        """Of the fleet as it is, under "", and without those that could make way."""
        self.refused: dict[tuple[str, bool], tuple[object, Unplaced]] = {}
        """By model and whether it was wary: on what it was refused, and why."""
        self.vain: dict[str, object] = {}
        """By model, on what no room could be made for it."""
        self.holders: tuple[object, int] = (None, 0)
        """Who held what at the last look for room, and how often that has changed."""

    def forget_all_but(self, models: Iterable[spec.Model]) -> None:
        """Only those that want a place now are of interest the next time."""
        asks = {model.name: {ask_of(model, profile) for profile in model.profiles} for model in models}
        self.refused = {key: known for key, known in self.refused.items() if key[0] in asks}
        self.vain = {model: known for model, known in self.vain.items() if model in asks}
        for answers in self.answers.values():
            answers.forget_all_but(set(itertools.chain.from_iterable(asks.values())))


class Scene:
    """`ending`: replicas that the pass takes down anyway. `kept`: nodes that are being cleared, and what others who
    ask for them are told."""

    def __init__(self, view: View, failed: Sequence[BackOff], ending: Set[str], memory: Memory) -> None:
        self.view, self.memory, self._ending = view, memory, ending
        self.kept: dict[str, str] = {}
        self.looks = 0
        self._lower: dict[int, Lower] = {}
        self._holds = {wary: holds(view, failed, wary=wary) for wary in (False, True)}
        self._asked_before = sum(each.asked for each in memory.answers.values())
        self.ground = Ground(view.cluster, memory.answers[""])

    @property
    def is_long(self) -> bool:
        """Whether this pass has asked as much as one may."""
        return sum(each.asked for each in self.memory.answers.values()) - self._asked_before >= ASKED

    # --- where a model may go ----------------------------------------------------------------------------------------
    def shut(self, model: spec.Model, profile: spec.Profile, *, wary: bool = False) -> Shut:
        """`wary`: not where it failed last either."""
        waits = self._holds[wary].get((model.name, profile.name))
        if waits is None:
            return self.kept or OPEN
        return {**self.kept, **waits}

    def keep(self, nodes: Iterable[str], model: spec.Model) -> None:
        self.kept = {**self.kept, **dict.fromkeys(nodes, f"is being cleared for {model.name}")}

    def is_wary(self, model: spec.Model) -> bool:
        """Whether there are nodes that it goes to only if there are no others."""
        return any(self.shut(model, each) != self.shut(model, each, wary=True) for each in model.profiles)

    def seek(self, model: spec.Model, *, wary: bool = False) -> Placed | Unplaced:
        """A place for one more replica as things are. One reason for every profile on every node."""
        profiles = [(each, self.shut(model, each, wary=wary)) for each in by_priority(model.profiles)]
        asked = [(ask_of(model, each), shut, quota_fault(model, each, self.ground)) for each, shut in profiles]
        on = self.ground.changed, asked
        known = self.memory.refused.get((model.name, wary))
        if known and known[0] == on:
            return known[1]
        found = self.spot(model, self.ground, wary=wary)
        if found:
            return found
        reasons = (refusals(model, each, self.ground, shut) for each, shut in profiles)
        unplaced = Unplaced(tuple(itertools.chain.from_iterable(reasons)))
        self.memory.refused[model.name, wary] = on, unplaced
        return unplaced

    def spot(self, model: spec.Model, ground: Ground | Without, *, wary: bool = False) -> Placed | None:
        for profile in by_priority(model.profiles):
            parts = seat(model, profile, ground, self.shut(model, profile, wary=wary))
            if parts:
                return Placed(profile, parts)
        return None

    # --- who could make way ------------------------------------------------------------------------------------------
    @cached_property
    def going(self) -> Set[str]:
        """Replicas on their way out, from this pass on at the latest."""
        replicas = self.view.cluster.replicas
        return {replica.name for replica in replicas if replica.wanted != "run" or replica.name in self._ending}

    @cached_property
    def going_of(self) -> Mapping[str, Set[str]]:
        """By model."""
        found: dict[str, set[str]] = defaultdict(set)
        for name in self.going:
            found[self.ground.replicas[name].model].add(name)
        return found

    @property
    def _running(self) -> Iterable[Replica]:
        return (replica for replica in self.view.cluster.replicas if replica.name not in self.going)

    def without(self, names: Iterable[str], remembered: str = "") -> Without:
        """Once these have gone too. `remembered`: what the answers are kept under, where they are many."""
        return self.ground.without({*self.going, *names}, self.memory.answers[remembered] if remembered else None)

    @cached_property
    def emptied(self) -> Without:
        """Once those on their way out have gone."""
        return self.without((), "emptied")

    @cached_property
    def idle(self) -> Sequence[Replica]:
        """Those that may be evicted, the one that was asked for the longest ago first."""
        view = self.view
        idle = (replica for replica in self._running if _may_be_evicted(replica, view))
        return sorted(idle, key=lambda r: (view.asked.get(r.model, r.made_at), r.made_at, r.name))

    @cached_property
    def vacated(self) -> Without:
        """Once all of those have."""
        return self.without((replica.name for replica in self.idle), "vacated")

    def lower(self, rank: int) -> Lower:
        """Running replicas of the capacity classes below."""
        if rank not in self._lower:
            view = self.view
            lower = [replica for replica in self._running if rank_in(replica, view) < rank]
            cleared = self.without((replica.name for replica in lower), f"cleared below {rank}")
            self._lower[rank] = Lower(lower, cleared)
        return self._lower[rank]

    def may_look(self, model: spec.Model) -> bool:
        """Whether it is worth the time to look for room: at most for LOOKS models a pass, and not again in vain."""
        if self.looks >= LOOKS or self.memory.vain.get(model.name) == self._on(model):
            return False
        self.looks += 1
        return True

    def looked_in_vain(self, model: spec.Model) -> None:
        self.memory.vain[model.name] = self._on(model)

    def _on(self, model: spec.Model) -> object:
        asks = [(ask_of(model, each), each.capacity_class, self.shut(model, each)) for each in model.profiles]
        return self._holders, self.ground.changed, model.team, asks

    @cached_property
    def _holders(self) -> int:
        """A number that changes when it does who holds what, who may be evicted, or what quotas leave."""
        view, quotas = self.view, self.view.cluster.quotas
        now = (
            [(r.name, r.model, r.wanted, rank_in(r, view), r.shards) for r in view.cluster.replicas],
            [replica.name for replica in self.idle],
            quotas,
            self.ground.teams if any(quotas.values()) else None,
        )
        before, count = self.memory.holders
        if now != before:
            self.memory.holders = now, count + 1
        return self.memory.holders[1]


def _may_be_evicted(replica: Replica, view: View) -> bool:
    """Never one of a model with a least number, over several nodes, of unknown use, or lately ready."""
    model = view.models.get(replica.model)
    return (
        model is not None
        and is_on_demand(model)
        and len(replica.shards) == 1
        and is_idle(replica)
        and replica.ready_at is not None
        and view.now - replica.ready_at >= RESIDENT
        and not is_asked_for(model, view)
    )
