"""Pages of limits, capacity quotas and budgets: the projects that a person sees, how each subject stands, the forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from tenants import actions, figures, limits, standing
from tenants.access import members, person
from tenants.audit import Actor
from tenants.limit_forms import BudgetForm, LimitsForm, QuotaForm
from tenants.limits import Limit
from tenants.models import Budget, CapacityQuota, Key, Organisation, Project, Team, User
from tenants.standing import DayUse, Use
from tenants.templatetags.spend import in_currency

PROJECTS_SHOWN = 500
KEYS_SHOWN = 100
LABELS = {
    "requests_per_minute": "Requests per minute",
    "tokens_per_minute": "Tokens per minute",
    "concurrent": "At once",
}


@require_safe
@members
def project_list(request: HttpRequest) -> HttpResponse:
    user = person(request)
    rows = Project.objects.visible_to(user).select_related("team").order_by("team__name", "name", "pk")
    found = list(rows[: PROJECTS_SHOWN + 1])
    used = standing.month_by("project", [row.pk for row in found], timezone.now(), "UTC")
    context = {
        "lines": [(row, used.get(row.pk, Use())) for row in found[:PROJECTS_SHOWN]],
        "more": len(found) > PROJECTS_SHOWN,
        "shown": PROJECTS_SHOWN,
    }
    return render(request, "tenants/project_list.html", context)


# --- one subject ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Line:
    """A limit that holds, and whose it is: a sentence and the page of that subject, where the person may see it."""

    label: str
    value: str
    of: str
    url: str
    names: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    label: str
    url: str
    depth: int
    current: bool
    use: Use


@dataclass(frozen=True, slots=True)
class Bar:
    x: int
    y: float
    height: float
    title: str
    today: bool


@require_safe
@members
def limit_detail(request: HttpRequest, kind: str, pk: int) -> HttpResponse:
    """What holds for one organisation, team, project or key, what its budgets have left and what it used."""
    user, now = person(request), timezone.now()
    row = _subject(user, kind, pk)
    days = standing.this_month(row, now)
    budgets = Budget.objects.visible_to(user).filter(standing.on_path(row))
    editable = set(Budget.objects.editable_by(user).filter(standing.on_path(row)).values_list("pk", flat=True))
    context = {
        "kind": kind,
        "row": row,
        "path": standing.path_of(row),
        "lines": _lines(row),
        "budgets": standing.budget_lines(standing.with_subjects(budgets).order_by("pk"), now),
        "editable": editable,
        "may_set": _may_set(user, kind, pk),
        "tree": _tree(user, row),
        "use": standing.in_all(days),
        "bars": _bars(days),
        "days": days,
        "time_zone": standing.path_of(row)[0][1].time_zone,
    }
    return render(request, "tenants/limit_detail.html", context)


def _subject(user: User, kind: str, pk: int) -> Any:
    if kind not in limits.SUBJECTS:
        raise Http404
    rows = standing.KINDS[kind].objects.visible_to(user)
    return get_object_or_404(rows.select_related(*standing.ABOVE[kind]), pk=pk)  # type: ignore[arg-type]


def _may_set(user: User, kind: str, pk: int) -> bool:
    return kind in limits.SUBJECTS and standing.KINDS[kind].objects.limited_by(user).filter(pk=pk).exists()


def _own(user: User, kind: str, pk: int) -> Any:
    """The subject, when its limits are this person's to set; for everybody else the page does not exist."""
    row = _subject(user, kind, pk)
    if not _may_set(user, kind, pk):
        raise Http404
    return row


def _page(kind: str, pk: int) -> str:
    return reverse("limits", args=[kind, pk])


def _lines(row: Any) -> list[Line]:
    found = standing.effective_of(row)
    here = (standing.path_of(row)[-1][0], row.pk)

    def whose(*held: Limit) -> tuple[str, str]:
        if not held:
            return "not limited", ""
        others = [each for each in held if (each.subject, each.subject_id) != here]
        names = ["set here"] * (len(others) < len(held)) + [f"from {each.subject} {each.name}" for each in others]
        return ", ".join(names), _page(others[-1].subject, others[-1].subject_id) if others else ""

    lines = [
        Line(LABELS[each.kind], figures.number(each.value), *whose(*([each.of] if each.of else [])))
        for each in found.rates
    ]
    names = (
        "all" if found.models is None else ", ".join(sorted(found.models)) or "none: the lists have nothing in common"
    )
    lines.append(Line("Models and adapters", names, *whose(*found.models_of), names=True))
    band, url = whose(*([found.band_of] if found.band_of else []))
    lines.append(Line("Priority", found.band or "the model's", band if found.band else "not set", url))
    return lines


def _tree(user: User, row: Any) -> list[Branch]:
    """Where the subject is: its organisation's teams, or its team with projects, and the keys of the open project."""
    now = timezone.now()
    held = dict(standing.path_of(row))
    here, time_zone = (standing.path_of(row)[-1][0], row.pk), held["organisation"].time_zone

    def branch(kind: str, each: Any, depth: int, use: Use, label: str = "") -> Branch:
        return Branch(label or each.name, _page(kind, each.pk), depth, (kind, each.pk) == here, use)

    organisation: Organisation = held["organisation"]
    if "team" not in held:
        teams = Team.objects.visible_to(user).filter(organisation=organisation)[:PROJECTS_SHOWN]
        return [branch("organisation", organisation, 0, Use()), *(branch("team", team, 1, Use()) for team in teams)]
    projects = list(Project.objects.filter(team=held["team"])[:PROJECTS_SHOWN])
    used = standing.month_by("project", [each.pk for each in projects], now, time_zone)
    found = [branch("organisation", organisation, 0, Use()), branch("team", held["team"], 1, Use())]
    for project in projects:
        found.append(branch("project", project, 2, used.get(project.pk, Use())))
        if "project" in held and held["project"].pk == project.pk:
            keys = list(Key.objects.filter(project=project).live(now)[:KEYS_SHOWN])
            of_keys = standing.month_by("key", [each.pk for each in keys], now, time_zone)
            found += [branch("key", key, 3, of_keys.get(key.pk, Use()), str(key)) for key in keys]
    return found


