"""The catalog in the admin: to look at, and to change by the same actions as the command line and the API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminTextareaWidget

from catalog import spec, yaml_io
from catalog.actions import Applied, CatalogRefused, check_catalog, put_model, remove_model, roll_back
from catalog.models import CatalogVersion, Model
from llmgw.core.admin_site import OwnAdmin, ReadOnly
from tenants.audit import Actor

MAX_NOTICES = 10


class ModelTextForm(forms.ModelForm):  # type: ignore[type-arg]
    """A model and its profiles as text, checked as part of the whole catalog."""

    text = forms.CharField(
        label="As YAML",
        strip=False,
        max_length=yaml_io.MAX_CHARACTERS,
        widget=UnfoldAdminTextareaWidget({"rows": 30, "spellcheck": "false", "wrap": "off"}),
        help_text="The same keys as in the catalog's file; the page Catalog has a form for them.",
    )

    class Meta:
        model = Model
        fields: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replaces: str | None = self.instance.name or None
        if self.replaces and (model := Model.objects.named(self.replaces)):
            self.initial["text"] = yaml_io.dump_model(model)

    def clean_text(self) -> spec.Model:
        read = yaml_io.parse_model(str(self.cleaned_data["text"]).replace("\r\n", "\n"))
        if read.problems:
            raise forms.ValidationError([str(problem) for problem in read.problems])
        (model,) = read.models
        old = Model.objects.snapshot()
        if self.replaces is None and any(each.name == model.name for each in old):
            raise forms.ValidationError(f"There is a model {model.name} already; choose another name, or edit it.")
        new = tuple(model if each.name == self.replaces else each for each in old)
        try:
            check_catalog(models=new if self.replaces else (*old, model))
        except CatalogRefused as refused:
            raise forms.ValidationError([str(problem) for problem in refused.problems]) from None
        return model


def _scale(model: spec.Model, actor: Actor, *, least: int) -> Applied:
    scaling = replace(model.scaling, min=least, max=max(least, model.scaling.max) if least else 0)
    return put_model(model=replace(model, scaling=scaling), actor=actor)


class Unlocked(admin.ModelAdmin):  # type: ignore[type-arg]
    """Without Django's transaction around a sent form, which would lock the store while files of adapters are read."""

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        return self._changeform_view(request, object_id, form_url, extra_context)  # type: ignore[attr-defined]


@admin.register(Model)
class ModelAdmin(OwnAdmin, Unlocked):
    """A model is valid only within the whole catalog: it is changed as a text, never by field."""

    form = ModelTextForm

    list_display = ["name", "aliases", "source", "scaling_min", "scaling_max", "routing_profile", "changed_at"]
    list_filter = ["routing_profile"]
    search_fields = ["name", "aliases", "source"]
    fields = ["text"]
    actions = ["keep_up", "switch_off", "remove"]

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False  # by the action, which asks whether others fall back on it

    def save_model(self, request: HttpRequest, obj: Model, form: ModelTextForm, change: bool) -> None:
        model: spec.Model = form.cleaned_data["text"]
        done = put_model(model=model, replaces=form.replaces, actor=Actor.of(request, via="admin"))
        obj.pk, obj.name = Model.objects.get(name=model.name).pk, model.name
        for notice in done.notices[:MAX_NOTICES]:
            self.message_user(request, str(notice), messages.WARNING)

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
