"""What every route of the API shares: who asks, what a token may do, pages without counting, one envelope for errors.

Errors read {"error": {"code", "message", "fields"}}: the message is a sentence with the next step, `fields` maps the
name of each wrong field to what is wrong with it. llmgw.settings names these classes; the views are in api_views.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig, ValidationError
from django.db.models import Model, QuerySet
from django.http import Http404
from django.utils import timezone
from rest_framework import exceptions, status
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.pagination import BasePagination
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from llmgw.core import store_faults
from tenants.audit import Actor
from tenants.keys import MAX_LENGTH, digest
from tenants.models import ApiToken, User

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_PAGE = 1000
NOTED_EVERY = timedelta(minutes=1)
CTL_AGENT = "llmgw-ctl"
_NEXT = {
    "not_authenticated": "Sign in, or send an API token: Authorization: Bearer at-…",
    "not_found": "There is nothing here that you can see.",
}


class Refused(exceptions.APIException):
    """A request that cannot be carried out, in one sentence; `fields` names what must change in it."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "refused",
        status_code: int = status.HTTP_400_BAD_REQUEST,
        fields: Mapping[str, Sequence[str]] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(detail=message, code=code)
        self.code, self.status_code = code, status_code
        self.fields, self.more = dict(fields or {}), dict(more or {})


class TooLarge(Refused):
    def __init__(self) -> None:
        message = f"The body is larger than {MAX_BODY_BYTES} bytes; send less at once."
        super().__init__(message, code="too_large", status_code=status.HTTP_413_REQUEST_ENTITY_TOO_LARGE)


# --- who asks --------------------------------------------------------------------------------------------------------
class TokenAuthentication(BaseAuthentication):
    """`Authorization: Bearer at-…`. Other schemes are left to the session."""

    def authenticate(self, request: Request) -> tuple[User, ApiToken] | None:
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None
        text = text.strip()
        if text.startswith("sk-"):
            raise exceptions.AuthenticationFailed(
                "This is a project key: it works at /v1/. The API needs an API token (at-…)."
            )
        token = self._live(text, timezone.now()) if len(text) <= MAX_LENGTH else None
        if token is None:
            raise exceptions.AuthenticationFailed("This API token does not exist, has expired or was revoked.")
        return token.user, token

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="llmgw"'

    @staticmethod
    def _live(text: str, now: datetime) -> ApiToken | None:
        token = ApiToken.objects.select_related("user").filter(digest=digest(text), revoked_at=None).first()
        if token is None or not token.user.is_active or (token.expires_at and token.expires_at <= now):
            return None
        if token.last_used_at is None or token.last_used_at < now - NOTED_EVERY:
            ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
        return token


