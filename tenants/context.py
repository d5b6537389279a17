"""What every page knows: the sidebar for this person and the address that clients use."""

from __future__ import annotations

from dataclasses import dataclass

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

from llmgw.core.proxies import base_url
from tenants.models import User


@dataclass(frozen=True, slots=True)
class Entry:
    label: str
    url: str
    current: bool


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    entries: tuple[Entry, ...]


HOME = (("Home", "home", ("home",)),)
CLUSTER = (
    ("Dashboard", "dashboard", ("dashboard",)),
    ("Nodes", "node-list", ("node-list", "node-detail", "node-make")),
    ("Fabrics", "fabric-list", ("fabric-list",)),
    ("Models", "model-list", ("model-list", "model-detail")),
    ("Replicas", "replica-list", ("replica-list", "replica-detail")),
    (
        "Catalog",
        "catalog-list",
        (
            *("catalog-list", "catalog-add", "catalog-edit", "catalog-remove", "catalog-adapters", "catalog-text"),
            *("catalog-version-list", "catalog-version"),
        ),
    ),
    ("Admin", "admin:index", ()),
)
LIMIT_FORMS = ("limits-change", "quota-set", "budget-make", "budget-change")
PROJECTS = (
    ("Projects", "project-list", ("project-list", "limits", *LIMIT_FORMS)),
    ("Keys", "key-list", ("key-list", "key-make", "key-detail")),
    ("Requests", "request-list", ("request-list", "request-detail")),
)
YOU = (
    ("Account", "account", ("account", "password", "two-factor", "backup-codes")),
    ("About", "about", ("about",)),
)


def navigation(request: HttpRequest) -> dict[str, object]:
    match = getattr(request, "resolver_match", None)
    here = match.view_name if match else ""
    sections = [("", HOME), ("Cluster", CLUSTER), ("Projects", PROJECTS), ("You", YOU)]
    user = getattr(request, "user", None)
    if not isinstance(user, User):
        sections = []
    elif not user.is_operator:
        del sections[1]
    groups = tuple(
        Group(title, tuple(Entry(label, reverse(name), here in names) for label, name, names in entries))
        for title, entries in sections
    )
    return {"navigation": groups, "base_url": base_url(request), "auth_required": settings.LLMGW.gateway.auth}
