"""The API of requests: what became of one."""

from __future__ import annotations

from django.urls import path
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.api import UsageSerializer
from tenants.api_rules import one, person
from tenants.api_views import ApiView
from tenants.models import Usage


class RequestDetail(ApiView):
    @extend_schema(
        parameters=[OpenApiParameter("request_id", str, OpenApiParameter.PATH, description="From x-request-id.")],
        responses=UsageSerializer,
    )
    def get(self, request: Request, request_id: str) -> Response:
        """What one finished request used, where it ran, and how long each part took."""
        rows = Usage.objects.visible_to(person(request)).select_related("project", "key")
        return Response(UsageSerializer(one(rows, request_id=request_id)).data)


urlpatterns = [path("requests/<path:request_id>", RequestDetail.as_view(), name="api-request")]
