"""Forms of the cluster's pages."""

from __future__ import annotations

from django import forms

from nodes.models import Node


class NodeForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Node
        fields = ["name"]
        help_texts = {"name": "Letters, digits and hyphens, such as gpu-01."}
