"""The API of the cluster, for operators: nodes, replicas, the timeline, and the summary that pages and `ctl` print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from django.db.models import QuerySet
from django.http import HttpResponse
from django.urls import path
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.spec import ENGINES
from nodes import actions, identity, keeping, labels, snapshot
from nodes.models import Certificate, Command, Event, Node, Replica, Shard
from nodes.names import NODE_NAME
from nodes.shapes import shape_of
from nodes.summary import Summary
from tenants.api_rules import Refused, actor, body, one, word
from tenants.api_views import Exact, OperatorView


class NodeSerializer(serializers.ModelSerializer[Node]):
    """A machine as its agent last reported it."""

    class Meta:
        model = Node
        exclude = ["token_digest", "connection", "turns"]


class NodeLineSerializer(serializers.ModelSerializer[Node]):
    class Meta:
        model = Node
        fields = ["name", "state", "cordoned_at", "draining_at", "address", "labels", "agent_version", "last_seen_at"]


class NewNodeSerializer(Exact[Node]):
    name = serializers.RegexField(
        NODE_NAME, max_length=120, error_messages={"invalid": "Write letters, digits, - . and _ only."}
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


class NodeChangeSerializer(Exact[Node]):
    """What operators set for a node; what is left out stays."""

    labels = serializers.DictField(
        child=serializers.CharField(allow_null=True, allow_blank=True, trim_whitespace=False),
        required=False,
        help_text="Set by name; null takes one away. They win over those of its agent.yaml.",
    )
    reserved_cores = serializers.FloatField(required=False, help_text="CPU cores that no replica is counted on.")
    disabled_engines = serializers.ListField(
        child=serializers.CharField(), required=False, help_text="Engines of which it gets no new replicas."
    )
    pinned_address = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=255,
        help_text="Where gateways reach its engines, whatever its agent says; empty: where that says.",
    )


class NodeDetail(generics.RetrieveAPIView[Node], OperatorView):
    serializer_class = NodeSerializer

    def get_queryset(self) -> QuerySet[Node]:
        return Node.objects.all()

    @extend_schema(request=NodeChangeSerializer, responses=NodeSerializer)
    def patch(self, request: Request, pk: str) -> Response:
        """Change labels, reserved cores, disabled engines or the address: all of it, or nothing."""
        wanted = NodeChangeSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        node = one(Node.objects.all(), pk=pk)
        try:
            keeping.keep_node(node=node, actor=actor(request), **wanted.validated_data)
        except labels.LabelFault as fault:
            raise Refused(str(fault), code="invalid", fields={"labels": [str(fault)]}) from None
        except keeping.NotKept as fault:
            raise Refused(str(fault), code="invalid") from None
        node.refresh_from_db()
        return Response(NodeSerializer(node).data)

    @extend_schema(
        parameters=[OpenApiParameter("force", bool, description="Also a node that is not lost; its engines run on.")],
        responses={204: None},
    )
    def delete(self, request: Request, pk: str) -> Response:
        """Forget a lost node at once, with its token and certificates."""
        node = one(Node.objects.all(), pk=pk)
        try:
            actions.remove_node(node=node, actor=actor(request), force=word(request, "force") == "true")
        except actions.NodeInUse as in_use:
            raise Refused(str(in_use), code="in_use", status_code=status.HTTP_409_CONFLICT) from None
        return Response(status=status.HTTP_204_NO_CONTENT)


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
        return _acted(request, pk, actions.cordon_node)


class NodeUncordon(OperatorView):
    @extend_schema(request=None, responses=NodeSerializer)
    def post(self, request: Request, pk: str) -> Response:
        """Replicas may be placed there again, also after a drain."""
        return _acted(request, pk, actions.uncordon_node)


class NodeDrain(OperatorView):
    @extend_schema(request=None, responses=NodeSerializer)
    def post(self, request: Request, pk: str) -> Response:
        """Its replicas move elsewhere, new ones first where there is room. Again changes nothing."""
        return _acted(request, pk, actions.drain_node)


def _acted(request: Request, pk: str, act: Callable[..., object]) -> Response:
    """Do it; the node as it is then."""
    node = one(Node.objects.all(), pk=pk)
    act(node=node, actor=actor(request))
    node.refresh_from_db()
    return Response(NodeSerializer(node).data)


_SENT = {202: inline_serializer("SentCommand", {"command": serializers.IntegerField()})}


class NodeFetch(OperatorView):
    @extend_schema(
        request=inline_serializer("WantedWeights", {"source": serializers.CharField(max_length=keeping.MAX_SOURCE)}),
        responses=_SENT,
    )
    def post(self, request: Request, pk: str) -> Response:
        """Bring weights onto a node before a replica needs them; its timeline says when they are there."""
        node = one(Node.objects.all(), pk=pk)
        return _sent(lambda: keeping.fetch_ahead(node=node, source=_text(request, "source"), actor=actor(request)))


class NodeInstall(OperatorView):
    @extend_schema(
        request=inline_serializer("WantedEngine", {"engine": serializers.ChoiceField(ENGINES)}),
        responses=_SENT,
    )
    def post(self, request: Request, pk: str) -> Response:
        """Install an engine on a node before a replica needs it; its timeline says when it is there."""
        node = one(Node.objects.all(), pk=pk)
        return _sent(lambda: keeping.install_ahead(node=node, engine=_text(request, "engine"), actor=actor(request)))


def _sent(send: Callable[[], Command]) -> Response:
    try:
        return Response({"command": send().pk}, status=status.HTTP_202_ACCEPTED)
    except keeping.NotKept as fault:
        raise Refused(str(fault), code="invalid") from None


def _text(request: Request, name: str) -> str:
    value = body(request).get(name)
    return value if isinstance(value, str) else ""


# --- certificates ----------------------------------------------------------------------------------------------------
class CertificateSerializer(serializers.ModelSerializer[Certificate]):
    """What proves a node's agent until it expires or is revoked."""

    class Meta:
        model = Certificate
        fields = ["serial", "node", "made_at", "made_by", "expires_at", "proved_at"]


