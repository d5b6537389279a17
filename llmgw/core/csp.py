"""One strict Content-Security-Policy for every page: own files only, no inline scripts or styles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse

SHUT = "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
OWN = f"default-src 'self'; img-src 'self' data:; {SHUT}"
# The admin's and the API browser's own scripts need these; they run on operators' pages alone.
RELAXED = (
    "default-src 'self'; img-src 'self' data:; font-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    f"script-src 'self' 'unsafe-inline' 'unsafe-eval'; {SHUT}"
)
RELAXED_PATHS = ("/admin/", "/api/docs")


class ContentSecurityPolicy:
    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if self.is_async:
            return cast(HttpResponse, self._later(request))
        return self._add(request, self.get_response(request))

    async def _later(self, request: HttpRequest) -> HttpResponse:
        return self._add(request, await cast(Awaitable[HttpResponse], self.get_response(request)))

    @staticmethod
    def _add(request: HttpRequest, response: HttpResponse) -> HttpResponse:
        relaxed = request.path.startswith(RELAXED_PATHS)
        response.headers.setdefault("Content-Security-Policy", RELAXED if relaxed else OWN)
        return response
