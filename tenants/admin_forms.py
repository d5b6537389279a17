"""Forms of the admin: what gateways read of a row is checked here, since a wrong one would stop them from learning."""

from __future__ import annotations

import zoneinfo
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from tenants import limits, money, standing
from tenants.models import Budget, CapacityQuota, Organisation, Price, Project, Team

LIMITS = ["requests_per_minute", "tokens_per_minute", "max_concurrent", "band", "models_allowed"]


class NamesField(forms.JSONField):
    def prepare_value(self, value: object) -> str:
        """What was typed, to be shown again: half a character (\\ud800) cannot be sent."""
        return str(super().prepare_value(value)).encode(errors="replace").decode()


class LimitedForm(forms.ModelForm):  # type: ignore[type-arg]
    def clean_models_allowed(self) -> list[str]:
        names = self.cleaned_data["models_allowed"] or []
        _refuse(limits.names_objection(names))
        return list(names)

    def clean_band(self) -> str:
        band = str(self.cleaned_data["band"])
        _refuse(standing.band_objection(band, self.instance))
        return band


class OrganisationForm(LimitedForm):
    class Meta:
        model = Organisation
        fields = ["name", "slug", "time_zone", *LIMITS]
        field_classes = {"models_allowed": NamesField}

    def clean_time_zone(self) -> str:
        name = str(self.cleaned_data["time_zone"])
        if name not in zoneinfo.available_timezones():
            raise ValidationError(f"{name} is no time zone that is known here; write one such as Europe/Berlin.")
        return name


class TeamForm(LimitedForm):
    class Meta:
        model = Team
        fields = ["organisation", "name", "slug", *LIMITS]
        field_classes = {"models_allowed": NamesField}


class ProjectForm(LimitedForm):
    class Meta:
        model = Project
        fields = ["team", "name", "slug", *LIMITS]
        field_classes = {"models_allowed": NamesField}


class BudgetForm(forms.ModelForm):  # type: ignore[type-arg]
    amount = forms.DecimalField(
        max_digits=27, decimal_places=8, min_value=Decimal(0), help_text="Whole tokens, or money in the currency."
    )

    class Meta:
        model = Budget
        fields = [*limits.SUBJECTS, "unit", "amount", "period", "stops"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.instance.pk:
            self.initial["amount"] = limits.written_amount(self.instance.unit, self.instance.amount)

    def clean(self) -> dict[str, Any]:
        values: dict[str, Any] = super().clean() or {}
        if sum(bool(values.get(subject)) for subject in limits.SUBJECTS) != 1:
            raise ValidationError("A budget has one subject: choose an organisation, a team, a project or a key.")
        if "amount" in values and values.get("unit"):
            try:
                values["amount"] = limits.amount_of(values["unit"], values["amount"])
            except ValueError as error:
                self.add_error("amount", str(error))
        return values


class QuotaForm(forms.ModelForm):  # type: ignore[type-arg]
    cards = forms.IntegerField(min_value=0, max_value=limits.MAX_CARDS, help_text="That its models may hold; 0: none.")

    class Meta:
        model = CapacityQuota
        fields = ["team", "gpu_class", "cards"]

    def clean_gpu_class(self) -> str:
        gpu_class = str(self.cleaned_data["gpu_class"])
        _refuse(limits.class_objection(gpu_class))
        return gpu_class


class PriceField(forms.DecimalField):
    """Money that a form shows in the currency and hands on in units of 10^-8."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"max_digits": 18, "decimal_places": 8, "min_value": Decimal(0), **kwargs})

    def prepare_value(self, value: Any) -> Any:
        return f"{money.decimal(value):f}" if isinstance(value, int) else value

    def clean(self, value: Any) -> Any:
        found = super().clean(value)
        return None if found is None else money.units(found)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return super().has_changed(self.prepare_value(initial), data)


class PriceForm(forms.ModelForm):  # type: ignore[type-arg]
    input = PriceField(help_text="Of a million tokens read.")
    cached_input = PriceField(
        required=False, help_text="Of a million tokens that the engine had cached. Empty: as input."
    )
    output = PriceField(help_text="Of a million tokens written.")
    request = PriceField(required=False, initial=0, help_text="Of each request besides.")

    class Meta:
        model = Price
        fields = ["model", "valid_from", "input", "cached_input", "output", "request"]

    def clean_model(self) -> str:
        name = str(self.cleaned_data["model"])
        _refuse(limits.names_objection([name]))
        return name

    def clean_request(self) -> int:
        return int(self.cleaned_data["request"] or 0)


def _refuse(objection: str) -> None:
    if objection:
        raise ValidationError(objection)
