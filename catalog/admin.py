"""The catalog in the admin: to look at, and to change by the same actions as the command line and the API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.admin import StackedInline

from catalog import spec
from catalog.actions import Applied, CatalogRefused, put_model, remove_model, roll_back
from catalog.models import CatalogVersion, Model, Profile
from llmgw.core.admin_site import ReadOnly
from tenants.audit import Actor


class ProfileInline(StackedInline):
    model = Profile
    extra = 0

    def has_add_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


def _scale(model: spec.Model, actor: Actor, *, least: int) -> Applied:
    scaling = replace(model.scaling, min=least, max=max(least, model.scaling.max) if least else 0)
    return put_model(model=replace(model, scaling=scaling), actor=actor)


@admin.register(Model)
class ModelAdmin(ReadOnly):
    """A model is valid only within the whole catalog: it is changed as YAML or through the API, never by field."""

    list_display = ["name", "aliases", "source", "scaling_min", "scaling_max", "routing_profile", "changed_at"]
    list_filter = ["routing_profile"]
    search_fields = ["name", "aliases", "source"]
    inlines = [ProfileInline]
    actions = ["keep_up", "switch_off", "remove"]

    @admin.action(description="Keep one replica up")
    def keep_up(self, request: HttpRequest, queryset: QuerySet[Model]) -> None:
        self._each(request, queryset, partial(_scale, least=1))

    @admin.action(description="Switch off: no replica runs")
    def switch_off(self, request: HttpRequest, queryset: QuerySet[Model]) -> None:
        self._each(request, queryset, partial(_scale, least=0))

    @admin.action(description="Remove from the catalog")
    def remove(self, request: HttpRequest, queryset: QuerySet[Model]) -> None:
        self._each(request, queryset, lambda model, actor: remove_model(name=model.name, actor=actor))

    def _each(
        self, request: HttpRequest, queryset: QuerySet[Model], action: Callable[[spec.Model, Actor], Applied]
    ) -> None:
        """One change a model; a refused one says which rule it would break and leaves the others be."""
        for model in queryset.snapshot():  # type: ignore[attr-defined]
            try:
                applied = action(model, Actor.of(request, via="admin"))
            except CatalogRefused as refused:
                self.message_user(request, str(refused), messages.ERROR)
            else:
                self.message_user(request, f"{model.name}: done, catalog version {applied.version}.", messages.SUCCESS)


@admin.register(CatalogVersion)
class CatalogVersionAdmin(ReadOnly):
    list_display = ["number", "made_at", "made_by", "note"]
    search_fields = ["made_by", "note"]
    actions = ["make_current"]

    @admin.action(description="Make this version the catalog again")
    def make_current(self, request: HttpRequest, queryset: QuerySet[CatalogVersion]) -> None:
        numbers = list(queryset.values_list("number", flat=True)[:2])
        if len(numbers) != 1:
            self.message_user(request, "Choose one version.", messages.ERROR)
            return
        try:
            applied = roll_back(version=numbers[0], actor=Actor.of(request, via="admin"))
        except CatalogRefused as refused:
            self.message_user(request, str(refused), messages.ERROR)
        else:
            self.message_user(request, f"Done, as catalog version {applied.version}.", messages.SUCCESS)
