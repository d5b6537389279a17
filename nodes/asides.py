"""What a summary says beside the cluster itself, read from rows: use, certificates. Query counts are pinned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Count, F, Max, OuterRef, Q, Subquery, Sum
from django.db.models.functions import Coalesce

import catalog.models
from nodes import contest
from nodes.alerts import WARN_BEFORE, Certified, Claim
from nodes.models import Certificate, Node, NodeState
from nodes.summary import UserLine
from tenants.models import Usage, UsageSlot
from tenants.usage import QUARTER

LATELY = timedelta(minutes=5)
"""Who uses the cluster now: whose requests ended in this time."""
USERS = 50


def users(now: datetime) -> tuple[UserLine, ...]:
    """Who uses the cluster and which models, the busiest first. One query, whose cost does not grow with the table:
    with a time on one side alone SQLite looks through the requests of all projects. Clocks differ by less than that."""
    lately = Usage.objects.filter(at__gte=now - LATELY, at__lt=now + LATELY)
    groups = (
        lately.filter(project__isnull=False)
        .values("project_id", "project__name", "project__team__name", "model")
        .annotate(requests=Count("pk"), prompt=Sum("prompt_tokens"), completion=Sum("completion_tokens"))
        .order_by(F("requests").desc(), "project__name", "project_id", "model")[:USERS]
    )
    minutes = LATELY.total_seconds() / 60
    return tuple(
        UserLine(
            project_id=group["project_id"],
            project=group["project__name"],
            team=group["project__team__name"],
            model=group["model"],
            requests=group["requests"],
            tokens_per_minute=((group["prompt"] or 0) + (group["completion"] or 0)) / minutes,
        )
        for group in groups
    )


def last_used(models: Collection[str]) -> Mapping[str, datetime]:
    """By each of these names the end of the last quarter of an hour in which a request ended. One query that looks at
    one row a model; none for no names."""
    latest = UsageSlot.objects.filter(model=OuterRef("name")).order_by("-at").values("at")[:1]
    rows = catalog.models.Model.objects.filter(name__in=models).order_by()
    found = rows.values_list("name", Subquery(latest))
    return {name: at + QUARTER for name, at in found if at is not None}


def ending(now: datetime) -> tuple[Certified, ...]:
    """Nodes whose last certificate ends soon or has ended. One that was renewed counts once its agent has come with it.
    One query."""
    proved = Max("expires_at", filter=Q(proved_at__isnull=False))
    until = Coalesce(proved, Max("expires_at"))
    rows = Certificate.objects.order_by().values_list("node_id").annotate(until=until)
    return tuple(Certified(node, until) for node, until in rows.filter(until__lte=now + WARN_BEFORE))


def claims(now: datetime) -> tuple[Claim, ...]:
    """Nodes that others came as lately, and those that share an address. One query."""
    heard = Node.objects.filter(state__in=(NodeState.READY, NodeState.UNREACHABLE))
    shared = heard.order_by().values("address").annotate(count=Count("machine_id", distinct=True)).filter(count__gt=1)
    contested = Q(contested_at__gt=now - contest.WITHIN)
    rows = Node.objects.filter(contested | Q(pk__in=heard, address__in=shared.values("address")))
    columns = rows.values_list("name", "address", "machine_id", "contested", "contested_at")
    return tuple(Claim(*row[:3], *(row[3:] if row[4] and row[4] > now - contest.WITHIN else ())) for row in columns)


def listener_ends_at() -> datetime | None:
    """When the certificate of the listener on this host ends, if there is one that can be read."""
    if settings.LLMGW.agents.port is None:
        return None
    from cryptography import x509

    try:
        shown = (settings.LLMGW.authority_dir / "server.crt").read_bytes()
        return x509.load_pem_x509_certificate(shown).not_valid_after_utc
    except (OSError, ValueError):
        return None
