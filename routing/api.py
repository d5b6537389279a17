"""The API of requests: finding them, and what became of one and why."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.urls import path
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field, inline_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from routing import explain, naming
from tenants import finding, standing
from tenants.api import UsageSerializer, found, wanted
from tenants.api_rules import one, paged, person
from tenants.api_views import ApiView
from tenants.models import Usage


class FoundSerializer(UsageSerializer):
    """One finished request. Null is unknown, not zero; `cost` is in units of 10^-8, null without a price."""

    result = serializers.SerializerMethodField()

    @extend_schema_field(serializers.ChoiceField(choices=list(finding.RESULTS)))
    def get_result(self, row: Usage) -> str:
        return finding.result_of(row.status)


class ConsideredSerializer(serializers.Serializer[explain.Considered]):
    replica = serializers.CharField()
    score = serializers.FloatField(allow_null=True, help_text="Lower is better; null is unknown.")
    note = serializers.CharField(help_text="Why it could not be taken; empty: it could.")


class AttemptSerializer(serializers.Serializer[explain.Attempt]):
    replica = serializers.CharField()
    at_ms = serializers.FloatField(help_text="Since the request's headers.")
    failed = serializers.CharField(help_text="Empty: it answered.")


class SkippedSerializer(serializers.Serializer[explain.Skipped]):
    model = serializers.CharField()
    code = serializers.CharField()


class ExplainedSerializer(serializers.Serializer[explain.Explained]):
    """What was decided. Kept for `usage.keep_explained_days`, then null."""

    asked = serializers.CharField(help_text="The name that the client wrote, when it is not the model's.")
    band = serializers.CharField()
    routing_profile = serializers.CharField()
    queued = serializers.BooleanField()
    position = serializers.IntegerField(help_text="Place in the queue when it began to wait; 0 when it did not.")
    loading = serializers.BooleanField()
    reserved_tokens = serializers.IntegerField()
    affinity = serializers.CharField(help_text="hit, miss or saturated; empty where prefixes are not followed.")
    considered = ConsideredSerializer(many=True)
    attempts = AttemptSerializer(many=True)
    skipped = SkippedSerializer(many=True)


class RequestSerializer(FoundSerializer):
    """One finished request, what was decided for it, and its story in sentences."""

    explained = serializers.SerializerMethodField()
    words = serializers.SerializerMethodField()

    class Meta(UsageSerializer.Meta):
        exclude = ["id", "user"]

    @extend_schema_field(ExplainedSerializer(allow_null=True))
    def get_explained(self, row: Usage) -> dict[str, Any] | None:
        why = explain.read(row.explained)
        return None if why is None else dict(ExplainedSerializer(why).data)

    def get_words(self, row: Usage) -> list[str]:
        return list(explain.in_words(row, explain.read(row.explained), standing.currency()))


class RequestList(ApiView):
    @extend_schema(
        operation_id="v1_requests_list",
        parameters=[
            OpenApiParameter("project", int, description="Only this project's."),
            OpenApiParameter("key", str, description="Only this key's, by its number or its beginning (sk-7Qf2)."),
            OpenApiParameter("model", str, description="Only this model's, by its name or an alias."),
            OpenApiParameter("result", str, enum=list(finding.RESULTS), description="How they ended."),
            OpenApiParameter("code", str, description="Only those that ended with this error code."),
            OpenApiParameter("since", datetime, description="Ended at or after."),
            OpenApiParameter("until", datetime, description="Ended before."),
            OpenApiParameter("limit", int),
            OpenApiParameter("after", str, description="`next` of an earlier page."),
        ],
        responses=inline_serializer(
            "RequestPage",
            {
                "results": FoundSerializer(many=True),
                "next": serializers.CharField(
                    allow_null=True,
                    help_text="`after` of the next page; there may be one though this one is not full. Null: the end.",
                ),
            },
        ),
    )
    def get(self, request: Request) -> Response:
        """Finished requests of the projects that you see, newest first."""
        asked = wanted(request, finding.FIELDS)
        page = found(request, replace(asked, model=naming.meant(asked.model, person(request)).model))
        return paged(FoundSerializer(page.rows, many=True).data, page.older or None)


class RequestDetail(ApiView):
    @extend_schema(
        parameters=[OpenApiParameter("request_id", str, OpenApiParameter.PATH, description="From x-request-id.")],
        responses=RequestSerializer,
    )
    def get(self, request: Request, request_id: str) -> Response:
        """What one finished request used, where it ran, how long each part took, and why it went there."""
        rows = Usage.objects.visible_to(person(request)).select_related("project", "key")
        return Response(RequestSerializer(one(rows, request_id=request_id)).data)


urlpatterns = [
    path("requests", RequestList.as_view(), name="api-requests"),
    path("requests/<path:request_id>", RequestDetail.as_view(), name="api-request"),
]
