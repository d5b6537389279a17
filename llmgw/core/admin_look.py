"""How the admin looks: the pages' palette, and a sidebar in the same order as theirs."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import reverse_lazy

ACCENT = {
    "50": "#eef2fe",
    "100": "#e8eefd",
    "200": "#cdd9fb",
    "300": "#9db3f6",
    "400": "#7c9bff",
    "500": "#5a7df4",
    "600": "#2f5bea",
    "700": "#264bc4",
    "800": "#223f9c",
    "900": "#1a2444",
    "950": "#121a33",
}
BASE = {
    "50": "#f6f7f9",
    "100": "#eef0f3",
    "200": "#e4e7ec",
    "300": "#b3bccb",
    "400": "#8a94a5",
    "500": "#667085",
    "600": "#4a5361",
    "700": "#272d36",
    "800": "#1f242c",
    "900": "#161a20",
    "950": "#0f1216",
}


def _group(title: str, *entries: tuple[str, str]) -> dict[str, Any]:
    items = [{"title": label, "link": reverse_lazy(name)} for label, name in entries]
    return {"title": title, "separator": bool(title), "items": items}


def _style(_: HttpRequest) -> str:
    return static("admin.css")


def _script(_: HttpRequest) -> str:
    return static("admin.js")


def _icon(_: HttpRequest) -> str:
    return static("llmgw.svg")


UNFOLD = {
    "SITE_TITLE": "llmgw",
    "SITE_HEADER": "llmgw",
    "SITE_SUBHEADER": "admin",
    "SITE_ICON": _icon,
    "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": _icon}],
    "SHOW_VIEW_ON_SITE": False,
    "BORDER_RADIUS": "8px",
    "COLORS": {"base": BASE, "primary": ACCENT},
    "STYLES": [_style],
    "SCRIPTS": [_script],
    "DASHBOARD_CALLBACK": "nodes.admin.dashboard",
    "SIDEBAR": {
        "show_search": False,
        "show_all_applications": False,
        "navigation": [
            _group("", ("Back to the pages", "dashboard"), ("Capacity", "admin:index")),
            _group(
                "Catalog",
                ("Models", "admin:catalog_model_changelist"),
                ("Versions", "admin:catalog_catalogversion_changelist"),
            ),
            _group(
                "Tenants",
                ("Organisations", "admin:tenants_organisation_changelist"),
                ("Teams", "admin:tenants_team_changelist"),
                ("Projects", "admin:tenants_project_changelist"),
                ("Keys", "admin:tenants_key_changelist"),
                ("Budgets", "admin:tenants_budget_changelist"),
                ("Capacity quotas", "admin:tenants_capacityquota_changelist"),
                ("Prices", "admin:tenants_price_changelist"),
                ("People", "admin:tenants_user_changelist"),
            ),
            _group(
                "Fleet",
                ("Nodes", "admin:nodes_node_changelist"),
                ("Replicas", "admin:nodes_replica_changelist"),
                ("Commands", "admin:nodes_command_changelist"),
                ("Timeline", "admin:nodes_event_changelist"),
                ("Backoff", "admin:nodes_backoff_changelist"),
            ),
            _group(
                "Records",
                ("Usage", "admin:tenants_usage_changelist"),
                ("Usage in sums", "admin:tenants_usageslot_changelist"),
                ("Audit", "admin:tenants_auditentry_changelist"),
                ("Sessions", "admin:tenants_signedin_changelist"),
                ("API tokens", "admin:tenants_apitoken_changelist"),
            ),
        ],
    },
}
