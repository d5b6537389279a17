"""Requests that no browser sends and that Django or the store would stumble over: answered here, in words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest

UNKNOWN = "%EF%BF%BD"


class OddRequests:
    """NUL, which PostgreSQL refuses to look for: a path with it leads nowhere, in a query it reads as U+FFFD.

    Forms in another alphabet than UTF-8: Django's own refusal fails while it reads them again.
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if self.is_async:
            return cast(HttpResponse, self._later(request))
        return self._look(request) or self.get_response(request)

    async def _later(self, request: HttpRequest) -> HttpResponse:
        return self._look(request) or await cast(Awaitable[HttpResponse], self.get_response(request))

    @staticmethod
    def _look(request: HttpRequest) -> HttpResponse | None:
        if "\0" in request.path_info:
            raise Http404
        query = request.META.get("QUERY_STRING", "")
        if "%00" in query or "\0" in query:
            # Not taken out: what stood around it could then join to another one.
            request.META["QUERY_STRING"] = query.replace("%00", UNKNOWN).replace("\0", UNKNOWN)
        written_in = (request.content_params or {}).get("charset", "utf-8")
        if request.content_type == "application/x-www-form-urlencoded" and written_in.lower() not in ("utf-8", "utf8"):
            return HttpResponseBadRequest("Send the form as UTF-8.", content_type="text/plain")
        return None
