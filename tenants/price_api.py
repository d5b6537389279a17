"""The API of prices, and of usage summed by hours and days."""

from __future__ import annotations

import base64
import binascii
import json
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db.models import F, Q, QuerySet, Sum
from django.db.models.functions import TruncDay, TruncHour
from django.http import Http404
from django.urls import path
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions, limits, money, standing
from tenants.api_rules import Refused, actor, moment, one, page_size, paged, person, word
from tenants.api_views import ApiView, Exact, OperatorView
from tenants.models import Price, Project, UsageSlot
from tenants.periods import bounds
from tenants.usage import midnight

PRICES = ("input", "cached_input", "output", "request")


# --- prices ----------------------------------------------------------------------------------------------------------
class PriceSerializer(serializers.Serializer[Price]):
    """In the currency: a million tokens, and a request. A null `cached_input` is what `input` is."""

    id = serializers.IntegerField()
    model = serializers.CharField()
    valid_from = serializers.DateTimeField()
    currency = serializers.CharField()
    input = serializers.CharField()
    cached_input = serializers.CharField(allow_null=True)
    output = serializers.CharField()
    request = serializers.CharField()

    def to_representation(self, instance: Price) -> dict[str, Any]:
        amounts = {name: getattr(instance, name) for name in PRICES}
        return {
            "id": instance.pk,
            "model": instance.model,
            "valid_from": instance.valid_from.isoformat(),
            "currency": standing.currency(),
            **{name: None if value is None else f"{money.decimal(value):f}" for name, value in amounts.items()},
        }


def _amount(**more: Any) -> serializers.DecimalField:
    return serializers.DecimalField(max_digits=18, decimal_places=8, min_value=Decimal(0), **more)


class NewPriceSerializer(Exact[Price]):
    model = serializers.CharField(max_length=limits.MAX_NAME)
    valid_from = serializers.DateTimeField(required=False, help_text="Now, when it is left out.")
    input = _amount()
    cached_input = _amount(required=False, allow_null=True, default=None)
    output = _amount()
    request = _amount(required=False, default=Decimal(0))

    def validate_model(self, name: str) -> str:
        objection = limits.names_objection([name])
        if objection:
            raise serializers.ValidationError(objection)
        return name


class Prices(generics.ListAPIView[Price], OperatorView):
    serializer_class = PriceSerializer

    def get_queryset(self) -> QuerySet[Price]:
        model = word(self.request, "model")
        return Price.objects.filter(model=model) if model else Price.objects.all()

    @extend_schema(parameters=[OpenApiParameter("model", str, description="Only this model's.")])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """What models cost, the latest entries first."""
        return super().get(request, *args, **kwargs)

    @extend_schema(request=NewPriceSerializer, responses={201: PriceSerializer})
    def post(self, request: Request) -> Response:
        """What a model costs from a time on. One of the same model and time is replaced."""
        wanted = NewPriceSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        values: dict[str, Any] = wanted.validated_data
        cached = values["cached_input"]
        price = actions.set_price(
            model=values["model"],
            valid_from=values.get("valid_from") or timezone.now().replace(microsecond=0),
            input=money.units(values["input"]),
            cached_input=None if cached is None else money.units(cached),
            output=money.units(values["output"]),
            request=money.units(values["request"]),
            actor=actor(request),
        )
        return Response(PriceSerializer(price).data, status=status.HTTP_201_CREATED)


