"""Forms of the people's pages."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.auth.forms import PasswordChangeForm, SetPasswordForm
from django.db.models import QuerySet

from tenants.models import Project, User


class SignInForm(forms.Form):
    username = forms.CharField(
        max_length=150, widget=forms.TextInput({"autocomplete": "username", "autocapitalize": "none"})
    )
    password = forms.CharField(
        max_length=256, strip=False, widget=forms.PasswordInput({"autocomplete": "current-password"})
    )


class CodeForm(forms.Form):
    code = forms.CharField(
        max_length=40,
        label="Code",
        widget=forms.TextInput({"autocomplete": "one-time-code", "autocapitalize": "none", "spellcheck": "false"}),
    )


class ConfirmPasswordForm(forms.Form):
    password = forms.CharField(
        max_length=256,
        strip=False,
        label="Your password",
        widget=forms.PasswordInput({"autocomplete": "current-password"}),
    )

    def __init__(self, user: User, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.user = user

    def clean_password(self) -> str:
        password = str(self.cleaned_data["password"])
        if not self.user.check_password(password):
            raise forms.ValidationError("That is not your password.")
        return password


class KeyForm(forms.Form):
    """A name is all a key needs; the project is asked for only when there is a choice."""

    name = forms.CharField(
        max_length=80, label="Name", widget=forms.TextInput({"autocomplete": "off", "placeholder": "what will use it"})
    )
    project = forms.ModelChoiceField(queryset=Project.objects.none(), required=False, empty_label=None)

    def __init__(self, projects: QuerySet[Project], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.choices = list(projects.select_related("team").order_by("team__name", "name")[:200])
        field = self.fields["project"]
        assert isinstance(field, forms.ModelChoiceField)
        field.queryset = projects
        if len(self.choices) < 2:
            field.widget = forms.HiddenInput()
        else:
            field.widget.choices = [(row.pk, f"{row.team} / {row}") for row in self.choices]

    def clean_name(self) -> str:
        name = str(self.cleaned_data["name"])
        if not name.isprintable():
            raise forms.ValidationError("It holds characters that cannot be seen; remove them.")
        return name

    def clean_project(self) -> Project:
        chosen = self.cleaned_data.get("project")
        if isinstance(chosen, Project):
            return chosen
        if not self.choices:
            raise forms.ValidationError("You are in no project that you may make keys for; ask an owner of your team.")
        return self.choices[0]


__all__ = ["CodeForm", "ConfirmPasswordForm", "KeyForm", "PasswordChangeForm", "SetPasswordForm", "SignInForm"]
