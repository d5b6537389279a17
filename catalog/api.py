"""The API of the catalog, for operators: models one by one, the whole as YAML, its versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models import QuerySet
from django.http import Http404, HttpResponse
from django.urls import path
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from catalog import actions, document, spec, yaml_io
from catalog.actions import Applied, CatalogRefused
from catalog.document import Document, Read
from catalog.models import CatalogVersion, Model
from catalog.spec import Problem
from tenants.api_rules import Refused, actor, paged
from tenants.api_views import BoundedJson, OperatorView, check_size

YAML = "application/yaml"


class YamlText(BaseParser):
    """A catalog's text, undecoded by anything but UTF-8."""

    media_type = YAML

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        check_size(parser_context["request"])
        try:
            text: str = stream.read().decode("utf-8")
        except UnicodeDecodeError:
            raise Refused("The catalog is not UTF-8 text; save it as such.", code="invalid") from None
        return text


_MODEL = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "description": "The same keys as in the catalog's YAML.",
    "properties": {key: {} for key in document.MODEL_KEYS},
}
_ADAPTER = {
    "type": "object",
    "required": ["name", "source"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "source": {"type": "string", "description": "A path on nodes, an address of a file, or an id of the hub."},
    },
}
_PROBLEM = inline_serializer(
    "CatalogProblem",
    {
        "model": serializers.CharField(),
        "profile": serializers.CharField(),
        "field": serializers.CharField(),
        "text": serializers.CharField(),
        "line": serializers.IntegerField(allow_null=True),
    },
)
_APPLIED = inline_serializer(
    "CatalogApplied",
    {
        "version": serializers.IntegerField(),
        "added": serializers.ListField(child=serializers.CharField()),
        "changed": serializers.ListField(child=serializers.CharField()),
        "removed": serializers.ListField(child=serializers.CharField()),
        "notices": serializers.ListField(child=_PROBLEM),
    },
)


def refused(problems: tuple[Problem, ...]) -> Refused:
    """The problems as the API's error: each by its place, and all of them in order."""
    fields: dict[str, list[str]] = {}
    for problem in problems:
        place = [f"models.{problem.model}"] if problem.model else []
        place += [f"profiles.{problem.profile}"] if problem.profile else []
        place += [problem.field] if problem.field else []
        fields.setdefault(".".join(place) or "body", []).append(problem.text)
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    return Refused(
        f"{problems[0]}{more}",
        code="catalog_refused",
        fields=fields,
        more={"problems": [_problem(problem) for problem in problems]},
    )


def _problem(problem: Problem) -> Document:
    return {
        "model": problem.model,
        "profile": problem.profile,
        "field": problem.field,
        "text": problem.text,
        "line": problem.line,
    }


def _tried(change: Callable[[], Applied], *, made: bool = False) -> Response:
    try:
        done = change()
    except CatalogRefused as error:
        raise refused(error.problems) from None
    return _applied(done, made=made)


def _applied(done: Applied, *, made: bool = False) -> Response:
    data = {
        "version": done.version,
        "added": done.added,
        "changed": done.changed,
        "removed": done.removed,
        "notices": [_problem(problem) for problem in done.notices],
    }
    return Response(data, status=status.HTTP_201_CREATED if made else status.HTTP_200_OK)


def _usable(read: Read) -> Read:
    if read.problems:
        raise refused(read.problems)
    return read


def _model(name: str) -> spec.Model:
    found = Model.objects.named(name)
    if found is None:
        raise Http404
    return found


# --- models ----------------------------------------------------------------------------------------------------------
class Models(OperatorView):
    @extend_schema(
        operation_id="v1_models_list",
        responses={
            (200, "application/json"): {"type": "object", "properties": {"results": {"type": "array", "items": _MODEL}}}
        },
    )
    def get(self, request: Request) -> Response:
        """Every model, in its order of declaration."""
        return paged([document.write_model(model) for model in Model.objects.snapshot()], None)


@extend_schema(parameters=[OpenApiParameter("name", str, OpenApiParameter.PATH)])
class ModelDetail(OperatorView):
    @extend_schema(responses={(200, "application/json"): _MODEL})
    def get(self, request: Request, name: str) -> Response:
        """One model by its name."""
        return Response(document.write_model(_model(name)))

    @extend_schema(request={"application/json": _MODEL}, responses={200: _APPLIED, 201: _APPLIED})
    def put(self, request: Request, name: str) -> Response:
        """Add the model, or put this in its place; another name in the body renames it."""
        data = request.data
        if isinstance(data, dict) and "name" not in data:
            data = {"name": name, **data}
        model = _usable(document.read_model(data)).models[0]
        exists = Model.objects.filter(name=name).exists()
        if not exists and model.name != name:
            raise Http404
        replaces = name if exists else None
        return _tried(lambda: actions.put_model(model=model, replaces=replaces, actor=actor(request)), made=not exists)

    @extend_schema(responses=_APPLIED)
    def delete(self, request: Request, name: str) -> Response:
        """Take the model out; its replicas are drained and stopped."""
        _model(name)
        return _tried(lambda: actions.remove_model(name=name, actor=actor(request)))


