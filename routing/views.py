"""Pages where tenants meet the fleet: home, new key with its first call, about."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from routing import welcome
from tenants import actions, finding, usage
from tenants.access import members, person, private
from tenants.audit import Actor
from tenants.forms import KeyForm
from tenants.models import Key, Project, Usage, User

WAIT_S = 600
"""How long the page of a new key looks for its first call by itself."""


@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """The landing page; for somebody signed in also the first steps and today's use."""
    user = request.user if isinstance(request.user, User) else None
    models = welcome.served(user)
    context: dict[str, object] = {"models": models, "model": welcome.example_model(models)}
    if user is None:
        return private(render(request, "routing/landing.html", context))
    now = timezone.now()
    steps = welcome.steps(user)
    context |= {
        "steps": steps,
        "all_done": all(step.done for step in steps),
        "today": usage.total(usage.sums_of_today(now).visible_to(user)),
        "projects": usage.today_by_project(now, user, limit=10),
    }
    template = "routing/_home.html" if getattr(request, "htmx", False) else "routing/home.html"
    return private(render(request, template, context))


@require_safe
def about(request: HttpRequest) -> HttpResponse:
    return render(request, "routing/about.html", {"version": version("llmgw")})


# --- a new key and its first call -------------------------------------------------------------------------------------
@never_cache
@members
def key_make(request: HttpRequest) -> HttpResponse:
    """The answer to the form is the only place where the key is ever shown."""
    user = person(request)
    projects = Project.objects.editable_by(user)
    form = KeyForm(projects, request.POST if request.method == "POST" else None)
    if not form.is_valid():
        return render(request, "tenants/key_make.html", {"form": form})
    project = form.cleaned_data["project"]
    key, secret = actions.make_key(project=project, name=form.cleaned_data["name"], actor=Actor.of(request))
    context = {
        "key": key,
        "secret": secret,
        "model": welcome.example_model(welcome.served(user), project.models_allowed),
        **_latest_call(key, ()),
    }
    return render(request, "tenants/key_made.html", context)


@require_safe
@members
def key_detail(request: HttpRequest, pk: int) -> HttpResponse:
    user = person(request)
    key = get_object_or_404(Key.objects.visible_to(user).select_related("project__team", "owner"), pk=pk)
    now, calls = timezone.now(), finding.of_key(key)
    context = {
        "key": key,
        "editable": Key.objects.editable_by(user).filter(pk=pk).exists(),
        "today": usage.total(usage.sums_of_today(now).filter(key=key.pk)),
        "calls": calls,
        "now": now,
        **_latest_call(key, calls),
    }
    return render(request, "tenants/key_detail.html", context)


@require_safe
@members
def key_first_call(request: HttpRequest, pk: int) -> HttpResponse:
    """The fragment that waits for the first call of a key."""
    key = get_object_or_404(Key.objects.visible_to(person(request)), pk=pk)
    return render(request, "tenants/_first_call.html", {"key": key, **_latest_call(key, finding.of_key(key))})


def _latest_call(key: Key, calls: Sequence[Usage]) -> dict[str, object]:
    """`calls`: its latest. The newest of them that was answered, else the newest."""
    call = next((each for each in calls if each.status < usage.UNANSWERED_FROM), calls[0] if calls else None)
    answered = call is not None and call.status < usage.UNANSWERED_FROM
    age_s = (timezone.now() - key.made_at).total_seconds()
    return {"call": call, "answered": answered, "watching": not answered and age_s < WAIT_S}
