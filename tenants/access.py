"""Who may open a page: people who are signed in, or operators. Strangers learn nothing: they get 404, never 403."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from django.contrib.auth.views import redirect_to_login
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.cache import patch_cache_control, patch_vary_headers

from tenants.models import User

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponse]


def person(request: HttpRequest) -> User:
    """Who asks, on a page that only signed-in people reach."""
    assert isinstance(request.user, User)
    return request.user


def members(view: View[P]) -> View[P]:
    """Signed-in people only; everybody else signs in first and comes back."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            return _sign_in_first(request)
        return private(view(request, *args, **kwargs))

    return guarded  # type: ignore[return-value]  # wraps() loses that `request` is positional


def operators(view: View[P]) -> View[P]:
    """Operators only; for other people the page does not exist."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            return _sign_in_first(request)
        if not person(request).is_operator:
            raise Http404
        return private(view(request, *args, **kwargs))

    return guarded  # type: ignore[return-value]  # wraps() loses that `request` is positional


def _sign_in_first(request: HttpRequest) -> HttpResponse:
    if getattr(request, "htmx", False):
        # A fragment must not be filled with the sign-in page: load the whole page, which then leads there.
        return HttpResponse(status=204, headers={"HX-Refresh": "true"})
    return redirect_to_login(request.get_full_path() if request.method == "GET" else "/")


def private(response: HttpResponse) -> HttpResponse:
    """For this person's browser only, asked for anew each time, apart from the fragment of the same address."""
    patch_cache_control(response, private=True, no_cache=True)
    patch_vary_headers(response, ["HX-Request"])
    return response
