"""The API of capacity quotas: how many cards the models of a team may hold, and hold now (TN-6)."""

from __future__ import annotations

from typing import Any

from django.urls import path
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from nodes.poke import poke
from nodes.snapshot import take
from nodes.totals import QuotaLine, quotas
from tenants import actions, limits
from tenants.api_rules import Refused, actor, one, page_size, paged, person, word
from tenants.api_views import ApiView, Exact
from tenants.models import Team


class QuotaSerializer(serializers.Serializer[Any]):
    """Of one team and GPU class. `cards`: what its models may hold, null: no limit. `held`: what they hold."""

    team = serializers.IntegerField()
    team_name = serializers.CharField()
    team_slug = serializers.CharField()
    gpu_class = serializers.CharField()
    cards = serializers.IntegerField(allow_null=True)
    held = serializers.IntegerField()
    models = serializers.ListField(child=serializers.CharField())
    note = serializers.CharField()


class NewQuotaSerializer(Exact[Any]):
    cards = serializers.IntegerField(min_value=0, max_value=limits.MAX_CARDS)


def _told(team: Team, line: QuotaLine) -> dict[str, Any]:
    return {
        "team": team.pk,
        "team_name": team.name,
        "team_slug": team.slug,
        "gpu_class": line.gpu_class,
        "cards": line.allowed,
        "held": line.held,
        "models": list(line.models),
        "note": line.note,
    }


class Quotas(ApiView):
    @extend_schema(
        operation_id="v1_quotas_list",
        parameters=[
            OpenApiParameter("team", str, description="Only of the team with this slug."),
            OpenApiParameter("limit", int),
            OpenApiParameter("after", str),
        ],
        responses=inline_serializer(
            "QuotaPage", {"results": QuotaSerializer(many=True), "next": serializers.CharField(allow_null=True)}
        ),
    )
    def get(self, request: Request) -> Response:
        """The quotas of teams that you see, and the classes of which they hold cards, by team and class."""
        wanted, after, size = word(request, "team"), word(request, "after"), page_size(request)
        rows = Team.objects.visible_to(person(request)).order_by("pk")
        teams = {team.slug: team for team in rows if not wanted or team.slug == wanted}
        lines = [line for line in quotas(take(timezone.now())) if line.team in teams] if teams else []
        rest = [line for line in lines if _place(line) > after]
        found = [_told(teams[line.team], line) for line in rest[:size]]
        return paged(found, _place(rest[size - 1]) if len(rest) > size else None)


def _place(line: QuotaLine) -> str:
    return f"{line.team} {line.gpu_class}"


class Quota(ApiView):
    @extend_schema(request=NewQuotaSerializer, responses=QuotaSerializer)
    def put(self, request: Request, pk: int, gpu_class: str) -> Response:
        """How many cards of the class the team's models may hold. What they hold already they keep."""
        team = self._own(request, pk, gpu_class)
        wanted = NewQuotaSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        try:
            changed = actions.set_quota(
                team=team, gpu_class=gpu_class, cards=wanted.validated_data["cards"], actor=actor(request)
            )
        except ValueError as error:
            raise Refused(str(error), code="too_many", status_code=409) from None
        return self._answer(team, gpu_class, changed)

    @extend_schema(responses=QuotaSerializer)
    def delete(self, request: Request, pk: int, gpu_class: str) -> Response:
        """Lift the quota: the team's models may hold as many of the class as there are."""
        team = self._own(request, pk, gpu_class)
        changed = actions.set_quota(team=team, gpu_class=gpu_class, cards=None, actor=actor(request))
        return self._answer(team, gpu_class, changed)

    def _own(self, request: Request, pk: int, gpu_class: str) -> Team:
        user = person(request)
        team: Team = one(Team.objects.visible_to(user), pk=pk)  # type: ignore[arg-type]
        if not Team.objects.limited_by(user).filter(pk=pk).exists():
            raise PermissionDenied(f"The capacity quotas of team {team.name} are not yours to set. Ask an operator.")
        objection = limits.class_objection(gpu_class)
        if objection:
            raise Refused(objection, code="invalid", fields={"gpu_class": [objection]})
        return team

    def _answer(self, team: Team, gpu_class: str, changed: bool) -> Response:
        if changed:
            poke()
        lines = (line for line in quotas(take(timezone.now())) if (line.team, line.gpu_class) == (team.slug, gpu_class))
        return Response(_told(team, next(lines, QuotaLine(team.slug, gpu_class, None, 0, (), ""))))


urlpatterns = [
    path("quotas", Quotas.as_view(), name="api-quotas"),
    path("teams/<int:pk>/quotas/<str:gpu_class>", Quota.as_view(), name="api-quota"),
]
