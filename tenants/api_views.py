"""What the API's views start from: bounded bodies, and operators only where the cluster is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import exceptions, serializers
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.views import APIView

from tenants.api_rules import MAX_BODY_BYTES, OperatorsOnly, Refused, SignedInWithinScope, TokenAuthentication, TooLarge

Row = TypeVar("Row")


class BoundedJson(JSONParser):
    """JSON up to MAX_BODY_BYTES; nesting that Python cannot follow is an error of the sender's."""

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        check_size(parser_context["request"])
        try:
            return super().parse(stream, media_type, parser_context)
        except RecursionError:
            raise exceptions.ParseError("The JSON is nested too deeply.") from None


def check_size(request: Request) -> None:
    length = request.META.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
        raise TooLarge


class Exact(serializers.Serializer[Row]):
    """What is sent, field by field: a mistyped one would say nothing, and leave what it was to limit without limit."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = sorted(str(name)[:80] for name in data if name not in self.fields)[:10]
            if unknown:
                known = f"There is no such field. Known here: {', '.join(self.fields)}."
                raise serializers.ValidationError({name: [known] for name in unknown})
        return super().to_internal_value(data)


class ApiView(APIView):
    parser_classes = [BoundedJson]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        if "Transfer-Encoding" in request.headers and not request.headers.get("Content-Length"):
            # Django would take such a body for an empty one.
            raise Refused("Send the body with its Content-Length.", code="length_required", status_code=411)


class OperatorView(ApiView):
    permission_classes = [SignedInWithinScope, OperatorsOnly]


class _TokenInSchema(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = TokenAuthentication
    name = "token"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API token, at-…"}
