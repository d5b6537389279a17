"""The API of the cluster, for operators: nodes, replicas, the timeline, and the summary that pages and `ctl` print."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from django.db.models import QuerySet
from django.urls import path
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from nodes import actions, snapshot
from nodes.models import Event, Node, Replica, Shard
from nodes.summary import Summary
from tenants.api_rules import Refused, actor, one, word
from tenants.api_views import OperatorView

_NODE_NAME = re.compile(r"\A[A-Za-z0-9](?:[A-Za-z0-9._-]{0,118}[A-Za-z0-9])?\Z")


class NodeSerializer(serializers.ModelSerializer[Node]):
    """A machine as its agent last reported it."""

    class Meta:
        model = Node
        exclude = ["token_digest", "connection"]


class NodeLineSerializer(serializers.ModelSerializer[Node]):
    class Meta:
        model = Node
        fields = ["name", "state", "cordoned_at", "draining_at", "address", "labels", "agent_version", "last_seen_at"]


class NewNodeSerializer(serializers.Serializer[Node]):
    name = serializers.RegexField(
        _NODE_NAME, max_length=120, error_messages={"invalid": "Write letters, digits, - . and _ only."}
    )


class Nodes(generics.ListAPIView[Node], OperatorView):
    serializer_class = NodeLineSerializer
    ascending = True

    def get_queryset(self) -> QuerySet[Node]:
        return Node.objects.all()

    @extend_schema(
        request=NewNodeSerializer,
        responses={
            201: inline_serializer(
                "MadeNode", {"node": NodeSerializer(), "join_token": serializers.CharField(help_text="Shown once.")}
            )
        },
    )
    def post(self, request: Request) -> Response:
        """A node that may join with the token in this answer, which is shown nowhere else."""
        wanted = NewNodeSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        name = wanted.validated_data["name"]
        try:
            node, secret = actions.make_node(name=name, actor=actor(request))
        except actions.NodeExists as exists:
            raise Refused(str(exists), code="exists", status_code=409, fields={"name": [str(exists)]}) from None
        return Response({"node": NodeSerializer(node).data, "join_token": secret}, status=status.HTTP_201_CREATED)


class NodeDetail(generics.RetrieveAPIView[Node], OperatorView):
    serializer_class = NodeSerializer

    def get_queryset(self) -> QuerySet[Node]:
        return Node.objects.all()


class NodeToken(OperatorView):
    @extend_schema(
        request=None,
        responses={201: inline_serializer("JoinToken", {"token": serializers.CharField(help_text="Shown once.")})},
    )
    def post(self, request: Request, pk: str) -> Response:
        """A new join token for a node, shown nowhere else; the old one is void from its next connection on."""
        node = one(Node.objects.all(), pk=pk)
        token = actions.renew_join_token(node=node, actor=actor(request))
        return Response({"token": token}, status=status.HTTP_201_CREATED)


class NodeCordon(OperatorView):
    @extend_schema(request=None, responses=NodeSerializer)
    def post(self, request: Request, pk: str) -> Response:
        """Nothing new is placed there; what runs goes on. Again changes nothing."""
        node = one(Node.objects.all(), pk=pk)
        actions.cordon_node(node=node, actor=actor(request))
        node.refresh_from_db()
        return Response(NodeSerializer(node).data)


class NodeUncordon(OperatorView):
    @extend_schema(request=None, responses=NodeSerializer)
    def post(self, request: Request, pk: str) -> Response:
        """Replicas may be placed there again, also after a drain."""
        node = one(Node.objects.all(), pk=pk)
        actions.uncordon_node(node=node, actor=actor(request))
        node.refresh_from_db()
        return Response(NodeSerializer(node).data)


# --- replicas --------------------------------------------------------------------------------------------------------
class ShardSerializer(serializers.ModelSerializer[Shard]):
    class Meta:
        model = Shard
        fields = ["rank", "node", "gpus", "cores", "state", "port", "pid", "progress", "reason", "changed_at"]


class ReplicaSerializer(serializers.ModelSerializer[Replica]):
    shards = ShardSerializer(many=True)

    class Meta:
        model = Replica
        fields = [
            "name",
            "model",
            "profile",
            "engine",
            "weight",
            "wanted",
            "wanted_at",
            "wanted_why",
            "state",
            "state_at",
            "reason",
            "tail",
            "made_at",
            "ready_at",
            "shards",
        ]


class Replicas(generics.ListAPIView[Replica], OperatorView):
    serializer_class = ReplicaSerializer
    ascending = True

    def get_queryset(self) -> QuerySet[Replica]:
        rows = Replica.objects.prefetch_related("shards")
        model = word(self.request, "model")
        return rows.filter(model=model) if model else rows

    @extend_schema(parameters=[OpenApiParameter("model", str, description="Only this model's.")])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Replicas by name, each with its shards."""
        return super().get(request, *args, **kwargs)


