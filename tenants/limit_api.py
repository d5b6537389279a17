"""The API of limits and budgets, and of the organisations and teams that have them."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django.db.models import Q, QuerySet
from django.http import Http404
from django.urls import path
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions, limits, standing
from tenants.api_rules import Refused, actor, one, page_size, paged, person, word
from tenants.api_views import ApiView, Exact
from tenants.models import Budget, Organisation, Team

MOST_AT_ONCE = 2**31 - 1
MOST_TOKENS = 10**15
_LEAD = "Ask an owner or lead of its team, or an operator."


# --- organisations and teams -----------------------------------------------------------------------------------------
class OrganisationSerializer(serializers.ModelSerializer[Organisation]):
    class Meta:
        model = Organisation
        fields = ["id", "name", "slug", "time_zone", "made_at"]


class Organisations(generics.ListAPIView[Organisation], ApiView):
    serializer_class = OrganisationSerializer
    ascending = True

    def get_queryset(self) -> QuerySet[Organisation]:
        return Organisation.objects.visible_to(person(self.request))


class TeamSerializer(serializers.ModelSerializer[Team]):
    class Meta:
        model = Team
        fields = ["id", "name", "slug", "organisation", "made_at"]


class Teams(generics.ListAPIView[Team], ApiView):
    serializer_class = TeamSerializer
    ascending = True

    def get_queryset(self) -> QuerySet[Team]:
        return Team.objects.visible_to(person(self.request))


# --- limits ----------------------------------------------------------------------------------------------------------
class SubjectSerializer(serializers.Serializer[Any]):
    subject = serializers.ChoiceField(choices=limits.SUBJECTS)
    id = serializers.IntegerField()
    name = serializers.CharField()


def _rate(most: int) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=1, max_value=most, allow_null=True, required=False)


class OwnLimitsSerializer(Exact[Any]):
    """What one subject sets itself; null, an empty band and an empty list: nothing."""

    requests_per_minute = _rate(MOST_AT_ONCE)
    tokens_per_minute = _rate(MOST_TOKENS)
    max_concurrent = _rate(MOST_AT_ONCE)
    band = serializers.CharField(max_length=limits.MAX_BAND, allow_blank=True, required=False)
    models_allowed = serializers.ListField(
        child=serializers.CharField(max_length=limits.MAX_NAME), max_length=limits.MAX_NAMES, required=False
    )

    def validate_band(self, band: str) -> str:
        _refuse(standing.band_objection(band, **self.context))
        return band

    def validate_models_allowed(self, names: list[str]) -> list[str]:
        _refuse(limits.names_objection(names))
        return names


def _refuse(objection: str) -> None:
    if objection:
        raise serializers.ValidationError(objection)


def _effective(name: str, field: serializers.Field[Any, Any, Any, Any], *, many: bool = False) -> Any:
    of = SubjectSerializer(many=True) if many else SubjectSerializer(allow_null=True)
    return inline_serializer(name, {"value": field, "of": of})


class LimitsSerializer(SubjectSerializer):
    own = OwnLimitsSerializer()
    effective = inline_serializer(
        "EffectiveLimits",
        {
            **{
                kind: _effective(f"Effective_{kind}", serializers.IntegerField(allow_null=True))
                for kind in ("requests_per_minute", "tokens_per_minute", "max_concurrent")
            },
            "band": _effective("EffectiveBand", serializers.CharField()),
            "models_allowed": _effective(
                "EffectiveModels", serializers.ListField(child=serializers.CharField(), allow_null=True), many=True
            ),
        },
    )


def _named(of: limits.Limit | None) -> dict[str, Any] | None:
    return None if of is None else {"subject": of.subject, "id": of.subject_id, "name": of.name}


def _limits(kind: str, row: Any) -> dict[str, Any]:
    found = standing.effective_of(row)
    rates = {("max_concurrent" if each.kind == "concurrent" else each.kind): each for each in found.rates}
    return {
        "subject": kind,
        "id": row.pk,
        "name": row.name,
        "own": {name: getattr(row, name) for name in actions.LIMITS},
        "effective": {
            **{name: {"value": each.value, "of": _named(each.of)} for name, each in rates.items()},
            "band": {"value": found.band, "of": _named(found.band_of)},
            "models_allowed": {
                "value": None if found.models is None else sorted(found.models),
                "of": [_named(each) for each in found.models_of],
            },
        },
    }


class Limits(ApiView):
    """`kind` comes with the route."""

    kind: limits.Subject = "project"

    @extend_schema(responses=LimitsSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """What is set here, and what holds here: the tightest on the path, and whose it is."""
        return Response(_limits(self.kind, self._row(request, pk)))

    @extend_schema(request=OwnLimitsSerializer, responses=LimitsSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Set those limits that the body names; null, "" or [] lifts one here."""
        row = self._row(request, pk)
        if not standing.KINDS[self.kind].objects.limited_by(person(request)).filter(pk=pk).exists():
            who = _LEAD if self.kind in ("project", "key") else "Ask an operator."
            raise PermissionDenied(f"The limits of {self.kind} {row.name} are not yours to set. {who}")
        context = {"subject": row, "user": person(request)}
        wanted = OwnLimitsSerializer(data=request.data, partial=True, context=context)
        wanted.is_valid(raise_exception=True)
        actions.set_limits(subject=row, values=wanted.validated_data, actor=actor(request))
        return Response(_limits(self.kind, row))

    def _row(self, request: Request, pk: int) -> Any:
        rows = standing.KINDS[self.kind].objects.visible_to(person(request))
        return one(rows.select_related(*standing.ABOVE[self.kind]), pk=pk)  # type: ignore[arg-type]


