"""How many replicas a model should have, and which of them are to go. Pure (ND-41, ND-45, ND-46).

1. Nobody asked for an on-demand model for its idle time: its idle replicas go.
2. Replicas of a changed profile or on an emptied node are replaced one at a time, new first where there is room.
3. More than the most: the least missed go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from catalog import spec
from nodes.outlook import View, is_idle, least_missed, retire
from nodes.plans import Drain, Stop
from nodes.state import Replica

ASKED_FOR = timedelta(minutes=1)
"""Demand as young as this starts a model, and keeps it from making room for another. Gateways tell it every few
seconds while somebody waits. One time for both: a model that made room is not wanted itself, so two never thrash."""


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


def demand(model: spec.Model, live: Sequence[Replica], view: View) -> Demand:
    """`live`: its replicas that are to go on as far as they alone are concerned."""
    lower, upper = bounds(model, view)
    if upper == 0:
        return Demand(model, 0, short=False, wants_one=False)
    unasked = _unasked(model, live, view)
    if unasked:
        return Demand(model, len(live) - len(unasked), short=False, wants_one=False, actions=unasked)
    why = {replica.name: _why_leave(replica, view) for replica in live}
    staying = [replica for replica in live if not why[replica.name]]
    leaving = sorted((replica for replica in live if why[replica.name]), key=least_missed)
    actions = [retire(replica, why[replica.name]) for replica in leaving if replica.state != "ready"]
    leaving = leaving[len(actions) :]
    ready = [replica for replica in staying if replica.state == "ready"]
    keep = min(max(lower, len(leaving)), upper)
    count = len(staying) + len(leaving)
    settled = len(ready) == len(staying)
    wants_one = False
    if not leaving:
        surplus = sorted(staying, key=least_missed)[: max(0, len(staying) - upper)]
        actions += [retire(replica, f"{model.name} runs {count}, at most {upper} are wanted") for replica in surplus]
        wants_one = count < lower
    elif len(ready) + len(leaving) > keep:
        actions.append(retire(leaving[0], why[leaving[0].name]))
    else:
        wants_one = count < lower or settled  # else a replacement is on the way
    return Demand(model, count, count < lower, wants_one, tuple(actions), tuple(leaving) if settled else ())


def bounds(model: spec.Model, view: View) -> tuple[int, int]:
    """How many replicas the model must have and may have. One that is on its way counts as one that it has."""
    if model.external is not None or not model.profiles:
        return 0, 0
    lower, upper = model.scaling.min, max(model.scaling.min, model.scaling.max)
    return (max(lower, 1) if upper and is_asked_for(model, view) else lower), upper


def is_on_demand(model: spec.Model) -> bool:
    return model.scaling.min == 0 < model.scaling.max


def is_asked_for(model: spec.Model, view: View) -> bool:
    """Somebody wants it now."""
    asked_at = view.asked.get(model.name)
    recent = min(ASKED_FOR, timedelta(seconds=model.scaling.idle_timeout_s))
    return asked_at is not None and view.now - asked_at < recent


def _unasked(model: spec.Model, live: Sequence[Replica], view: View) -> tuple[Drain | Stop, ...]:
    """The idle replicas of an on-demand model that nobody asked for in its idle time, counted from their start: one
    that still loads is none of them, and neither is one whose use is unknown."""
    if not is_on_demand(model):
        return ()
    limit_s = model.scaling.idle_timeout_s
    found = []
    for replica in live:
        asked_at = view.asked.get(model.name)
        began = replica.ready_at or view.now
        since = max(asked_at, began) if asked_at else began
        if is_idle(replica) and view.now - since >= timedelta(seconds=limit_s):
            found.append(retire(replica, f"nobody asked for {model.name} for {limit_s} s (its idle time)"))
    return tuple(found)


def _why_leave(replica: Replica, view: View) -> str:
    if replica.profile_digest != view.digests[replica.model, replica.profile]:
        return f"profile {replica.profile} of {replica.model} changed"
    emptied = (shard.node for shard in replica.shards if view.nodes[shard.node].draining)
    return next((f"node {node} is being drained" for node in emptied), "")