@extend_schema(parameters=[OpenApiParameter("name", str, OpenApiParameter.PATH)])
class ReplicaDetail(generics.RetrieveAPIView[Replica], OperatorView):
    serializer_class = ReplicaSerializer
    lookup_field = "name"

    def get_queryset(self) -> QuerySet[Replica]:
        return Replica.objects.prefetch_related("shards")


# --- timeline and summary --------------------------------------------------------------------------------------------
class EventSerializer(serializers.ModelSerializer[Event]):
    class Meta:
        model = Event
        fields = ["id", "at", "kind", "model", "replica", "node", "text"]


_ABOUT = ("model", "replica", "node")


class Events(generics.ListAPIView[Event], OperatorView):
    serializer_class = EventSerializer

    def get_queryset(self) -> QuerySet[Event]:
        wanted = {name: word(self.request, name) for name in _ABOUT}
        return Event.objects.filter(**{name: text for name, text in wanted.items() if text})

    @extend_schema(parameters=[OpenApiParameter(name, str, description=f"Only of this {name}.") for name in _ABOUT])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """What happened and why, newest first."""
        return super().get(request, *args, **kwargs)


def _summary_schema() -> dict[str, Any]:
    """From the dataclasses themselves, every reference written out: the schema is never behind the value."""
    (top,), shapes = msgspec.json.schema_components((Summary,), ref_template="{name}")

    def unfold(part: Any) -> Any:
        if isinstance(part, list):
            return [unfold(each) for each in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return unfold(shapes[part["$ref"]])
        known = [each for each in part.get("anyOf", ()) if each != {"type": "null"}]
        if len(known) == 1:  # OpenAPI 3.0 knows no type null
            return {**unfold(known[0]), "nullable": True}
        return {key: unfold(held) for key, held in part.items()}

    whole: dict[str, Any] = unfold(top)
    return whole


class CurrentSummary(OperatorView):
    @extend_schema(responses={(200, "application/json"): _summary_schema()})
    def get(self, request: Request) -> Response:
        """The cluster now: what the dashboard and `llmgw ctl status` show. Null is unknown, never zero."""
        return Response(msgspec.to_builtins(snapshot.current_summary()))


urlpatterns = [
    path("summary", CurrentSummary.as_view(), name="api-summary"),
    path("nodes", Nodes.as_view(), name="api-nodes"),
    path("nodes/<str:pk>", NodeDetail.as_view(), name="api-node"),
    path("nodes/<str:pk>/token", NodeToken.as_view(), name="api-node-token"),
    path("nodes/<str:pk>/cordon", NodeCordon.as_view(), name="api-node-cordon"),
    path("nodes/<str:pk>/uncordon", NodeUncordon.as_view(), name="api-node-uncordon"),
    path("replicas", Replicas.as_view(), name="api-replicas"),
    path("replicas/<path:name>", ReplicaDetail.as_view(), name="api-replica"),
    path("events", Events.as_view(), name="api-events"),
]
