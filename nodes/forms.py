"""Forms of the cluster's pages."""

from __future__ import annotations

from typing import Any

from django import forms

from catalog.spec import ENGINES
from nodes.keeping import MAX_CORES
from nodes.models import Node


class NodeForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Node
        fields = ["name"]
        help_texts = {"name": "Letters, digits and hyphens, such as gpu-01."}


class NodeKeepForm(forms.Form):
    """What operators set for a node. The labels shown are those set here; its agent.yaml may tell more."""

    labels = forms.CharField(
        required=False,
        max_length=10_000,
        widget=forms.Textarea(attrs={"rows": 4, "spellcheck": "false"}),
        help_text="One NAME=VALUE a line. They win over those of its agent.yaml.",
    )
    reserved_cores = forms.FloatField(
        min_value=0, max_value=MAX_CORES, help_text="CPU cores that no replica is counted on."
    )
    disabled_engines = forms.MultipleChoiceField(
        choices=[(engine, engine) for engine in ENGINES],
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="It gets no new replicas of these.",
    )
    pinned_address = forms.CharField(
        required=False,
        max_length=255,
        label="Address",
        help_text="Where gateways reach its engines. Left empty: where its agent says.",
    )

    def __init__(self, data: Any = None, *, node: Node) -> None:
        self.node = node
        initial = {
            "labels": "\n".join(f"{name}={value}" for name, value in sorted(node.set_labels.items())),
            "reserved_cores": node.reserved_cores,
            "disabled_engines": node.disabled_engines,
            "pinned_address": node.pinned_address,
        }
        super().__init__(data, initial=initial)

    def clean_labels(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for line in filter(None, map(str.strip, self.cleaned_data["labels"].splitlines())):
            name, is_set, value = line.partition("=")
            if not is_set:
                raise forms.ValidationError(f"{line[:80]} is no label: write NAME=VALUE.")
            found[name.strip()] = value.strip()
        return found

    def change(self) -> dict[str, str | None]:
        """What to set, and with None what to take away."""
        wanted: dict[str, str] = self.cleaned_data["labels"]
        return {**{name: None for name in self.node.set_labels if name not in wanted}, **wanted}
