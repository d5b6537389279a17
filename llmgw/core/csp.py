"""One strict Content-Security-Policy for every page: own files only, no inline scripts."""

from __future__ import annotations

from collections.abc import Callable

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse

OWN = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
# The admin's and the API browser's own scripts need these; they run on operators' pages alone.
RELAXED = OWN + "; script-src 'self' 'unsafe-inline' 'unsafe-eval'; font-src 'self' data:"
RELAXED_PATHS = ("/admin/", "/api/docs")


class ContentSecurityPolicy:
    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if iscoroutinefunction(self):
            return self._later(request)  # type: ignore[return-value]
        return self._add(request, self.get_response(request))

    async def _later(self, request: HttpRequest) -> HttpResponse:
        return self._add(request, await self.get_response(request))  # type: ignore[misc]

    @staticmethod
    def _add(request: HttpRequest, response: HttpResponse) -> HttpResponse:
        relaxed = request.path.startswith(RELAXED_PATHS)
        response.headers.setdefault("Content-Security-Policy", RELAXED if relaxed else OWN)
        return response