# --- budgets ---------------------------------------------------------------------------------------------------------
class BudgetSerializer(SubjectSerializer):
    """`amount` and `used` in the currency, or whole tokens, as text. `unpriced`: why money is not all counted."""

    id = serializers.IntegerField()
    subject_id = serializers.IntegerField()
    unit = serializers.ChoiceField(choices=Budget.Unit.choices)
    amount = serializers.CharField()
    currency = serializers.CharField(allow_null=True)
    period = serializers.ChoiceField(choices=Budget.Period.choices)
    stops = serializers.BooleanField()
    used = serializers.CharField()
    since = serializers.DateTimeField(allow_null=True)
    resets_at = serializers.DateTimeField(allow_null=True)
    time_zone = serializers.CharField()
    unpriced = serializers.CharField()


def _budget(line: standing.BudgetLine) -> dict[str, Any]:
    row = line.row
    unit: limits.Unit = "tokens" if row.unit == "tokens" else "money"
    since = datetime.fromtimestamp(line.spent.start, UTC) if line.spent.start else None
    return {
        "id": row.pk,
        "subject": line.kind,
        "subject_id": row.subject.pk,
        "name": line.name,
        "unit": row.unit,
        "amount": f"{limits.written_amount(unit, row.amount):f}",
        "currency": standing.currency() if unit == "money" else None,
        "period": row.period,
        "stops": row.stops,
        "used": f"{limits.written_amount(unit, line.spent.amount):f}",
        "since": since.isoformat() if since else None,
        "resets_at": line.resets_at.isoformat() if line.resets_at else None,
        "time_zone": line.time_zone,
        "unpriced": line.unpriced,
    }


class ChangedBudgetSerializer(Exact[Any]):
    unit = serializers.ChoiceField(choices=Budget.Unit.choices)
    amount = serializers.DecimalField(max_digits=27, decimal_places=8, min_value=Decimal(0))
    period = serializers.ChoiceField(choices=Budget.Period.choices)
    stops = serializers.BooleanField(required=False)


class NewBudgetSerializer(ChangedBudgetSerializer):
    subject = serializers.ChoiceField(choices=limits.SUBJECTS)
    subject_id = serializers.IntegerField(min_value=1, max_value=2**63 - 1)


def _units(unit: str, amount: Decimal) -> int:
    try:
        return limits.amount_of("tokens" if unit == "tokens" else "money", amount)
    except ValueError as error:
        raise Refused(f"amount: {error}", code="invalid", fields={"amount": [str(error)]}) from None


