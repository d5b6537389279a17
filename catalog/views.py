"""The catalog's pages: what is in it, forms for a model and its profiles, the whole as YAML, its versions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_safe

from catalog import actions, document, forms, spec, yaml_io
from catalog.actions import Applied, CatalogRefused
from catalog.models import CatalogVersion, Model
from catalog.spec import Problem
from tenants.access import operators
from tenants.audit import Actor

ROWS = 100
NOTICES = 10
MAX_COMPARED = 4000
"""Lines: comparing longer texts could take minutes."""
look_or_send = require_http_methods(["GET", "HEAD", "POST"])


# --- the list --------------------------------------------------------------------------------------------------------
@require_safe
@operators
def catalog_list(request: HttpRequest) -> HttpResponse:
    models = Model.objects.snapshot()
    start = _number(request.GET.get("from", ""))
    context = {
        "models": models[start : start + ROWS],
        "total": len(models),
        "next": start + ROWS if len(models) > start + ROWS else 0,
        "version": CatalogVersion.objects.defer("text").first(),
    }
    return render(request, "catalog/catalog_list.html", context)


# --- one model -------------------------------------------------------------------------------------------------------
@never_cache
@look_or_send
@operators
def model_add(request: HttpRequest) -> HttpResponse:
    return _edit(request, None)


@never_cache
@look_or_send
@operators
def model_edit(request: HttpRequest, name: str) -> HttpResponse:
    return _edit(request, _named(name))


def _edit(request: HttpRequest, model: spec.Model | None) -> HttpResponse:
    sent = request.POST if request.method == "POST" else None
    if model and len(model.profiles) > forms.MAX_PROFILES:
        messages.error(request, f"{model.name} has more profiles than fit into a form. Edit it in the text.")
        return redirect("catalog-text")
    form = forms.ModelForm(sent, initial=forms.model_initial(model) if model else None)
    profiles = forms.profile_forms(sent, model.profiles if model else ())
    expected = _number(sent.get("version", "")) if sent is not None else 0
    if sent is not None and form.is_valid() and profiles.is_valid():
        adapters = document.write_model(model).get("adapters", []) if model else []
        read = document.read_model(form.document(profiles.documents(), adapters))
        name = read.models[0].name
        done, problems = _tried(
            lambda: actions.put_model(
                model=read.models[0],
                replaces=model.name if model else None,
                actor=Actor.of(request),
                expected=expected,
            ),
            read.problems or _taken(read.models[0], model),
        )
        if done:
            _say(request, done, f"{name} is saved." if done.changed or done.added else "Nothing changed.")
            return redirect("model-detail", name)
        forms.show_problems(problems, name, form, profiles.kept())
    context = {"form": form, "profiles": profiles, "model": model, "version": actions.current_version()}
    return render(request, "catalog/model_form.html", context)


def _taken(new: spec.Model, replaced: spec.Model | None) -> tuple[Problem, ...]:
    """A model that is added must not take the place of another one that is there."""
    if replaced is None and Model.objects.filter(name=new.name).exists():
        return (Problem(new.name, "", "name", "There is a model of that name already; choose another, or edit it."),)
    return ()


@never_cache
@look_or_send
@operators
def model_remove(request: HttpRequest, name: str) -> HttpResponse:
    model = _named(name)
    problems: Sequence[Problem] = ()
    if request.method == "POST":
        done, problems = _tried(lambda: actions.remove_model(name=name, actor=Actor.of(request)))
        if done:
            _say(request, done, f"{name} is out of the catalog; its replicas are drained and stopped.")
            return redirect("catalog-list")
    users = [each.name for each in Model.objects.snapshot() if model.name in each.fallbacks]
    return render(request, "catalog/model_remove.html", {"model": model, "problems": problems, "users": users})


@never_cache
@look_or_send
@operators
def adapter_list(request: HttpRequest, name: str) -> HttpResponse:
    model, actor = _named(name), Actor.of(request)
    remove = request.POST.get("remove")
    form = forms.AdapterForm(request.POST if request.method == "POST" and remove is None else None)
    problems: Sequence[Problem] = ()
    if remove is not None:
        done, problems = _tried(lambda: actions.remove_adapter(model=name, name=remove, actor=actor))
        if done:
            _say(request, done, f"{remove} is no adapter of {name} any more.")
            return redirect("catalog-adapters", name)
    elif form.is_bound and form.is_valid():
        adapter = spec.Adapter(form.cleaned_data["name"], form.cleaned_data["source"])
        done, problems = _tried(lambda: actions.add_adapter(model=name, adapter=adapter, actor=actor))
        if done:
            _say(request, done, f"{adapter.name} is an adapter of {name}.")
            return redirect("catalog-adapters", name)
    return render(request, "catalog/adapter_list.html", {"model": model, "form": form, "problems": problems})


# --- the whole -------------------------------------------------------------------------------------------------------
@never_cache
@look_or_send
@operators
def catalog_text(request: HttpRequest) -> HttpResponse:
    """Whatever is wrong with the text, it stays in the page as it was entered."""
    problems: Sequence[Problem] = ()
    checked: Applied | None = None
    if request.method == "POST":
        form = forms.TextForm(request.POST)
        if form.is_valid():
            read = yaml_io.parse(form.cleaned_data["text"])
            if "check" in request.POST:
                checked, problems = _tried(lambda: actions.check_catalog(models=read.models), read.problems)
            else:
                done, problems = _tried(lambda: _apply(request, read.models, form.cleaned_data["note"]), read.problems)
                if done:
                    _say(request, done, _summary(done))
                    return redirect("catalog-list")
    else:
        form = forms.TextForm(initial={"text": yaml_io.dump(Model.objects.snapshot())})
    context = {"form": form, "problems": problems, "checked": checked, "version": actions.current_version()}
    return render(request, "catalog/catalog_text.html", context)


def _apply(request: HttpRequest, models: Sequence[spec.Model], note: str) -> Applied:
    expected = _number(request.POST.get("version", ""))
    return actions.apply_catalog(models=models, actor=Actor.of(request), note=note, expected=expected)


# --- versions --------------------------------------------------------------------------------------------------------
@require_safe
@operators
def version_list(request: HttpRequest) -> HttpResponse:
    before = _number(request.GET.get("before", ""))
    rows = CatalogVersion.objects.defer("text")
    found = list((rows.filter(number__lt=before) if before else rows)[: ROWS + 1])
    context = {
        "versions": found[:ROWS],
        "before": found[ROWS - 1].number if len(found) > ROWS else 0,
        "current": actions.current_version(),
    }
    return render(request, "catalog/version_list.html", context)


@never_cache
@look_or_send
@operators
def version_detail(request: HttpRequest, number: int) -> HttpResponse:
    """What the catalog was, what has changed since, and the way back."""
    if number >= 2**31:
        raise Http404
    version = get_object_or_404(CatalogVersion, number=number)
    problems: Sequence[Problem] = ()
    if request.method == "POST":
        done, problems = _tried(lambda: actions.roll_back(version=number, actor=Actor.of(request)))
        if done:
            _say(request, done, f"The catalog is as in version {number} again. {_summary(done)}")
            return redirect("catalog-version-list")
    now = yaml_io.dump(Model.objects.snapshot())
    context = {
        "version": version,
        "problems": problems,
        "same": now == version.text,
        "lines": _compared(now, version.text),
        "current": actions.current_version(),
    }
    return render(request, "catalog/version_detail.html", context)


def _compared(now: str, then: str) -> list[tuple[str, str]] | None:
    """What going back to `then` takes out and brings in, each line with its kind; None when it is too much to say."""
    old, new = now.splitlines(), then.splitlines()
    if max(len(old), len(new)) > MAX_COMPARED:
        return None
    kinds = {"-": "gone", "+": "come", "@": "place"}
    lines = list(difflib.unified_diff(old, new, n=2, lineterm=""))[2:]
    return [(kinds.get(line[:1], ""), line) for line in lines]


# --- what the pages share --------------------------------------------------------------------------------------------
def _named(name: str) -> spec.Model:
    model = Model.objects.named(name)
    if model is None:
        raise Http404
    return model


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _tried(change: Callable[[], Applied], problems: Sequence[Problem] = ()) -> tuple[Applied | None, Sequence[Problem]]:
    """What the change did, or why it was refused. With `problems` it is not tried."""
    if problems:
        return None, problems
    try:
        return change(), ()
    except CatalogRefused as refused:
        return None, refused.problems


def _summary(done: Applied) -> str:
    kinds = (("added", done.added), ("changed", done.changed), ("removed", done.removed))
    words = [f"{kind}: {', '.join(names[:ROWS])}" for kind, names in kinds if names]
    return f"Version {done.version}. {'; '.join(words) or 'Nothing changed'}."


def _say(request: HttpRequest, done: Applied, text: str) -> None:
    messages.success(request, text)
    for notice in done.notices[:NOTICES]:
        messages.warning(request, str(notice))