class SignedInWithinScope(BasePermission):
    """People who are signed in; with a token, what its scopes allow: `read` to look, `write` to change."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not request.user.is_authenticated:
            return False
        token = request.auth
        needed = "read" if request.method in SAFE_METHODS else "write"
        if isinstance(token, ApiToken) and needed not in token.scopes:
            self.message = f"This token's scopes are {', '.join(token.scopes) or 'none'}; this needs {needed}."
            return False
        return True


class OperatorsOnly(BasePermission):
    """For everybody else the route does not exist."""

    def has_permission(self, request: Request, view: Any) -> bool:
        if not person(request).is_operator:
            raise Http404
        return True


def person(request: Request) -> User:
    assert isinstance(request.user, User)
    return request.user


def actor(request: Request) -> Actor:
    """Who changes something, and whether the command line did it for them."""
    user = person(request)
    via = "cli" if request.headers.get("User-Agent", "").startswith(CTL_AGENT) else "api"
    return Actor(name=user.username, via=via, user=user, address=request.META.get("REMOTE_ADDR", ""))


# --- what was sent ---------------------------------------------------------------------------------------------------
def body(request: Request) -> dict[str, Any]:
    """The body as an object, or a refusal."""
    data = request.data
    if not isinstance(data, Mapping):
        raise Refused("The body must be a JSON object.", code="invalid")
    return dict(data)


def moment(request: Request, name: str) -> datetime | None:
    """A time from the query, ISO 8601; without an offset it is UTC."""
    text = request.query_params.get(name)
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
        # Near the ends of the calendar an offset leads beyond it.
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        message = f"{name}={text[:40]!r} is not a time such as 2026-01-31T12:00:00Z."
        raise Refused(message, code="invalid", fields={name: [message]}) from None


def word(request: Request, name: str) -> str:
    """A text from the query that any store can look for."""
    return request.query_params.get(name, "").replace("\0", "")[:400]


# --- pages -----------------------------------------------------------------------------------------------------------
class ByIdPagination(BasePagination):
    """`?limit=&after=`: rows in the order of their key, newest first unless the view says `ascending`.

    One query that costs the same on every page; nothing is counted. `next` is the `after` of the next page.
    """

    default = 100

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        size = page_size(request, self.default)
        ascending = getattr(view, "ascending", False)
        after = word(request, "after")
        if after:
            try:
                value = queryset.model._meta.pk.to_python(after)
            except ValidationError:
                message = f"after={after[:40]!r} is not the next of an earlier page."
                raise Refused(message, code="invalid", fields={"after": [message]}) from None
            queryset = queryset.filter(pk__gt=value) if ascending else queryset.filter(pk__lt=value)
        rows = list(queryset.order_by("pk" if ascending else "-pk")[: size + 1])
        self.next = str(rows[size - 1].pk) if len(rows) > size else None
        return rows[:size]

    def get_paginated_response(self, data: Any) -> Response:
        return paged(data, self.next)

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        following = {"type": "string", "nullable": True, "description": "`after` of the next page; null on the last."}
        properties = {"results": schema, "next": following}
        return {"type": "object", "required": ["results", "next"], "properties": properties}

    def get_schema_operation_parameters(self, view: Any) -> list[dict[str, Any]]:
        return [
            {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
            {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "`next` of an earlier page."},
        ]


def page_size(request: Request, default: int = 100) -> int:
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= MAX_PAGE):
        message = f"limit={text[:20]!r} is not a number from 1 to {MAX_PAGE}."
        raise Refused(message, code="invalid", fields={"limit": [message]})
    return int(text)


def paged(rows: Any, following: str | None) -> Response:
    return Response({"results": rows, "next": following})


def one(rows: QuerySet[Model], **where: object) -> Any:
    """The row, or 404. `rows` is what this person may see."""
    found = rows.filter(**where).first()
    if found is None:
        raise Http404
    return found


# --- errors ----------------------------------------------------------------------------------------------------------
def explain_error(error: Exception, context: Mapping[str, Any]) -> Response:
    """Every error as the one envelope. What nobody expected is logged and told without its insides."""
    if isinstance(error, Http404):
        error = exceptions.NotFound(_NEXT["not_found"])
    elif isinstance(error, PermissionDenied):
        error = exceptions.PermissionDenied()
    elif isinstance(error, RequestDataTooBig):
        error = TooLarge()
    if why := store_faults.sentence(error):
        log.error("The API could not do what %s asks: %s", context["request"].path, error)
        error = Refused(why, code="store_unavailable", status_code=503)
    if not isinstance(error, exceptions.APIException):
        log.error("The API failed at %s", context["request"].path, exc_info=error)
        error = Refused("Something failed here. The server's log says what.", code="internal", status_code=500)
    from rest_framework.views import set_rollback  # that module reads the settings which name this one

    set_rollback()
    headers: dict[str, str] = {}
    if header := getattr(error, "auth_header", None):
        headers["WWW-Authenticate"] = header
    if (wait := getattr(error, "wait", None)) is not None:
        headers["Retry-After"] = str(int(wait))
    return Response({"error": _sendable(_envelope(error))}, status=error.status_code, headers=headers)


def _envelope(error: exceptions.APIException) -> dict[str, object]:
    if isinstance(error, Refused):
        return {"code": error.code, "message": str(error.detail), "fields": error.fields, **error.more}
    if isinstance(error, exceptions.ValidationError):
        fields: dict[str, list[str]] = {}
        for name, text in _flatten(error.detail, ""):
            fields.setdefault(name or "body", []).append(text)
        name, texts = next(iter(fields.items()), ("body", ["It cannot be read."]))
        return {"code": "invalid", "message": f"{name}: {texts[0]}", "fields": fields}
    code = error.default_code
    text = _NEXT["not_authenticated"] if isinstance(error, exceptions.NotAuthenticated) else str(error.detail)
    return {"code": code, "message": text, "fields": {}}


def _sendable(part: object) -> object:
    """What was sent may be repeated, but half a character (a lone surrogate, \\ud800 in JSON) cannot be."""
    if isinstance(part, str):
        return part.encode("utf-8", "backslashreplace").decode()
    if isinstance(part, Mapping):
        return {_sendable(name): _sendable(value) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_sendable(value) for value in part]
    return part


def _flatten(detail: object, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(detail, Mapping):
        for name, inner in detail.items():
            own = "" if name == "non_field_errors" else str(name)
            yield from _flatten(inner, f"{at}.{own}".strip("."))
    elif isinstance(detail, list):
        for inner in detail:
            yield from _flatten(inner, at)
    else:
        yield at, str(detail)