class PriceDetail(OperatorView):
    @extend_schema(responses=PriceSerializer)
    def get(self, request: Request, pk: int) -> Response:
        """One price."""
        return Response(PriceSerializer(one(Price.objects.all(), pk=pk)).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove a price; what was recorded keeps its cost."""
        actions.remove_price(price=one(Price.objects.all(), pk=pk), actor=actor(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


# --- usage by hours and days -----------------------------------------------------------------------------------------
NUMBERS = ("project", "key", "user")
DIMENSIONS = (*NUMBERS, "model", "adapter")
SUMS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens", "unpriced")
MAX_SPANS = {"hour": timedelta(days=92), "day": timedelta(days=1100)}


class RollupRowSerializer(serializers.Serializer[Any]):
    """Sums of one hour or day. Of the names only those that `group` asks for; null for none."""

    at = serializers.DateTimeField()
    project = serializers.IntegerField(required=False, allow_null=True)
    key = serializers.IntegerField(required=False, allow_null=True)
    user = serializers.IntegerField(required=False, allow_null=True)
    model = serializers.CharField(required=False, allow_null=True)
    adapter = serializers.CharField(required=False, allow_null=True)
    requests = serializers.IntegerField()
    failed = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField()
    completion_tokens = serializers.IntegerField()
    cost = serializers.CharField()
    unpriced = serializers.IntegerField()


class Rollup(ApiView):
    @extend_schema(
        parameters=[
            OpenApiParameter("by", str, enum=list(MAX_SPANS), default="day"),
            OpenApiParameter("group", str, description=f"Also by these, with commas: {', '.join(DIMENSIONS)}."),
            *(OpenApiParameter(name, int if name in NUMBERS else str) for name in DIMENSIONS),
            OpenApiParameter("since", datetime, description="30 days ago, when it is left out."),
            OpenApiParameter("until", datetime),
            OpenApiParameter("time_zone", str, description="Where days begin; UTC when it is left out."),
            OpenApiParameter("limit", int),
            OpenApiParameter("after", str),
        ],
        responses=inline_serializer(
            "RollupPage", {"results": RollupRowSerializer(many=True), "next": serializers.CharField(allow_null=True)}
        ),
    )
    def get(self, request: Request) -> Response:
        """What was used, summed by the hour (of UTC) or the day, newest first."""
        by, names, zone = word(request, "by") or "day", _names(request), _zone(request)
        if by not in MAX_SPANS:
            raise _wrong("by", "by is hour or day.")
        rows = _between(request, _chosen(request, names), MAX_SPANS[by])
        size = page_size(request)
        if after := word(request, "after"):
            rows = rows.filter(_beyond(after, by, names, zone))
        trunc = TruncHour("at", tzinfo=UTC) if by == "hour" else TruncDay("at", tzinfo=zone)
        groups = rows.annotate(time=trunc).values("time", *names).order_by(F("time").desc(), *names)
        found = list(groups.annotate(cost=Sum("cost"), **{name: Sum(name) for name in SUMS})[: size + 1])
        following = _cursor(found[size - 1], names) if len(found) > size else None
        return paged([_row(row, names) for row in found[:size]], following)


def _row(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {
        "at": row["time"].isoformat(),
        **{name: row[name] or None for name in names},
        **{name: int(row[name]) for name in SUMS},
        "cost": f"{money.decimal(int(row['cost'])):f}",
    }


def _wrong(name: str, message: str) -> Refused:
    return Refused(message, code="invalid", fields={name: [message]})


def _names(request: Request) -> list[str]:
    names = [name for name in word(request, "group").split(",") if name]
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown or len(set(names)) < len(names):
        raise _wrong("group", f"group names each at most once of {', '.join(DIMENSIONS)}.")
    return names


def _zone(request: Request) -> zoneinfo.ZoneInfo:
    name = word(request, "time_zone") or "UTC"
    if name not in zoneinfo.available_timezones():
        raise _wrong("time_zone", f"{name[:40]!r} is no time zone that is known here; write one such as Europe/Berlin.")
    return zoneinfo.ZoneInfo(name)


def _chosen(request: Request, names: Sequence[str]) -> QuerySet[UsageSlot]:
    user = person(request)
    if ("user" in names or word(request, "user")) and not user.is_operator:
        raise PermissionDenied("What each person used is for operators to see.")
    rows: QuerySet[UsageSlot] = UsageSlot.objects.visible_to(user)
    for name in DIMENSIONS:
        text = word(request, name)
        if not text:
            continue
        if name in NUMBERS and not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise _wrong(name, f"{name} must be a number.")
        if name == "project" and not Project.objects.visible_to(user).filter(pk=int(text)).exists():
            raise Http404
        rows = rows.filter(**{name: int(text) if name in NUMBERS else text})
    return rows


def _between(request: Request, rows: QuerySet[UsageSlot], longest: timedelta) -> QuerySet[UsageSlot]:
    now = timezone.now()
    since, until = moment(request, "since") or midnight(now) - timedelta(days=30), moment(request, "until")
    if (until or now) - since > longest:
        raise _wrong("since", f"A span has at most {longest.days} days; move since or until.")
    return rows.filter(at__gte=since, at__lt=until) if until else rows.filter(at__gte=since)


def _cursor(row: dict[str, Any], names: Sequence[str]) -> str:
    place = [int(row["time"].timestamp()), *(row[name] for name in names)]
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode()


def _beyond(after: str, by: str, names: Sequence[str], zone: zoneinfo.ZoneInfo) -> Q:
    """Older hours or days, and of the same one what comes later in the order of names."""
    try:
        place = json.loads(base64.urlsafe_b64decode(after))
        kinds = [int, *(int if name in NUMBERS else str for name in names)]
        if [type(each) for each in place] != kinds or not all(abs(each) < 2**40 for each in place[:1]):
            raise ValueError
        start = datetime.fromtimestamp(place[0], UTC)
    except (ValueError, TypeError, OverflowError, RecursionError, binascii.Error):
        raise _wrong("after", "after is not the next of an earlier page.") from None
    end = place[0] + 3600 if by == "hour" else bounds("day", zone.key, place[0])[1]
    found, same = Q(at__lt=start), Q(at__gte=start, at__lt=datetime.fromtimestamp(end or 0, UTC))
    for name, value in zip(names, place[1:], strict=True):
        found |= same & Q(**{f"{name}__gt": value})
        same &= Q(**{name: value})
    return found


urlpatterns = [
    path("prices", Prices.as_view(), name="api-prices"),
    path("prices/<int:pk>", PriceDetail.as_view(), name="api-price"),
    path("usage/rollup", Rollup.as_view(), name="api-usage-rollup"),
]