class Budgets(ApiView):
    @extend_schema(
        operation_id="v1_budgets_list",
        parameters=[
            OpenApiParameter("subject", str, enum=limits.SUBJECTS, description="Only of this kind of subject."),
            OpenApiParameter("subject_id", int, description="Only of this subject."),
            OpenApiParameter("limit", int),
            OpenApiParameter("after", str),
        ],
        responses=inline_serializer(
            "BudgetPage", {"results": BudgetSerializer(many=True), "next": serializers.CharField(allow_null=True)}
        ),
    )
    def get(self, request: Request) -> Response:
        """Budgets that bind you or what you see, in the order in which they were made, with what is used."""
        rows = Budget.objects.visible_to(person(request))
        subject, number = word(request, "subject"), _number(request, "subject_id")
        if subject or number:
            if subject not in limits.SUBJECTS:
                message = f"subject is one of {', '.join(limits.SUBJECTS)}."
                raise Refused(message, code="invalid", fields={"subject": [message]})
            rows = rows.filter(Q(**{subject: number}) if number else Q(**{f"{subject}__isnull": False}))
        if after := _number(request, "after"):
            rows = rows.filter(pk__gt=after)
        size = page_size(request)
        found = list(standing.with_subjects(rows).order_by("pk")[: size + 1])
        lines = standing.budget_lines(found[:size], timezone.now())
        return paged([_budget(line) for line in lines], str(found[size - 1].pk) if len(found) > size else None)

    @extend_schema(request=NewBudgetSerializer, responses={201: BudgetSerializer})
    def post(self, request: Request) -> Response:
        """A budget for one organisation, team, project or key."""
        wanted = NewBudgetSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        values: dict[str, Any] = wanted.validated_data
        kind, user = values["subject"], person(request)
        rows: Any = standing.KINDS[kind].objects
        subject = rows.visible_to(user).filter(pk=values["subject_id"]).first()
        if subject is None:
            message = f"There is no {kind} {values['subject_id']} that you can see."
            raise Refused(message, code="not_found", status_code=404, fields={"subject_id": [message]})
        if not rows.limited_by(user).filter(pk=subject.pk).exists():
            raise PermissionDenied(f"The budgets of {kind} {subject.name} are not yours to set. {_LEAD}")
        try:
            row = actions.make_budget(
                subject=subject,
                unit=values["unit"],
                amount=_units(values["unit"], values["amount"]),
                period=values["period"],
                stops=values.get("stops", True),
                actor=actor(request),
            )
        except ValueError as error:
            raise Refused(str(error), code="too_many", status_code=status.HTTP_409_CONFLICT) from None
        return Response(_one_budget(row.pk), status=status.HTTP_201_CREATED)


class BudgetDetail(ApiView):
    @extend_schema(responses=BudgetSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """One budget with what is used of it."""
        return Response(_one_budget(self._row(request, pk).pk))

    @extend_schema(request=ChangedBudgetSerializer, responses=BudgetSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change unit, amount, period, or whether it stops."""
        row = self._own(request, pk)
        wanted = ChangedBudgetSerializer(data=request.data, partial=True)
        wanted.is_valid(raise_exception=True)
        values: dict[str, Any] = dict(wanted.validated_data)
        unit = values.get("unit", row.unit)
        if unit != row.unit and "amount" not in values:
            message = f"Name an amount too: the present one is in {row.unit}."
            raise Refused(f"amount: {message}", code="invalid", fields={"amount": [message]})
        if "amount" in values:
            values["amount"] = _units(unit, values["amount"])
        actions.change_budget(budget=row, values=values, actor=actor(request))
        return Response(_one_budget(row.pk))

    @extend_schema(responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove a budget; what was used stays recorded."""
        actions.remove_budget(budget=self._own(request, pk), actor=actor(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _row(self, request: Request, pk: int) -> Budget:
        found = standing.with_subjects(Budget.objects.visible_to(person(request))).filter(pk=pk).first()
        if found is None:
            raise Http404
        return found

    def _own(self, request: Request, pk: int) -> Budget:
        row = self._row(request, pk)
        if not Budget.objects.editable_by(person(request)).filter(pk=pk).exists():
            raise PermissionDenied(f"The budgets of {row.kind} {row.subject.name} are not yours to set. {_LEAD}")
        return row


def _one_budget(pk: int) -> dict[str, Any]:
    lines = standing.budget_lines(standing.with_subjects(Budget.objects.filter(pk=pk)), timezone.now())
    if not lines:
        raise Http404
    return _budget(lines[0])


def _number(request: Request, name: str) -> int | None:
    text = word(request, name)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and 0 < len(text) < 19):
        message = f"{name}={text[:40]!r} is not a number."
        raise Refused(message, code="invalid", fields={name: [message]})
    return int(text)


urlpatterns = [
    path("organisations", Organisations.as_view(), name="api-organisations"),
    path("teams", Teams.as_view(), name="api-teams"),
    *(
        path(f"{kind}s/<int:pk>/limits", Limits.as_view(kind=kind), name=f"api-{kind}-limits")
        for kind in limits.SUBJECTS
    ),
    path("budgets", Budgets.as_view(), name="api-budgets"),
    path("budgets/<int:pk>", BudgetDetail.as_view(), name="api-budget"),
]
