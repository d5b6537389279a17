"""The API of people and what they own: me, API tokens, projects, keys, usage."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.http import Http404
from django.urls import path
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions, finding, usage
from tenants.api_rules import Refused, actor, moment, one, page_size, paged, person, word
from tenants.api_views import ApiView, Exact
from tenants.models import ApiToken, Key, Project, Usage, User

MAX_MODELS = 256
MAX_SPAN = timedelta(days=92)


def _name(text: str) -> None:
    if not text.isprintable():
        raise serializers.ValidationError("It holds characters that cannot be seen; remove them.")


def _ahead(at: datetime | None) -> None:
    if at is not None and at <= timezone.now():
        raise serializers.ValidationError("It lies in the past; name a time to come, or leave it out.")


# --- me --------------------------------------------------------------------------------------------------------------
class MeSerializer(serializers.ModelSerializer[User]):
    teams = serializers.SerializerMethodField()
    scopes = serializers.SerializerMethodField()

    class Meta:
        model = User
        fields = ["id", "username", "email", "is_operator", "teams", "scopes"]

    def get_teams(self, user: User) -> list[dict[str, str]]:
        rows = user.memberships.select_related("team").order_by("team__name")
        return [{"name": row.team.name, "role": row.role} for row in rows]

    def get_scopes(self, user: User) -> list[str]:
        return list(self.context["scopes"])


class Me(ApiView):
    @extend_schema(responses=MeSerializer)
    def get(self, request: Request) -> Response:
        """Who you are here, in which teams, and what your token allows."""
        token = request.auth
        scopes = token.scopes if isinstance(token, ApiToken) else actions.SCOPES
        return Response(MeSerializer(person(request), context={"scopes": scopes}).data)


# --- API tokens ------------------------------------------------------------------------------------------------------
class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    class Meta:
        model = ApiToken
        fields = ["id", "name", "prefix", "scopes", "made_at", "expires_at", "revoked_at", "last_used_at"]


class NewTokenSerializer(Exact[ApiToken]):
    name = serializers.CharField(max_length=80, validators=[_name])
    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=actions.SCOPES), default=["read"], min_length=1, max_length=2
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None, validators=[_ahead])


class Tokens(generics.ListAPIView[ApiToken], ApiView):
    serializer_class = TokenSerializer

    def get_queryset(self) -> QuerySet[ApiToken]:
        return ApiToken.objects.filter(user=person(self.request))

    @extend_schema(
        request=NewTokenSerializer,
        responses={
            201: inline_serializer(
                "MadeToken", {"token": TokenSerializer(), "secret": serializers.CharField(help_text="Shown once.")}
            )
        },
    )
    def post(self, request: Request) -> Response:
        """A token that acts as you, with no more scopes than you came with. Its secret is in this answer only."""
        wanted = NewTokenSerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        values: dict[str, Any] = wanted.validated_data
        own = request.auth.scopes if isinstance(request.auth, ApiToken) else actions.SCOPES
        beyond = [scope for scope in values["scopes"] if scope not in own]
        if beyond:
            raise PermissionDenied(f"Your own token lacks {', '.join(beyond)} and cannot hand it on.")
        end = request.auth.expires_at if isinstance(request.auth, ApiToken) else None
        if end and (values["expires_at"] is None or values["expires_at"] > end):
            raise PermissionDenied(f"Your own token ends at {end:%Y-%m-%dT%H:%M:%SZ}; name an expires_at up to then.")
        token, secret = actions.make_api_token(
            user=person(request),
            name=values["name"],
            scopes=values["scopes"],
            expires_at=values["expires_at"],
            actor=actor(request),
        )
        return Response({"token": TokenSerializer(token).data, "secret": secret}, status=status.HTTP_201_CREATED)


class TokenRevoke(ApiView):
    @extend_schema(request=None, responses=TokenSerializer)
    def post(self, request: Request, pk: int) -> Response:
        """Stop one of your tokens at once; again changes nothing."""
        token = one(ApiToken.objects.filter(user=person(request)), pk=pk)
        actions.revoke_api_token(token=token, actor=actor(request))
        token.refresh_from_db()
        return Response(TokenSerializer(token).data)


# --- projects and keys -----------------------------------------------------------------------------------------------
class ProjectSerializer(serializers.ModelSerializer[Project]):
    team = serializers.CharField(source="team.name")

    class Meta:
        model = Project
        fields = ["id", "name", "slug", "team", "models_allowed", "made_at"]


class Projects(generics.ListAPIView[Project], ApiView):
    serializer_class = ProjectSerializer
    ascending = True

    def get_queryset(self) -> QuerySet[Project]:
        return Project.objects.visible_to(person(self.request)).select_related("team")


class ProjectDetail(generics.RetrieveAPIView[Project], ApiView):
    serializer_class = ProjectSerializer

    def get_queryset(self) -> QuerySet[Project]:
        return Project.objects.visible_to(person(self.request)).select_related("team")


class KeySerializer(serializers.ModelSerializer[Key]):
    project_name = serializers.CharField(source="project.name")
    owner = serializers.CharField(source="owner.username", default=None, allow_null=True)

    class Meta:
        model = Key
        fields = [
            "id",
            "name",
            "prefix",
            "project",
            "project_name",
            "owner",
            "models_allowed",
            "made_at",
            "expires_at",
            "revoked_at",
            "last_used_at",
        ]


class NewKeySerializer(Exact[Key]):
    project = serializers.IntegerField(min_value=1, max_value=2**63 - 1)
    name = serializers.CharField(max_length=80, validators=[_name])
    models_allowed = serializers.ListField(
        child=serializers.CharField(max_length=200, validators=[_name]), default=list, max_length=MAX_MODELS
    )
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None, validators=[_ahead])


class Keys(generics.ListAPIView[Key], ApiView):
    serializer_class = KeySerializer

    def get_queryset(self) -> QuerySet[Key]:
        rows = Key.objects.visible_to(person(self.request)).select_related("project", "owner")
        prefix = word(self.request, "prefix")
        return rows.filter(prefix__startswith=prefix) if prefix else rows

    @extend_schema(parameters=[OpenApiParameter("prefix", str, description="Only keys that begin so.")])
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """Keys of the projects that you see, newest first."""
        return super().get(request, *args, **kwargs)

    @extend_schema(
        request=NewKeySerializer,
        responses={
            201: inline_serializer(
                "MadeKey", {"key": KeySerializer(), "secret": serializers.CharField(help_text="Shown once.")}
            )
        },
    )
    def post(self, request: Request) -> Response:
        """A key for a project. Its secret is in this answer and nowhere else."""
        wanted = NewKeySerializer(data=request.data)
        wanted.is_valid(raise_exception=True)
        values: dict[str, Any] = wanted.validated_data
        project = Project.objects.visible_to(person(request)).filter(pk=values["project"]).first()
        if project is None:
            message = f"There is no project {values['project']} that you can see."
            raise Refused(message, code="not_found", status_code=404, fields={"project": [message]})
        if not Project.objects.editable_by(person(request)).filter(pk=project.pk).exists():
            raise PermissionDenied(
                f"Your role in {project.name} is to look. Ask an owner or lead of its team for a key."
            )
        key, secret = actions.make_key(
            project=project,
            name=values["name"],
            models_allowed=values["models_allowed"],
            expires_at=values["expires_at"],
            actor=actor(request),
        )
        return Response({"key": KeySerializer(key).data, "secret": secret}, status=status.HTTP_201_CREATED)


class KeyDetail(generics.RetrieveAPIView[Key], ApiView):
    serializer_class = KeySerializer

    def get_queryset(self) -> QuerySet[Key]:
        return Key.objects.visible_to(person(self.request)).select_related("project", "owner")


class KeyRevoke(ApiView):
    @extend_schema(request=None, responses=KeySerializer)
    def post(self, request: Request, pk: int) -> Response:
        """Stop a key at once; again changes nothing."""
        user = person(request)
        key = one(Key.objects.visible_to(user).select_related("project", "owner"), pk=pk)
        if not Key.objects.editable_by(user).filter(pk=key.pk).exists():
            raise PermissionDenied(f"Your role in {key.project.name} is to look. Ask an owner or lead to revoke it.")
        actions.revoke_key(key=key, actor=actor(request))
        key.refresh_from_db(fields=["revoked_at"])
        return Response(KeySerializer(key).data)


# --- usage -----------------------------------------------------------------------------------------------------------
class UsageSerializer(serializers.ModelSerializer[Usage]):
    """One finished request. Null token counts are unknown, not zero."""

    project_name = serializers.CharField(source="project.name", default=None, allow_null=True)
    key_prefix = serializers.CharField(source="key.prefix", default=None, allow_null=True)

    class Meta:
        model = Usage
        exclude = ["id", "user", "explained"]


_FILTERS = [
    OpenApiParameter("project", int, description="Only this project's."),
    OpenApiParameter("model", str, description="Only this model's."),
    OpenApiParameter("since", datetime, description="Ended at or after."),
    OpenApiParameter("until", datetime, description="Ended before."),
]


def _chosen(request: Request) -> QuerySet[Usage]:
    """What this person sees of what the query asks for."""
    rows = Usage.objects.visible_to(person(request))
    project, model = word(request, "project"), word(request, "model")
    if project:
        if not (project.isascii() and project.isdecimal() and len(project) < 19):
            raise Refused("project must be a number, as /api/v1/projects lists them.", fields={"project": [project]})
        found = Project.objects.visible_to(person(request)).filter(pk=int(project))
        if not found.exists():
            raise Http404
        rows = rows.filter(project_id=int(project))
    if model:
        rows = rows.filter(model=model)
    since, until = moment(request, "since"), moment(request, "until")
    if since:
        rows = rows.filter(at__gte=since)
    if until:
        rows = rows.filter(at__lt=until)
    return rows


def wanted(request: Request, fields: Sequence[str] = ("project", "model", "since", "until")) -> finding.Wanted:
    """Which requests the query asks for, among those that this person sees."""
    asked = finding.read({name: word(request, name) for name in fields}, person(request))
    if asked.missing:
        raise Http404
    if asked.problems:
        name, text = next(iter(asked.problems.items()))
        raise Refused(f"{name}: {text}", code="invalid", fields={name: [said] for name, said in asked.problems.items()})
    return asked.wanted


def found(request: Request, wanted: finding.Wanted) -> finding.Found:
    """The page that the query asks for."""
    after = word(request, "after")
    if after and usage.read_cursor(after) is None:
        message = "after is not the next of an earlier page."
        raise Refused(message, code="invalid", fields={"after": [message]})
    return finding.find(wanted, before=after, size=page_size(request))


class UsageList(ApiView):
    @extend_schema(
        parameters=[*_FILTERS, OpenApiParameter("limit", int), OpenApiParameter("after", str)],
        responses=inline_serializer(
            "UsagePage",
            {"results": UsageSerializer(many=True), "next": serializers.CharField(allow_null=True)},
        ),
    )
    def get(self, request: Request) -> Response:
        """Finished requests, newest first."""
        page = found(request, wanted(request))
        return paged(UsageSerializer(page.rows, many=True).data, page.older or None)


class UsageTotals(ApiView):
    @extend_schema(
        parameters=_FILTERS,
        responses=inline_serializer(
            "UsageTotals",
            {
                "since": serializers.DateTimeField(),
                "until": serializers.DateTimeField(allow_null=True),
                "requests": serializers.IntegerField(),
                "failed": serializers.IntegerField(),
                "prompt_tokens": serializers.IntegerField(),
                "completion_tokens": serializers.IntegerField(),
            },
        ),
    )
    def get(self, request: Request) -> Response:
        """Sums since midnight UTC, or of the span that you name (at most 92 days)."""
        now = timezone.now()
        since, until = moment(request, "since") or usage.midnight(now), moment(request, "until")
        if (until or now) - since > MAX_SPAN:
            message = f"A span has at most {MAX_SPAN.days} days; move since or until."
            raise Refused(message, code="invalid", fields={"since": [message]})
        totals = usage.totals(_chosen(request).filter(at__gte=since))
        return Response(
            {
                "since": since,
                "until": until,
                "requests": totals.requests,
                "failed": totals.failed,
                "prompt_tokens": totals.prompt_tokens,
                "completion_tokens": totals.completion_tokens,
            }
        )


urlpatterns = [
    path("me", Me.as_view(), name="api-me"),
    path("tokens", Tokens.as_view(), name="api-tokens"),
    path("tokens/<int:pk>/revoke", TokenRevoke.as_view(), name="api-token-revoke"),
    path("projects", Projects.as_view(), name="api-projects"),
    path("projects/<int:pk>", ProjectDetail.as_view(), name="api-project"),
    path("keys", Keys.as_view(), name="api-keys"),
    path("keys/<int:pk>", KeyDetail.as_view(), name="api-key"),
    path("keys/<int:pk>/revoke", KeyRevoke.as_view(), name="api-key-revoke"),
    path("usage", UsageList.as_view(), name="api-usage"),
    path("usage/totals", UsageTotals.as_view(), name="api-usage-totals"),
]
