"""How many of each there are, beside the sidebar's words. Counted only when a whole page is drawn, in one query."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, QuerySet, Value
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from catalog.models import Model
from nodes.models import Node, Replica
from tenants.models import User


def sidebar_counts(request: HttpRequest) -> dict[str, object]:
    return {"counts": SimpleLazyObject(lambda: _counts(getattr(request, "user", None)))}


def _counts(user: object) -> dict[str, int]:
    """By the label of the sidebar's entry; nothing for people who do not see the cluster."""
    if not (isinstance(user, User) and user.is_operator):
        return {}
    nodes, models, replicas = _count("Nodes", Node), _count("Models", Model), _count("Replicas", Replica)
    return dict(nodes.union(models, replicas, all=True))


def _count(label: str, model: Any) -> QuerySet[Any]:
    rows: QuerySet[Any] = model.objects.order_by().annotate(label=Value(label)).values_list("label")
    counted: QuerySet[Any] = rows.annotate(count=Count("pk"))
    return counted
