"""Every address that Django serves. `/v1/`, `/health`, `/ready` and `/metrics` never come here (routing.asgi)."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

handler500 = "llmgw.core.store_faults.page"
urlpatterns = [
    path("", include("tenants.urls")),
    path("", include("catalog.urls")),
    path("", include("nodes.urls")),
    path("", include("routing.urls")),
    path("admin/", admin.site.urls),
    path("api/", include("llmgw.api_urls")),
]
