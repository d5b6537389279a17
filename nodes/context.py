"""What pages of other rooms show of the cluster: the sidebar's counts, and the cards that teams hold. Read lazily."""

from __future__ import annotations

from typing import Any

from django.db.models import Count, QuerySet, Value
from django.http import HttpRequest
from django.utils.functional import SimpleLazyObject

from catalog.models import Model
from nodes.models import Node, Replica
from nodes.snapshot import quota_lines
from nodes.totals import QuotaLine
from tenants.models import User


def sidebar_counts(request: HttpRequest) -> dict[str, object]:
    """How many of each there are, counted only when a whole page is drawn, in one query."""
    return {"counts": SimpleLazyObject(lambda: _counts(getattr(request, "user", None)))}


class CardQuotas:
    """By a team's slug, the cards that its models hold and may hold."""

    def get(self, team: str) -> tuple[QuotaLine, ...]:
        return quota_lines(team)


def card_quotas(request: HttpRequest) -> dict[str, object]:
    """Read only where a page shows them."""
    return {"card_quotas": CardQuotas()}


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
