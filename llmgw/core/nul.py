"""NUL in an address: no record has it, PostgreSQL refuses to look for it, and SQLite ends words at it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import Http404, HttpRequest, HttpResponse

UNKNOWN = "%EF%BF%BD"


class WithoutNul:
    """A path that holds NUL leads nowhere; in a query it reads as U+FFFD."""

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if self.is_async:
            return cast(HttpResponse, self._later(request))
        self._look(request)
        return self.get_response(request)

    async def _later(self, request: HttpRequest) -> HttpResponse:
        self._look(request)
        return await cast(Awaitable[HttpResponse], self.get_response(request))

    @staticmethod
    def _look(request: HttpRequest) -> None:
        if "\0" in request.path_info:
            raise Http404
        query = request.META.get("QUERY_STRING", "")
        if "%00" in query or "\0" in query:
            # Not taken out: what stood around it could then join to another one.
            request.META["QUERY_STRING"] = query.replace("%00", UNKNOWN).replace("\0", UNKNOWN)
