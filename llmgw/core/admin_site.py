"""The admin for operators: a verified second factor or no entry, and read-only where the fleet is the truth."""

from __future__ import annotations

from typing import Any

from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.http import urlencode
from unfold.admin import ModelAdmin
from unfold.sites import UnfoldAdminSite

COUNTED = 1_000
"""Long tables show "at least so many" rather than count."""

SECRETS = frozenset({"password", "digest", "token_digest", "session_key"})
"""Names of columns that nobody needs to read, digests included."""


class OperatorsSite(UnfoldAdminSite):
    """Entered through the product's own sign-in; leads an operator without a second factor to enrol one."""

    index_title = "Capacity"

    def has_permission(self, request: HttpRequest) -> bool:
        user = request.user
        return bool(user.is_active and user.is_superuser and user.is_verified())  # type: ignore[union-attr, attr-defined]

    def login(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        back = urlencode({"next": request.GET.get("next") or reverse("admin:index")})
        if not request.user.is_authenticated:
            return redirect(f"{reverse('sign-in')}?{back}")
        if not request.user.is_superuser:
            raise Http404
        if self.has_permission(request):
            return redirect("admin:index")
        return redirect(f"{reverse('two-factor')}?{back}")

    def logout(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        return redirect("home")


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Looks at most COUNTED rows far, so that a list over millions of rows opens at once."""

    @cached_property
    def count(self) -> int:
        return len(self.object_list.order_by().values_list("pk", flat=True)[:COUNTED])  # type: ignore[attr-defined]


class OwnAdmin(ModelAdmin):
    """What every record's page here shares: no address asks for a secret letter by letter."""

    show_full_result_count = False
    list_per_page = 50

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        return not SECRETS.intersection(lookup.split("__")) and bool(super().lookup_allowed(lookup, value, request))


class ReadOnly(OwnAdmin):
    """Rows that nobody edits by hand: agents, the gateway or an action write them."""

    paginator = CappedPaginator

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
