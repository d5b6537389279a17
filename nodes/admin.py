"""The fleet in the admin: rows are what agents report, so they are read-only; nodes have the pages' actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from llmgw.core.admin_site import ReadOnly
from nodes import actions, identity
from nodes.models import Backoff, Certificate, Command, Event, ModelStatus, Node, Replica, ReplicaLoad, Shard
from nodes.snapshot import holdings
from tenants.audit import Actor


def dashboard(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """The admin opens on the same capacity as the dashboard."""
    return context | {"summary": holdings()}


class Listed(ReadOnly):
    """A list of its records does not read their long columns."""

    long: tuple[str, ...] = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request)
        listed = request.resolver_match and (request.resolver_match.url_name or "").endswith("_changelist")
        return rows.defer(*self.long) if listed else rows


OF_A_NODE = ("inventory", "load", "labels")


@admin.register(Node)
class NodeAdmin(Listed):
    long = OF_A_NODE
    list_display = ["name", "state", "address", "cordoned_at", "draining_at", "agent_version", "last_seen_at"]
    list_filter = ["state", ("cordoned_at", admin.EmptyFieldListFilter)]
    search_fields = ["name", "address"]
    exclude = ["token_digest", "connection"]
    actions = ["cordon", "uncordon", "drain", "revoke", "remove"]
    change_form_after_template = "nodes/_admin_manage.html"

    @admin.action(description="Cordon: nothing new goes there")
    def cordon(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        self._each(request, queryset, actions.cordon_node, "cordoned")

    @admin.action(description="Uncordon: back in use")
    def uncordon(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        self._each(request, queryset, actions.uncordon_node, "back in use")

    @admin.action(description="Drain: replicas move elsewhere")
    def drain(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        self._each(request, queryset, actions.drain_node, "draining")

    @admin.action(description="Revoke certificates: its stream ends")
    def revoke(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        self._each(request, queryset, identity.revoke_certificates, "certificates revoked")

    @admin.action(description="Remove: lost nodes and such that never joined")
    def remove(self, request: HttpRequest, queryset: QuerySet[Node]) -> None:
        for node in queryset:
            try:
                actions.remove_node(node=node, actor=Actor.of(request, via="admin"))
            except actions.NodeInUse as in_use:
                self.message_user(request, str(in_use), messages.ERROR)
            else:
                self.message_user(request, f"Node {node.name} removed.", messages.SUCCESS)

    def _each(self, request: HttpRequest, queryset: QuerySet[Node], action: Callable[..., object], done: str) -> None:
        names = [node.name for node in queryset if action(node=node, actor=Actor.of(request, via="admin"))]
        self.message_user(request, f"{', '.join(names) or 'No node'}: {done}.", messages.SUCCESS)


@admin.register(Certificate)
class CertificateAdmin(Listed):
    long = tuple(f"node__{name}" for name in OF_A_NODE)
    list_display = ["serial", "node", "made_at", "made_by", "expires_at"]
    list_select_related = ["node"]
    search_fields = ["serial", "node__name"]


@admin.register(Replica)
class ReplicaAdmin(Listed):
    long = ("tail", "adapters")
    list_display = ["name", "model", "profile", "engine", "wanted", "state", "state_at", "ready_at"]
    list_filter = ["state", "wanted", "engine"]
    search_fields = ["name", "model", "profile", "reason"]


@admin.register(Shard)
class ShardAdmin(Listed):
    long = ("gpus", "progress", "replica__tail", *(f"node__{name}" for name in OF_A_NODE))
    list_display = ["replica", "rank", "node", "state", "port", "pid", "cores", "changed_at"]
    list_filter = ["state"]
    list_select_related = ["replica", "node"]
    search_fields = ["replica__name", "node__name"]


@admin.register(Command)
class CommandAdmin(Listed):
    long = ("body", *(f"node__{name}" for name in OF_A_NODE))
    list_display = ["id", "node", "made_at", "sent_at", "acknowledged_at", "ok", "error"]
    list_filter = ["ok"]
    list_select_related = ["node"]
    search_fields = ["node__name", "error"]
    ordering = ["-pk"]


@admin.register(Event)
class EventAdmin(ReadOnly):
    list_display = ["at", "kind", "model", "replica", "node", "text"]
    list_filter = ["kind"]
    search_fields = ["model", "replica", "node", "text"]


@admin.register(Backoff)
class BackoffAdmin(Listed):
    long = ("tail",)
    list_display = ["model", "profile", "failures", "next_try_at", "reason"]
    search_fields = ["model", "profile", "reason"]


@admin.register(ModelStatus)
class ModelStatusAdmin(Listed):
    long = ("reasons",)
    list_display = ["model", "reasons_at", "demand_at", "used_at"]
    search_fields = ["model"]


@admin.register(ReplicaLoad)
class ReplicaLoadAdmin(ReadOnly):
    list_display = ["replica", "gateway", "in_flight", "running", "waiting", "kv_used", "at"]
    search_fields = ["replica", "gateway"]
