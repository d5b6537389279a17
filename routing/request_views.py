"""Pages of requests: the list with its filters, one request with its story, and the list as CSV (GW-46)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from routing import explain, export, naming, welcome
from tenants import finding, standing
from tenants.access import members, person
from tenants.models import Project, Usage
from tenants.usage import read_cursor

PROJECTS_OFFERED = 200


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a request's time; `colour` is the bar's."""

    name: str
    colour: str
    ms: float


@require_safe
@members
def request_list(request: HttpRequest) -> HttpResponse:
    user, fragment = person(request), getattr(request, "htmx", False)
    sought = request.GET.get("id", "").strip()[:64]
    before = request.GET.get("before", "")
    given = request.GET.dict()
    chosen = {name: given[name][:200] for name in finding.FIELDS if given.get(name)}
    context: dict[str, object] = {"chosen": chosen, "query": urlencode(chosen), "sought": sought}
    if sought:
        rows = finding.by_id(user, sought)
        if not fragment and [row.request_id for row in rows] == [sought]:
            return redirect("request-detail", sought)
        context["found"] = finding.Found(rows, older="")
    else:
        asked = finding.read(given, user)
        meant = naming.meant(asked.wanted.model, user)
        wanted = replace(asked.wanted, model=meant.model)
        context |= {
            "found": finding.find(wanted, before=before),
            "wanted": wanted,
            "meant": meant,
            "problems": asked.problems,
            "first_page": read_cursor(before) is None,
        }
    if fragment:
        return render(request, "routing/_request_rows.html", context)
    projects = Project.objects.visible_to(user).select_related("team").order_by("team__name", "name")
    context |= {
        "projects": projects[:PROJECTS_OFFERED],
        "models": welcome.model_names(user),
        "codes": sorted(explain.MEANINGS),
        "results": [(name, urlencode({**chosen, "result": name})) for name in finding.RESULTS],
        "any_result": urlencode({name: value for name, value in chosen.items() if name != "result"}),
    }
    return render(request, "routing/request_list.html", context)


@require_safe
@members
def request_detail(request: HttpRequest, request_id: str) -> HttpResponse:
    rows = Usage.objects.visible_to(person(request)).select_related("project__team", "key", "user")
    call = get_object_or_404(rows, request_id=request_id)
    why = explain.read(call.explained)
    context = {
        "call": call,
        "why": why,
        "looked_for": explain.was_looked_for(call.model, call.replica, call.error_code),
        "words": explain.in_words(call, why, standing.currency()),
        "stretches": (parts := stretches(call)),
        "lengths": {part.colour: part.ms for part in parts},
        "kept_days": settings.LLMGW.usage.keep_explained_days,
        "first": why and explain.first_choice(call, why),
        "then": why and why.attempts and why.attempts[-1].failed and call.status < explain.REFUSED_FROM,
    }
    return render(request, "routing/request_detail.html", context)


def stretches(call: Usage) -> tuple[Stretch, ...]:
    """Where its time went; they add up to all of it."""
    queue = min(max(call.queue_ms, 0), call.total_ms)
    first = 0.0 if call.first_token_ms is None else min(max(call.first_token_ms - queue, 0), call.total_ms - queue)
    until = "to the first token" if call.streamed else "to the first byte"
    named = (
        Stretch("queue", "reserved", queue),
        Stretch(until, "starting", first),
        Stretch("the rest", "used", call.total_ms - queue - first),
    )
    return tuple(each for each in named if each.ms > 0)


@require_safe
@members
def request_export(request: HttpRequest) -> HttpResponse:
    """What the filters let through, as it is read."""
    user = person(request)
    asked = finding.read(request.GET.dict(), user)
    meant = naming.meant(asked.wanted.model, user)
    wanted = export.spanned(replace(asked.wanted, model=meant.model), timezone.now())
    if isinstance(wanted, str) or asked.problems:
        said = [f"{name}: {text}" for name, text in asked.problems.items()]
        said += [wanted] if isinstance(wanted, str) else []
        return HttpResponse("\n".join(said), status=400, content_type="text/plain; charset=utf-8")
    made = export.parts_later(wanted) if isinstance(request, ASGIRequest) else export.parts(wanted)
    answer = StreamingHttpResponse(() if request.method == "HEAD" else made, content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = 'attachment; filename="requests.csv"'
    return cast(HttpResponse, answer)  # as far as access and headers go
