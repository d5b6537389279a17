"""What operators set for a node beside its life: labels, reserved cores, engines kept off; what they send it for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db import transaction
from django.utils import timezone

from agent import protocol
from catalog.spec import ENGINES
from llmgw.core import doorbell
from nodes import commands, intake, labels, timeline
from nodes.models import Command, Node
from nodes.poke import poke
from tenants import audit
from tenants.audit import Actor

MAX_CORES = 4096
MAX_SOURCE = 1000


class NotKept(Exception):
    """Why a node cannot be kept so, in one sentence with the next step."""


@transaction.atomic
def keep_node(
    *,
    node: Node,
    actor: Actor,
    labels: Mapping[str, str | None] | None = None,
    reserved_cores: float | None = None,
    disabled_engines: Iterable[str] | None = None,
    pinned_address: str | None = None,
) -> None:
    """Any of these at once: all of it, or nothing; None leaves as it is. Raises labels.LabelFault and NotKept."""
    if labels is not None:
        label_node(node=node, change=labels, actor=actor)
    if reserved_cores is not None:
        reserve_cores(node=node, cores=reserved_cores, actor=actor)
    if disabled_engines is not None:
        disable_engines(node=node, engines=disabled_engines, actor=actor)
    if pinned_address is not None:
        pin_address(node=node, address=pinned_address, actor=actor)


@transaction.atomic
def label_node(*, node: Node, change: Mapping[str, str | None], actor: Actor) -> bool:
    """Set labels, or with None take away what was set. False when nothing changes. Raises labels.LabelFault."""
    row = Node.objects.select_for_update().get(pk=node.pk)
    after = labels.changed(row.told_labels, row.set_labels, change)
    if after == row.set_labels:
        return False
    before, row.set_labels = row.set_labels, after
    row.labels = labels.effective(row.told_labels, after)
    row.save(update_fields=["labels", "set_labels"])
    said = ", ".join(f"{name}={value}" if value is not None else f"{name} taken away" for name, value in change.items())
    _note(row, actor, "label node", f"labels of node {node.name} were changed by {actor.name}: {said}", before, after)
    return True


@transaction.atomic
def reserve_cores(*, node: Node, cores: float, actor: Actor) -> bool:
    """Keep CPU cores of a node from replicas. False when it was so already. Raises NotKept."""
    if not 0 <= cores <= MAX_CORES:
        raise NotKept(f"Reserve 0 to {MAX_CORES} cores.")
    row = Node.objects.select_for_update().get(pk=node.pk)
    if row.reserved_cores == cores:
        return False
    before, row.reserved_cores = row.reserved_cores, cores
    row.save(update_fields=["reserved_cores"])
    text = f"{cores:g} cores of node {node.name} were reserved by {actor.name}: no replica is counted on them"
    _note(row, actor, "reserve cores", text, {"reserved_cores": before}, {"reserved_cores": cores})
    return True


@transaction.atomic
def disable_engines(*, node: Node, engines: Iterable[str], actor: Actor) -> bool:
    """Which engines get no new replicas on a node; the others do. False when it was so already. Raises NotKept."""
    wanted = sorted(set(engines))
    for engine in wanted:
        if engine not in ENGINES:
            raise NotKept(f"There is no engine {engine[:40]!r}; known: {', '.join(ENGINES)}.")
    row = Node.objects.select_for_update().get(pk=node.pk)
    before = sorted(row.disabled_engines)
    if before == wanted:
        return False
    row.disabled_engines = wanted
    row.save(update_fields=["disabled_engines"])
    what = f"no new replicas of {', '.join(wanted)}" if wanted else "replicas of every engine"
    text = f"node {node.name} gets {what}, as {actor.name} decided"
    _note(row, actor, "disable engines", text, {"disabled_engines": before}, {"disabled_engines": wanted})
    return True


@transaction.atomic
def pin_address(*, node: Node, address: str, actor: Actor) -> bool:
    """Where gateways reach a node's engines, whatever its agent says; empty: where that says, from its next register
    on. False when it was so already. Raises NotKept."""
    if address and (not intake.is_address(address) or intake.is_nowhere(address)):
        raise NotKept(f"{address[:80]!r} is no host name and no IP address of a machine.")
    row = Node.objects.select_for_update().get(pk=node.pk)
    if row.pinned_address == address:
        return False
    before, row.pinned_address = row.pinned_address, address
    row.address = address or row.address
    row.save(update_fields=["pinned_address", "address"])
    what = f"is reached at {address}, whatever its agent says" if address else "is reached where its agent says"
    text = f"node {node.name} {what}, as {actor.name} decided"
    _note(row, actor, "pin address", text, {"address": before}, {"address": address})
    doorbell.table_changed()
    return True


def fetch_ahead(*, node: Node, source: str, actor: Actor) -> Command:
    """Bring weights onto a node before a replica needs them. Raises NotKept."""
    if not 1 <= len(source) <= MAX_SOURCE or not source.isprintable():
        raise NotKept(f"A source is one line of 1 to {MAX_SOURCE} characters.")
    return _send(node, protocol.Fetch(source=source), actor, "fetch ahead", source)


def install_ahead(*, node: Node, engine: str, actor: Actor) -> Command:
    """Install an engine on a node before a replica needs it. Raises NotKept."""
    if engine not in ENGINES:
        raise NotKept(f"There is no engine {engine[:40]!r}; known: {', '.join(ENGINES)}.")
    return _send(node, protocol.InstallEngine(engine=engine), actor, "install ahead", engine)


@transaction.atomic
def _send(node: Node, body: protocol.Body, actor: Actor, action: str, what: str) -> Command:
    row = commands.store(node=node.name, body=body, now=timezone.now())
    audit.record(actor, action, node.name, after={"what": what})
    timeline.note(action, f"node {node.name} is to get {what}, for {actor.name}", at=timezone.now(), node=node.name)
    return row


def _note(
    node: Node, actor: Actor, action: str, text: str, before: Mapping[str, object], after: Mapping[str, object]
) -> None:
    audit.record(actor, action, node.name, before=dict(before), after=dict(after))
    timeline.note(action, text, at=timezone.now(), node=node.name)
    poke()
