"""The API of the builds of engines that a node uses, for operators."""

from __future__ import annotations

import msgspec
from django.urls import path
from drf_spectacular.utils import extend_schema, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from agent.protocol import MAX_BUILD_NAME
from nodes import choosing
from nodes.builds import EngineLine
from nodes.keeping import NotKept
from nodes.models import Node
from nodes.shapes import shape_of
from tenants.api_rules import Refused, actor, body, one
from tenants.api_views import OperatorView


class NodeBuilds(OperatorView):
    @extend_schema(responses={(200, "application/json"): {"type": "array", "items": shape_of(EngineLine)}})
    def get(self, request: Request, pk: str) -> Response:
        """Every engine: which build was chosen for the node, what its agent goes by, and which builds are there."""
        return Response(msgspec.to_builtins(choosing.lines_of(one(Node.objects.all(), pk=pk))))


class NodeBuild(OperatorView):
    @extend_schema(
        request=inline_serializer(
            "WantedBuild",
            {"build": serializers.CharField(max_length=MAX_BUILD_NAME, help_text="auto, none, or a build's name.")},
        ),
        responses={(200, "application/json"): shape_of(EngineLine)},
    )
    def put(self, request: Request, pk: str, engine: str) -> Response:
        """Choose which build of an engine starts on a node from now on. What runs is not touched.

        A node that is away hears of it when it is back."""
        node, build = one(Node.objects.all(), pk=pk), body(request).get("build")
        try:
            choosing.choose_build(
                node=node, engine=engine, build=build if isinstance(build, str) else "", actor=actor(request)
            )
        except NotKept as fault:
            raise Refused(str(fault), code="invalid") from None
        node.refresh_from_db()
        [line] = (each for each in choosing.lines_of(node) if each.engine == engine)
        return Response(msgspec.to_builtins(line))


urlpatterns = [
    path("nodes/<str:pk>/builds", NodeBuilds.as_view(), name="api-node-builds"),
    path("nodes/<str:pk>/builds/<str:engine>", NodeBuild.as_view(), name="api-node-build"),
]