class Certificates(generics.ListAPIView[Certificate], OperatorView):
    serializer_class = CertificateSerializer
    ascending = True

    def get_queryset(self) -> QuerySet[Certificate]:
        return Certificate.objects.all()


class NodeCertificatesRevoked(OperatorView):
    @extend_schema(request=None, responses=NodeSerializer)
    def post(self, request: Request, pk: str) -> Response:
        """Void a node's certificates; its stream ends at once. The node and its engines stay."""
        return _acted(request, pk, identity.revoke_certificates)


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


class CurrentSummary(OperatorView):
    @extend_schema(responses={(200, "application/json"): shape_of(Summary)})
    def get(self, request: Request) -> HttpResponse:
        """The cluster now: what the dashboard and `llmgw ctl status` show. Null is unknown, never zero."""
        return HttpResponse(msgspec.json.encode(snapshot.current_summary()), content_type="application/json")


urlpatterns = [
    path("summary", CurrentSummary.as_view(), name="api-summary"),
    path("nodes", Nodes.as_view(), name="api-nodes"),
    path("nodes/<str:pk>", NodeDetail.as_view(), name="api-node"),
    path("nodes/<str:pk>/token", NodeToken.as_view(), name="api-node-token"),
    path("nodes/<str:pk>/cordon", NodeCordon.as_view(), name="api-node-cordon"),
    path("nodes/<str:pk>/uncordon", NodeUncordon.as_view(), name="api-node-uncordon"),
    path("nodes/<str:pk>/drain", NodeDrain.as_view(), name="api-node-drain"),
    path("nodes/<str:pk>/fetch", NodeFetch.as_view(), name="api-node-fetch"),
    path("nodes/<str:pk>/install", NodeInstall.as_view(), name="api-node-install"),
    path("nodes/<str:pk>/revoke-certificates", NodeCertificatesRevoked.as_view(), name="api-node-revoke-certificates"),
    path("certificates", Certificates.as_view(), name="api-certificates"),
    path("replicas", Replicas.as_view(), name="api-replicas"),
    path("replicas/<path:name>", ReplicaDetail.as_view(), name="api-replica"),
    path("events", Events.as_view(), name="api-events"),
]