def _bars(days: list[DayUse]) -> list[Bar]:
    """Ten wide and at most 100 high each: what days cost, or where nothing did, their tokens."""
    in_money = any(day.use.cost for day in days)
    values = [day.use.cost if in_money else day.use.tokens for day in days]
    most = max(values, default=0)
    if not most:
        return []
    return [
        Bar(
            x=10 * place,
            y=round(100 - 100 * value / most, 1),
            height=round(100 * value / most, 1),
            title=f"{day.day}: {figures.number(day.use.requests)} requests, {figures.number(day.use.tokens)} tokens, "
            f"{in_currency(day.use.cost)}",
            today=place == len(days) - 1,
        )
        for place, (day, value) in enumerate(zip(days, values, strict=True))
    ]


# --- changing ---------------------------------------------------------------------------------------------------------
@members
def limits_change(request: HttpRequest, kind: str, pk: int) -> HttpResponse:
    user = person(request)
    row = _own(user, kind, pk)
    form = LimitsForm(row, user, request.POST if request.method == "POST" else None)
    if form.is_valid():
        if actions.set_limits(subject=row, values=form.cleaned_data, actor=Actor.of(request)):
            messages.success(request, f"The limits of {row.name} are saved. Gateways keep to them within a second.")
        return redirect(_page(kind, pk))
    return _form(request, form, f"Limits of {row.name}", "Save limits", _page(kind, pk), status=_status(form))


@members
def quota_set(request: HttpRequest, pk: int) -> HttpResponse:
    """One class of cards at a time: a number sets the quota, an empty field lifts it."""
    team = _own(person(request), "team", pk)
    gpu_class = request.GET.get("class", "")
    gpu_class = "" if limits.class_objection(gpu_class) else gpu_class
    held = CapacityQuota.objects.filter(team=team, gpu_class=gpu_class).first()
    initial = {"gpu_class": gpu_class, "cards": held.cards if held else None}
    form = QuotaForm(request.POST if request.method == "POST" else None, initial=initial)
    if form.is_valid():
        try:
            changed = actions.set_quota(team=team, **form.cleaned_data, actor=Actor.of(request))
        except ValueError as error:
            form.add_error(None, str(error))
        else:
            if changed:
                messages.success(request, f"The capacity quota of {team.name} is saved. What runs already stays.")
            return redirect(_page("team", pk))
    return _form(request, form, f"Cards of {team.name}", "Save quota", _page("team", pk), status=_status(form))


@members
def budget_make(request: HttpRequest, kind: str, pk: int) -> HttpResponse:
    row = _own(person(request), kind, pk)
    form = BudgetForm(request.POST if request.method == "POST" else None)
    if form.is_valid():
        try:
            actions.make_budget(subject=row, **form.cleaned_data, actor=Actor.of(request))
        except ValueError as error:
            form.add_error(None, str(error))
        else:
            messages.success(request, f"{row.name} has a new budget.")
            return redirect(_page(kind, pk))
    return _form(request, form, f"New budget of {row.name}", "Make budget", _page(kind, pk), status=_status(form))


@members
def budget_change(request: HttpRequest, pk: int) -> HttpResponse:
    row = _budget(request, pk)
    form = BudgetForm.of(row, request.POST if request.method == "POST" else None)
    back = _page(row.kind, row.subject.pk)
    if form.is_valid():
        if actions.change_budget(budget=row, values=form.cleaned_data, actor=Actor.of(request)):
            messages.success(request, f"The budget of {row.subject.name} is saved.")
        return redirect(back)
    title = f"Budget of {row.subject.name}"
    remove = reverse("budget-remove", args=[pk])
    return _form(request, form, title, "Save budget", back, remove=remove, status=_status(form))


@members
def budget_remove(request: HttpRequest, pk: int) -> HttpResponse:
    """Says what will happen; the button does it."""
    row = _budget(request, pk)
    back = _page(row.kind, row.subject.pk)
    if request.method == "POST":
        actions.remove_budget(budget=row, actor=Actor.of(request))
        messages.success(request, f"The budget of {row.subject.name} is removed.")
        return redirect(back)
    (line,) = standing.budget_lines([row], timezone.now())
    return render(request, "tenants/budget_remove.html", {"line": line, "back": back})


def _budget(request: HttpRequest, pk: int) -> Budget:
    rows = standing.with_subjects(Budget.objects.editable_by(person(request)))
    return get_object_or_404(rows, pk=pk)


def _form(
    request: HttpRequest, form: Any, title: str, button: str, back: str, *, remove: str = "", status: int
) -> HttpResponse:
    context = {"form": form, "title": title, "button": button, "back": back, "remove": remove}
    if isinstance(form, LimitsForm):
        context["help"] = "What is left empty is not limited here. Of all on the path the tightest counts."
    elif isinstance(form, QuotaForm):
        context["help"] = "Holds for models that name the team. Nothing that runs is stopped; new replicas keep to it."
    return render(request, "tenants/limit_form.html", context, status=status)


def _status(form: Any) -> int:
    return 400 if form.is_bound else 200
