"""The cluster's pages: what is true now, from the same Summary as `llmgw ctl status`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from agent import protocol
from catalog.models import Model
from nodes import actions, builds, listing, networks, snapshot
from nodes.alerts import Alert
from nodes.fabrics import PortLine
from nodes.forms import NodeForm
from nodes.hardware import cards_in_words, hardware
from nodes.lines import ModelLine, NodeLine, ReplicaLine
from nodes.models import Event, Node, Replica, Shard
from tenants import usage
from tenants.access import operators, person
from tenants.audit import Actor
from tenants.models import Usage

ROWS = 100
"""Rows a list page shows before it offers the next ones."""
ROWS_ON_DASHBOARD = 8
ROWS_OF_A_MODEL = 20
EVENTS = 30
FINDINGS = 20
SETTLED = ("ready", "failed", "stopped")
"""States of replicas that are not on their way; why one failed stands beside its model."""
URGENT = {"lost": 0, "unreachable": 0, "failed": 0, "cannot run": 1, "joining": 2, "loading": 2, "starting": 2}


Line = TypeVar("Line", NodeLine, ModelLine, ReplicaLine)


@require_safe
@operators
def dashboard(request: HttpRequest) -> HttpResponse:
    summary = snapshot.current_summary()
    few_nodes, few_replicas = (len(lines) <= ROWS_ON_DASHBOARD for lines in (summary.nodes, summary.replicas))
    apart = [line for line in summary.nodes if line.state != "ready" or line.cordoned or line.draining]
    on_their_way = [line for line in summary.replicas if line.state not in SETTLED]
    context = {
        "summary": summary,
        "alerts": _alike_together(summary.alerts),
        "models": _urgent_first(summary.models),
        "nodes": _urgent_first(summary.nodes if few_nodes else apart),
        "all_nodes": few_nodes,
        "replicas": _urgent_first(summary.replicas if few_replicas else on_their_way),
        "all_replicas": few_replicas,
        "requests": usage.page(Usage.objects.visible_to(person(request)), size=8).rows,
    }
    return _page_or_fragment(request, "dashboard", context)


@require_safe
@operators
def node_list(request: HttpRequest) -> HttpResponse:
    return _page_or_fragment(request, "node_list", _listed(request, snapshot.node_lines(), listing.NODES))


@never_cache
@operators
def node_make(request: HttpRequest) -> HttpResponse:
    """The answer to the form is the only place where the join token is ever shown."""
    form = NodeForm(request.POST if request.method == "POST" else None)
    if not form.is_valid():
        return render(request, "nodes/node_make.html", {"form": form})
    try:
        node, token = actions.make_node(name=form.cleaned_data["name"], actor=Actor.of(request))
    except actions.NodeExists as exists:  # made since the form looked
        form.add_error("name", str(exists))
        return render(request, "nodes/node_make.html", {"form": form})
    return render(request, "nodes/node_made.html", {"node": node, "token": token})


@require_safe
@operators
def node_detail(request: HttpRequest, name: str) -> HttpResponse:
    node = get_object_or_404(Node, name=name)
    told = _inventory(node)
    shards = Shard.objects.filter(node=node).exclude(state__in=protocol.ENDED).values_list("replica_id", "gpus")
    holders = {card: replica for replica, cards in shards for card in cards}
    context = {
        "node": node,
        "line": _named(snapshot.node_lines(name), name),
        "replicas": snapshot.replica_lines(timezone.now(), node=name)[:ROWS],
        "inventory": told,
        "engines": builds.lines(node.engine_builds, told if node.inventory else None),
        "hardware": hardware(told, msgspec.convert(node.load, protocol.NodeLoad), holders),
        "files": told.files[:ROWS],
        "events": Event.objects.filter(node=name)[:EVENTS],
    }
    return _page_or_fragment(request, "node_detail", context)


@require_safe
@operators
def fabric_list(request: HttpRequest) -> HttpResponse:
    found, fabric = networks.current_map(), request.GET.get("fabric", "")
    marks = [("warn", line.name, mark) for line in found.fabrics for mark in line.marks]
    down = [("down", line.name, reason) for line in found.fabrics for reason in line.down]
    ports = networks.of_fabric(found, fabric) if fabric else found.ports
    shown, after = _nodes_after(ports, request.GET.get("after", ""))
    context = {
        "map": found,
        "findings": [*marks, *down][:FINDINGS],
        "more_findings": max(0, len(marks) + len(down) - FINDINGS),
        "fabric": fabric,
        "none": networks.NO_FABRIC,
        "ports": shown,
        "total": len(ports),
        "after": after,
    }
    return _page_or_fragment(request, "fabric_list", context)


@require_safe
@operators
def model_list(request: HttpRequest) -> HttpResponse:
    lines = snapshot.model_lines(timezone.now())
    return _page_or_fragment(request, "model_list", _listed(request, lines, listing.MODELS))


@require_safe
@operators
def model_detail(request: HttpRequest, name: str) -> HttpResponse:
    model, now = get_object_or_404(Model, name=name), timezone.now()
    context = {
        "model": model,
        "line": _named(snapshot.model_lines(now, name), name),
        "profiles": model.profiles.all(),
        "replicas": _urgent_first(snapshot.replica_lines(now, model=name), ROWS_OF_A_MODEL),
        "events": Event.objects.filter(model=name)[:EVENTS],
    }
    return _page_or_fragment(request, "model_detail", context)


@require_safe
@operators
def replica_list(request: HttpRequest) -> HttpResponse:
    model = request.GET.get("model", "").replace("\0", "")
    lines = snapshot.replica_lines(timezone.now(), model=model)
    return _page_or_fragment(request, "replica_list", {**_listed(request, lines, listing.REPLICAS), "model": model})


@require_safe
@operators
def replica_detail(request: HttpRequest, name: str) -> HttpResponse:
    replica = get_object_or_404(Replica, name=name)
    shards = replica.shards.select_related("node").order_by("rank")
    context = {
        "replica": replica,
        "line": _named(snapshot.replica_lines(timezone.now(), name=name), name),
        "shards": [_shard(shard) for shard in shards],
        "events": Event.objects.filter(replica=name)[:EVENTS],
    }
    return _page_or_fragment(request, "replica_detail", context)


def _inventory(node: Node) -> protocol.Inventory:
    return msgspec.convert(node.inventory or {"hostname": ""}, protocol.Inventory)


def _shard(shard: Shard) -> dict[str, object]:
    progress = msgspec.convert(shard.progress, protocol.Progress)
    return {
        "row": shard,
        "cards": cards_in_words(shard.gpus, _inventory(shard.node).gpus),
        "note": progress.note,
        "done": progress.done_bytes,
        "total": progress.total_bytes,
    }


def _nodes_after(ports: Sequence[PortLine], after: str) -> tuple[list[PortLine], str]:
    """About ROWS ports of the nodes after one by name, no node in part; and the last of them, if there are more."""
    rest = [line for line in ports if line.node > after]
    if len(rest) <= ROWS:
        return rest, ""
    last = rest[ROWS - 1].node
    shown = [line for line in rest if line.node <= last]
    return shown, last if len(shown) < len(rest) else ""


def _page_or_fragment(request: HttpRequest, stem: str, context: Mapping[str, object]) -> HttpResponse:
    """What htmx swaps is the file that the page includes."""
    return render(request, f"nodes/{'_' if getattr(request, 'htmx', False) else ''}{stem}.html", dict(context))


def _listed(request: HttpRequest, lines: Sequence[Line], columns: listing.Columns[Line]) -> dict[str, object]:
    """One page of a list, narrowed by the chips and in the order that the address names."""
    show = request.GET.get("show", "")
    order = listing.order_of(request.GET.get("sort", ""), columns)
    narrowed = [line for line in lines if not show or line.state == show]
    rest = listing.after(listing.sort(narrowed, columns, order), request.GET.get("after", ""), order)
    states = sorted({line.state for line in lines})
    return {
        "lines": rest[:ROWS],
        "after": rest[ROWS - 1].name if len(rest) > ROWS else "",
        "order": order,
        "sort": str(order),
        "show": show,
        "states": states,
        "total": len(lines),
    }


def _named(lines: Sequence[Line], name: str) -> Line | None:
    return next((line for line in lines if line.name == name), None)


def _urgent_first(lines: Sequence[Line], most: int = ROWS_ON_DASHBOARD) -> list[Line]:
    """What needs a look first; the page links to the whole list."""
    urgency: Callable[[Line], int] = lambda line: URGENT.get(line.state, 3)  # noqa: E731
    return sorted(lines, key=urgency)[:most]


def _alike_together(alerts: Sequence[Alert]) -> list[tuple[Alert, int]]:
    """Alerts that say the same of several subjects as one, with how many more there are; in the order they came."""
    alike: dict[tuple[str, str], list[Alert]] = {}
    for alert in alerts:
        alike.setdefault((alert.state, alert.text.replace(alert.subject, "")), []).append(alert)
    return [(same[0], len(same) - 1) for same in alike.values()]
