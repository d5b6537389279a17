"""The API under /api/: each room's routes below v1/, the schema and its browser beside them."""

from __future__ import annotations

from django.http import Http404
from django.urls import include, path, re_path
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerView
from rest_framework.request import Request
from rest_framework.response import Response

import catalog.api
import nodes.api
import nodes.build_api
import nodes.fabric_api
import nodes.quota_api
import routing.api
import tenants.api
import tenants.limit_api
import tenants.price_api
from tenants.api_rules import SignedInWithinScope
from tenants.api_views import ApiView


@extend_schema(exclude=True)
class NoSuchRoute(ApiView):
    """An unknown address below v1/ is answered as an API answers, not with a page."""

    def get(self, request: Request) -> Response:
        raise Http404

    post = put = patch = delete = get


v1 = [
    *tenants.api.urlpatterns,
    *tenants.limit_api.urlpatterns,
    *tenants.price_api.urlpatterns,
    *catalog.api.urlpatterns,
    *nodes.api.urlpatterns,
    *nodes.build_api.urlpatterns,
    *nodes.fabric_api.urlpatterns,
    *nodes.quota_api.urlpatterns,
    *routing.api.urlpatterns,
    re_path(r"", NoSuchRoute.as_view()),
]

urlpatterns = [
    path("v1/", include(v1)),
    path("schema/", SpectacularAPIView.as_view(permission_classes=[SignedInWithinScope]), name="api-schema"),
    path(
        "docs/",
        SpectacularSwaggerView.as_view(url_name="api-schema", permission_classes=[SignedInWithinScope]),
        name="api-docs",
    ),
]
