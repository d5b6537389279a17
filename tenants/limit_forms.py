"""Forms of the pages of limits, capacity quotas and budgets."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django import forms

from tenants import limits, standing
from tenants.models import Budget, User

MOST_AT_ONCE = 2**31 - 1
MOST_TOKENS = 10**15


def _rate(label: str, most: int) -> forms.IntegerField:
    return forms.IntegerField(label=label, min_value=1, max_value=most, required=False)


class LimitsForm(forms.Form):
    """What a subject sets itself; an empty field sets nothing."""

    requests_per_minute = _rate("Requests per minute", MOST_AT_ONCE)
    tokens_per_minute = _rate("Tokens per minute, read and written", MOST_TOKENS)
    max_concurrent = _rate("Requests at once", MOST_AT_ONCE)
    band = forms.ChoiceField(label="Priority band", required=False)
    models_allowed = forms.CharField(
        label="Models and adapters",
        required=False,
        max_length=60_000,
        widget=forms.Textarea({"rows": 4, "spellcheck": "false"}),
        help_text="One name a line. Empty: all that the wider levels allow.",
    )

    def __init__(self, row: Any, user: User, sent: Any) -> None:
        initial = {name: getattr(row, name) for name in self.base_fields}
        super().__init__(sent, initial={**initial, "models_allowed": "\n".join(row.models_allowed)})
        self.row, self.user = row, user
        band = self.fields["band"]
        assert isinstance(band, forms.ChoiceField)
        names = [name for name in standing.bands() if name == row.band or not self._objection(name)]
        old = [(row.band, f"{row.band} (gateways know none of that name)")] if row.band not in ["", *names] else []
        band.choices = [("", "the wider level's, else the model's"), *old, *((name, name) for name in names)]

    def _objection(self, band: str) -> str:
        return standing.band_objection(band, self.row, self.user)

    def clean_models_allowed(self) -> list[str]:
        names = [line.strip() for line in str(self.cleaned_data["models_allowed"]).splitlines() if line.strip()]
        _refuse(limits.names_objection(names))
        return names


class BudgetForm(forms.Form):
    unit = forms.ChoiceField(choices=Budget.Unit.choices, label="Of")
    amount = forms.DecimalField(
        max_digits=27, decimal_places=8, min_value=Decimal(0), widget=forms.TextInput({"inputmode": "decimal"})
    )
    period = forms.ChoiceField(
        choices=[("day", "each day"), ("week", "each week"), ("month", "each month"), ("total", "once and for all")]
    )
    stops = forms.TypedChoiceField(
        label="When it is used up",
        choices=[("stop", "refuse more"), ("warn", "go on, and show it here")],
        coerce=lambda word: word == "stop",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        unit = self.fields["unit"]
        assert isinstance(unit, forms.ChoiceField)
        unit.choices = [("money", f"money ({standing.currency()})"), ("tokens", "tokens, read and written")]

    @classmethod
    def of(cls, row: Budget, sent: Any) -> BudgetForm:
        unit: limits.Unit = "tokens" if row.unit == "tokens" else "money"
        initial = {"unit": row.unit, "period": row.period, "stops": "stop" if row.stops else "warn"}
        return cls(sent, initial={**initial, "amount": f"{limits.written_amount(unit, row.amount):f}"})

    def clean(self) -> dict[str, Any]:
        values: dict[str, Any] = super().clean() or {}
        if "amount" in values and "unit" in values:
            try:
                values["amount"] = limits.amount_of(values["unit"], values["amount"])
            except ValueError as error:
                self.add_error("amount", str(error))
        return values


class QuotaForm(forms.Form):
    """How many cards of a class a team's models may hold."""

    gpu_class = forms.CharField(
        label="GPU class",
        max_length=limits.MAX_GPU_CLASS,
        help_text="As nodes report it, such as h100-80g.",
        widget=forms.TextInput({"spellcheck": "false", "autocapitalize": "none"}),
    )
    cards = forms.IntegerField(
        label="Cards that its models may hold together",
        min_value=0,
        max_value=limits.MAX_CARDS,
        required=False,
        help_text="0: none. Empty: no limit.",
    )

    def clean_gpu_class(self) -> str:
        gpu_class = str(self.cleaned_data["gpu_class"])
        _refuse(limits.class_objection(gpu_class))
        return gpu_class


def _refuse(objection: str) -> None:
    if objection:
        raise forms.ValidationError(objection)