# --- adapters --------------------------------------------------------------------------------------------------------
@extend_schema(parameters=[OpenApiParameter("name", str, OpenApiParameter.PATH)])
class Adapters(OperatorView):
    @extend_schema(
        operation_id="v1_models_adapters_list",
        responses={
            (200, "application/json"): {
                "type": "object",
                "properties": {"results": {"type": "array", "items": _ADAPTER}},
            }
        },
    )
    def get(self, request: Request, name: str) -> Response:
        """The model's LoRA adapters, in their order."""
        return paged(document.write_model(_model(name)).get("adapters", []), None)

    @extend_schema(request={"application/json": _ADAPTER}, responses={201: _APPLIED})
    def post(self, request: Request, name: str) -> Response:
        """Add one. Its file is read first, where this machine can, and refused if it is none for the model.

        What could not be read or compared stands in `notices`; nodes look again before they start an engine.
        """
        _model(name)
        adapter, problems = document.read_adapter(request.data, model=name)
        if problems:
            raise refused(problems)
        return _tried(lambda: actions.add_adapter(model=name, adapter=adapter, actor=actor(request)), made=True)

    @extend_schema(
        parameters=[OpenApiParameter("adapter", str, required=True, description="Its name.")], responses=_APPLIED
    )
    def delete(self, request: Request, name: str) -> Response:
        """Take one from the model; other adapters and the model itself go on being served."""
        _model(name)
        adapter = request.query_params.get("adapter", "")
        return _tried(lambda: actions.remove_adapter(model=name, name=adapter, actor=actor(request)))


# --- the whole -------------------------------------------------------------------------------------------------------
class Catalog(OperatorView):
    parser_classes = [YamlText, BoundedJson]

    @extend_schema(responses={(200, YAML): OpenApiTypes.STR})
    def get(self, request: Request) -> HttpResponse:
        """The catalog as YAML."""
        return HttpResponse(yaml_io.dump(Model.objects.snapshot()), content_type=f"{YAML}; charset=utf-8")

    @extend_schema(
        request={YAML: OpenApiTypes.STR, "application/json": OpenApiTypes.OBJECT},
        parameters=[
            OpenApiParameter("check", bool, description="Only say whether it would be taken."),
            OpenApiParameter("note", str, description="Why; kept with the version."),
        ],
        responses=_APPLIED,
    )
    def put(self, request: Request) -> Response:
        """Make this the whole catalog, or leave it as it is and say why."""
        data = request.data
        # JSON is YAML too, but only as data: its text is gone when it arrives here.
        read = yaml_io.parse(data) if isinstance(data, str) else document.read(data)
        models = _usable(read).models
        if request.query_params.get("check", "").lower() in ("1", "true", "yes"):
            return _tried(lambda: actions.check_catalog(models=models))
        note = request.query_params.get("note", "")
        return _tried(lambda: actions.apply_catalog(models=models, actor=actor(request), note=note))


class VersionSerializer(serializers.ModelSerializer[CatalogVersion]):
    class Meta:
        model = CatalogVersion
        fields = ["number", "made_at", "made_by", "note"]


class WholeVersionSerializer(serializers.ModelSerializer[CatalogVersion]):
    class Meta:
        model = CatalogVersion
        fields = ["number", "made_at", "made_by", "note", "text"]


class Versions(generics.ListAPIView[CatalogVersion], OperatorView):
    serializer_class = VersionSerializer

    def get_queryset(self) -> QuerySet[CatalogVersion]:
        return CatalogVersion.objects.defer("text")


class VersionDetail(generics.RetrieveAPIView[CatalogVersion], OperatorView):
    serializer_class = WholeVersionSerializer
    lookup_field = "number"

    def get_queryset(self) -> QuerySet[CatalogVersion]:
        return CatalogVersion.objects.all()


class VersionRollBack(OperatorView):
    @extend_schema(request=None, responses={200: _APPLIED, 404: OpenApiResponse()})
    def post(self, request: Request, number: int) -> Response:
        """Make an earlier version the catalog again, as a new version."""
        if not CatalogVersion.objects.filter(number=number).exists():
            raise Http404
        return _tried(lambda: actions.roll_back(version=number, actor=actor(request)))


urlpatterns = [
    path("catalog", Catalog.as_view(), name="api-catalog"),
    path("catalog/versions", Versions.as_view(), name="api-catalog-versions"),
    path("catalog/versions/<int:number>", VersionDetail.as_view(), name="api-catalog-version"),
    path("catalog/versions/<int:number>/roll-back", VersionRollBack.as_view(), name="api-catalog-roll-back"),
    path("models", Models.as_view(), name="api-models"),
    path("models/<path:name>/adapters", Adapters.as_view(), name="api-adapters"),
    path("models/<path:name>", ModelDetail.as_view(), name="api-model"),
]
