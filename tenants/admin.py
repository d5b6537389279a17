"""The tenant tree in the admin. Changes are audited; keys and tokens are revoked by the pages' own actions."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db import models
from django.db.models import QuerySet
from django.forms import ModelForm
from django.http import HttpRequest
from django_otp.plugins.otp_static.models import StaticDevice
from django_otp.plugins.otp_totp.models import TOTPDevice
from unfold.admin import TabularInline
from unfold.forms import AdminPasswordChangeForm, UserChangeForm, UserCreationForm

from llmgw.core import doorbell
from llmgw.core.admin_site import SECRETS, OwnAdmin, ReadOnly
from tenants import actions, audit, money, sign_in, totp
from tenants.admin_forms import BudgetForm, OrganisationForm, PriceForm, ProjectForm, QuotaForm, TeamForm
from tenants.audit import Actor
from tenants.models import (
    ApiToken,
    AuditEntry,
    Budget,
    CapacityQuota,
    FirstLink,
    Key,
    Membership,
    Organisation,
    Price,
    Project,
    SignedIn,
    SignInAttempt,
    Team,
    Usage,
    UsageSlot,
    User,
)

for unused in (Group, StaticDevice, TOTPDevice):  # their pages would show what only their person may see
    admin.site.unregister(unused)


class Audited(OwnAdmin):
    """Every change made here leaves an audit row and wakes the gateways."""

    def save_model(self, request: HttpRequest, obj: models.Model, form: ModelForm[Any], change: bool) -> None:
        super().save_model(request, obj, form, change)
        columns = {field.name for field in obj._meta.fields} - SECRETS  # a form has more, such as new passwords
        named = [name for name in form.changed_data if name in columns]
        after = {name: str(form.cleaned_data.get(name)) for name in named}
        if not change:
            self._note(request, "make", obj, after=after)
            return
        before = {name: str(form.initial.get(name)) for name in named}
        for name in named:  # a JSON field counts as changed when only its text was
            if before[name] == after[name]:
                del before[name], after[name]
        self._note(request, "change", obj, before=before, after=after)

    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        super().save_formset(request, form, formset, change)
        for obj in formset.new_objects:
            self._note(request, "make", obj)
        for obj, fields in formset.changed_objects:
            self._note(request, "change", obj, after={"fields": list(fields)})
        for obj in formset.deleted_objects:
            self._note(request, "delete", obj)

    def delete_model(self, request: HttpRequest, obj: models.Model) -> None:
        self._note(request, "delete", obj)
        super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        for obj in queryset:
            self._note(request, "delete", obj)
        super().delete_queryset(request, queryset)

    def _note(self, request: HttpRequest, verb: str, obj: models.Model, **values: Any) -> None:
        audit.record(Actor.of(request, via="admin"), f"{verb} {obj._meta.verbose_name}"[:60], str(obj), **values)
        doorbell.table_changed()


class NewUserForm(UserCreationForm):
    class Meta(UserCreationForm.Meta):
        model = User
        fields = ["username"]


class ChangeUserForm(UserChangeForm):
    class Meta(UserChangeForm.Meta):
        model = User


class MembershipInline(TabularInline):
    model = Membership
    extra = 0
    autocomplete_fields = ["user", "team"]


@admin.register(User)
class UserAdmin(DjangoUserAdmin, Audited):  # type: ignore[type-arg, misc]
    form = ChangeUserForm
    add_form = NewUserForm
    change_password_form = AdminPasswordChangeForm
    list_display = ["username", "email", "is_superuser", "is_active", "last_login"]
    list_filter = ["is_superuser", "is_active"]
    search_fields = ["username", "email"]
    fieldsets = [
        (None, {"fields": ["username", "password"]}),
        ("Person", {"fields": ["first_name", "last_name", "email"]}),
        ("Rights", {"fields": ["is_active", "is_superuser"]}),
        ("Times", {"fields": ["last_login", "date_joined"]}),
    ]
    filter_horizontal = []
    readonly_fields = ["last_login", "date_joined"]
    inlines = [MembershipInline]
    actions = ["remove_second_factor", "sign_out_everywhere"]

    @admin.action(description="Remove the second factor (lost phone)")
    def remove_second_factor(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        for user in queryset:
            totp.remove(user, actor=Actor.of(request, via="admin"))
        self.message_user(request, f"{len(queryset)} people can enrol anew.", messages.SUCCESS)

    @admin.action(description="Sign out of all browsers")
    def sign_out_everywhere(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        ended = sum(sign_in.end_sessions(user, actor=Actor.of(request, via="admin")) for user in queryset)
        self.message_user(request, f"{ended} browsers signed out.", messages.SUCCESS)


@admin.register(Organisation)
class OrganisationAdmin(Audited):
    form = OrganisationForm
    list_display = ["name", "slug", "time_zone", "made_at"]
    search_fields = ["name", "slug"]
    prepopulated_fields = {"slug": ["name"]}


@admin.register(Team)
class TeamAdmin(Audited):
    form = TeamForm
    list_display = ["name", "organisation", "made_at"]
    list_filter = ["organisation"]
    list_select_related = ["organisation"]
    search_fields = ["name", "slug"]
    prepopulated_fields = {"slug": ["name"]}
    inlines = [MembershipInline]


@admin.register(Membership)
class MembershipAdmin(Audited):
    list_display = ["user", "team", "role", "made_at"]
    list_filter = ["role"]
    list_select_related = ["user", "team"]
    search_fields = ["user__username", "team__name"]
    autocomplete_fields = ["user", "team"]


@admin.register(Project)
class ProjectAdmin(Audited):
    form = ProjectForm
    list_display = ["name", "team", "models_allowed", "made_at"]
    list_filter = ["team"]
    list_select_related = ["team"]
    search_fields = ["name", "slug", "team__name"]
    prepopulated_fields = {"slug": ["name"]}
    autocomplete_fields = ["team"]


@admin.register(Key)
class KeyAdmin(ReadOnly):
    """Keys are made on the keys page, which alone can show them."""

    list_display = ["name", "prefix", "project", "owner", "made_at", "last_used_at", "expires_at", "revoked_at"]
    list_filter = [("revoked_at", admin.EmptyFieldListFilter), "project"]
    list_select_related = ["project", "owner"]
    search_fields = ["name", "prefix", "project__name", "owner__username"]
    exclude = ["digest"]
    actions = ["revoke"]

    @admin.action(description="Revoke: gateways refuse them within a second")
    def revoke(self, request: HttpRequest, queryset: QuerySet[Key]) -> None:
        actor = Actor.of(request, via="admin")
        done = sum(actions.revoke_key(key=key, actor=actor) for key in queryset)
        self.message_user(request, f"{done} keys revoked.", messages.SUCCESS)


@admin.register(ApiToken)
class ApiTokenAdmin(ReadOnly):
    list_display = ["name", "prefix", "user", "scopes", "made_at", "last_used_at", "expires_at", "revoked_at"]
    list_filter = [("revoked_at", admin.EmptyFieldListFilter)]
    list_select_related = ["user"]
    search_fields = ["name", "prefix", "user__username"]
    exclude = ["digest"]
    actions = ["revoke"]

    @admin.action(description="Revoke")
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiToken]) -> None:
        actor = Actor.of(request, via="admin")
        done = sum(actions.revoke_api_token(token=token, actor=actor) for token in queryset)
        self.message_user(request, f"{done} tokens revoked.", messages.SUCCESS)


@admin.register(Usage)
class UsageAdmin(ReadOnly):
    list_display = [
        "request_id",
        "at",
        "project",
        "key",
        "model",
        "node",
        "status",
        "prompt_tokens",
        "completion_tokens",
        "total_ms",
    ]
    list_filter = ["status", "streamed", "estimated"]
    list_select_related = ["project", "key"]
    search_fields = ["request_id", "model", "key__prefix"]
    ordering = ["-at", "-pk"]


@admin.register(UsageSlot)
class UsageSlotAdmin(ReadOnly):
    list_display = [
        "at",
        "project",
        "key",
        "model",
        "adapter",
        "requests",
        "failed",
        "prompt_tokens",
        "completion_tokens",
    ]
    search_fields = ["model", "adapter"]
    ordering = ["-at", "-pk"]


@admin.register(Budget)
class BudgetAdmin(Audited):
    form = BudgetForm
    list_display = ["__str__", "organisation", "team", "project", "key", "stops"]
    list_filter = ["unit", "period", "stops"]
    list_select_related = ["organisation", "team", "project", "key"]
    search_fields = ["organisation__name", "team__name", "project__name", "key__name", "key__prefix"]
    autocomplete_fields = ["organisation", "team", "project", "key"]


@admin.register(CapacityQuota)
class CapacityQuotaAdmin(Audited):
    form = QuotaForm
    list_display = ["team", "gpu_class", "cards", "made_at"]
    list_filter = ["gpu_class"]
    list_select_related = ["team"]
    search_fields = ["team__name", "team__slug", "gpu_class"]
    autocomplete_fields = ["team"]


@admin.register(Price)
class PriceAdmin(Audited):
    form = PriceForm
    list_display = ["model", "valid_from", "of_input", "of_cached_input", "of_output", "of_request"]
    search_fields = ["model"]

    @admin.display(description="Input")
    def of_input(self, price: Price) -> str:
        return money.text(price.input)

    @admin.display(description="Cached input")
    def of_cached_input(self, price: Price) -> str:
        return money.text(price.input if price.cached_input is None else price.cached_input)

    @admin.display(description="Output")
    def of_output(self, price: Price) -> str:
        return money.text(price.output)

    @admin.display(description="Request")
    def of_request(self, price: Price) -> str:
        return money.text(price.request)


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnly):
    list_display = ["at", "actor_name", "via", "action", "target", "address"]
    list_filter = ["via", "action"]
    search_fields = ["actor_name", "action", "target"]
    ordering = ["-at", "-pk"]


@admin.register(SignedIn)
class SignedInAdmin(ReadOnly):
    list_display = ["user", "address", "browser", "made_at"]
    list_select_related = ["user"]
    search_fields = ["user__username", "address"]
    exclude = ["session_key"]


@admin.register(FirstLink)
class FirstLinkAdmin(ReadOnly):
    list_display = ["user", "made_at", "expires_at", "used_at"]
    list_select_related = ["user"]
    search_fields = ["user__username"]
    exclude = ["digest"]


@admin.register(SignInAttempt)
class SignInAttemptAdmin(ReadOnly):
    list_display = ["at", "address"]
    search_fields = ["address"]
    exclude = ["who"]
