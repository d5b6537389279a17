"""The page where operators manage one node: in use or not, labels, cores, engines and their builds, forgetting it."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from nodes import actions, builds, choosing, identity, keeping
from nodes.forms import NodeKeepForm
from nodes.labels import LabelFault
from nodes.models import Node, NodeState
from tenants.access import operators
from tenants.audit import Actor

ACTS: dict[str, tuple[Callable[..., object], str]] = {
    "cordon": (actions.cordon_node, "gets no new replicas; what runs there goes on"),
    "uncordon": (actions.uncordon_node, "gets replicas again"),
    "drain": (actions.drain_node, "is being drained: its replicas move"),
    "revoke": (identity.revoke_certificates, "is proven by no certificate any more"),
}
"""By the button's value: what it does, and what is then true of the node."""


@never_cache
@operators
@require_http_methods(["GET", "HEAD", "POST"])
def node_manage(request: HttpRequest, name: str) -> HttpResponse:
    node = get_object_or_404(Node, name=name)
    act = request.POST.get("act", "")
    if act == "remove":
        return _remove(request, node)
    if act == "build":
        return _choose(request, node)
    if act in ACTS:
        do, done = ACTS[act]
        do(node=node, actor=Actor.of(request))
        messages.success(request, f"Node {node.name} {done}.")
        return redirect("node-manage", name=node.name)
    form = NodeKeepForm(request.POST if request.method == "POST" else None, node=node)
    if form.is_valid():
        try:
            keeping.keep_node(node=node, actor=Actor.of(request), **{**form.cleaned_data, "labels": form.change()})
        except (LabelFault, keeping.NotKept) as fault:
            form.add_error(None, str(fault))
        else:
            messages.success(request, f"Node {node.name} is kept so.")
            return redirect("node-manage", name=node.name)
    removable = node.state in (NodeState.LOST, NodeState.JOINING)
    certificates = node.certificates.all()
    context = {
        "node": node,
        "form": form,
        "engines": choosing.lines_of(node),
        "removable": removable,
        "certificates": certificates,
    }
    return render(request, "nodes/node_manage.html", context)


def _choose(request: HttpRequest, node: Node) -> HttpResponse:
    engine, build = request.POST.get("engine", ""), request.POST.get("build", "")
    try:
        choosing.choose_build(node=node, engine=engine, build=build, actor=Actor.of(request))
    except keeping.NotKept as fault:
        messages.error(request, str(fault))
    else:
        messages.success(request, f"Chosen: node {node.name} {builds.in_words(engine, build)}.")
    return redirect("node-manage", name=node.name)


def _remove(request: HttpRequest, node: Node) -> HttpResponse:
    try:
        actions.remove_node(node=node, actor=Actor.of(request), force="force" in request.POST)
    except actions.NodeInUse as in_use:
        messages.error(request, f"{str(in_use)[:1].upper()}{str(in_use)[1:]}.")
        return redirect("node-manage", name=node.name)
    messages.success(request, f"Node {node.name} is forgotten, and nothing proves it any more.")
    return redirect("node-list")
