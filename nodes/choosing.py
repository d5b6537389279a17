"""Which builds of engines nodes use: chosen by operators, kept here, told to agents until they go by it (AG-32)."""

from __future__ import annotations

from datetime import datetime

import msgspec
from django.db import transaction
from django.utils import timezone

from agent import protocol
from nodes import builds, commands, timeline
from nodes.builds import EngineLine
from nodes.keeping import NotKept
from nodes.models import Node
from nodes.poke import poke
from tenants import audit
from tenants.audit import Actor


@transaction.atomic
def choose_build(*, node: Node, engine: str, build: str, actor: Actor) -> bool:
    """Choose AUTO, NONE or a build by its name, for a node that may be away. What runs there is not touched.

    False when that was chosen already; a node that does not go by it is told again all the same. Raises NotKept.
    """
    row = Node.objects.select_for_update().get(pk=node.pk)
    told, now = _told(row), timezone.now()
    if fault := builds.objection(engine, build, told):
        raise NotKept(fault)
    before = row.engine_builds
    is_new = bool(before.get(engine) != build)
    if is_new:
        row.engine_builds = {**before, engine: build}
        row.save(update_fields=["engine_builds"])
        audit.record(actor, "choose build", row.name, before=before, after=row.engine_builds)
        text = f"node {row.name} {builds.in_words(engine, build)}, as {actor.name} decided"
        timeline.note("choose build", text, at=now, node=row.name)
    if is_new or not told or builds.to_tell({engine: build}, told.engine_builds):
        _tell(row.name, engine, build, now)
    poke()
    return is_new


def agree(node: Node, told: dict[str, str] | None, now: datetime) -> None:
    """A node has registered and goes by `told`: what was chosen here wins, and what nobody chose here is kept. Changes
    `node` without saving it; called with its row locked."""
    for engine, build in builds.found(node.engine_builds, told).items():
        node.engine_builds = {**node.engine_builds, engine: build}
        text = f"node {node.name} {builds.in_words(engine, build)}: its agent was told so before this store knew it"
        timeline.note("choose build", text, at=now, node=node.name)
    for engine, build in builds.to_tell(node.engine_builds, told).items():
        _tell(node.name, engine, build, now)


def lines_of(node: Node) -> tuple[EngineLine, ...]:
    """What pages, API and `ctl` show of a node's engines."""
    return builds.lines(node.engine_builds, _told(node))


def _tell(node: str, engine: str, build: str, now: datetime) -> None:
    """By one command an engine: an earlier choice that was not answered yet must not come after this one."""
    waiting = commands.unanswered_choices(node, engine)
    if waiting.filter(body__build=build).exists():
        return
    waiting.delete()
    commands.store(node=node, body=protocol.SetEngineBuild(engine=engine, build=build), now=now)


def _told(node: Node) -> protocol.Inventory | None:
    return msgspec.convert(node.inventory, protocol.Inventory) if node.inventory else None
