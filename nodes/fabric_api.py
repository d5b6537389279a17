"""The API of the fabric map, for operators."""

from __future__ import annotations

import dataclasses

import msgspec
from django.urls import path
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from nodes import networks
from nodes.fabrics import FabricMap
from nodes.shapes import shape_of
from tenants.api_rules import word
from tenants.api_views import OperatorView


class Fabrics(OperatorView):
    @extend_schema(
        parameters=[OpenApiParameter("fabric", str, description="Only the ports of this one; none: of no fabric.")],
        responses={(200, "application/json"): shape_of(FabricMap)},
    )
    def get(self, request: Request) -> Response:
        """All nodes' fabrics and ports, and where names and what stands behind them do not agree. Null is unknown."""
        found, fabric = networks.current_map(), word(request, "fabric")
        if fabric:
            found = dataclasses.replace(found, ports=networks.of_fabric(found, fabric))
        return Response(msgspec.to_builtins(found))


urlpatterns = [path("fabrics", Fabrics.as_view(), name="api-fabrics")]
