"""What someone new needs to see: what is served now, which first steps are done, a request to copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from catalog.models import Model
from nodes.models import Node, NodeState, Replica, Wanted
from tenants.models import Key, Project, Usage, User
from tenants.usage import UNANSWERED_FROM

MODELS_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Served:
    """A published model; `ready` is whether a request would be answered at once."""

    name: str
    ready: bool
    state: str


@dataclass(frozen=True, slots=True)
class Step:
    done: bool
    title: str
    hint: str
    url_name: str
    button: str


def served(user: User | None = None) -> tuple[Served, ...]:
    """Published models, those that answer now first; for a member only those their projects may use. Few queries."""
    ready = set(
        Replica.objects.filter(state="ready", wanted=Wanted.RUN)
        .exclude(shards__node__state=NodeState.LOST)
        .values_list("model", flat=True)
        .distinct()
    )
    starting = set(Replica.objects.filter(wanted=Wanted.RUN).values_list("model", flat=True).distinct())
    usable = None if user is None or user.is_operator else allowed(user)
    rows = Model.objects.order_by("position", "pk").values_list("name", "scaling_max", "external")
    lines = [
        Served(name, name in ready or bool(external), _state(name, ready, starting, bool(external)))
        for name, most, external in rows[:MODELS_SHOWN]
        if (most or external) and (usable is None or name in usable)
    ]
    return tuple(sorted(lines, key=lambda line: not line.ready))


def model_names(user: User) -> tuple[str, ...]:
    """Of the catalog; for a member only those their projects may use. At most two queries."""
    usable = None if user.is_operator else allowed(user)
    names = Model.objects.order_by("position", "pk").values_list("name", flat=True)[:MODELS_SHOWN]
    return tuple(name for name in names if usable is None or name in usable)


def _state(name: str, ready: set[str], starting: set[str], external: bool) -> str:
    if external:
        return "external"
    return "ready" if name in ready else "loading" if name in starting else "not running"


def allowed(user: User) -> set[str] | None:
    """Models that the person's projects may use; None: all of them."""
    lists = list(Project.objects.visible_to(user).values_list("models_allowed", flat=True)[:1000])
    return None if any(not names for names in lists) else {name for names in lists for name in names}


def example_model(models: Iterable[Served], allowed: Iterable[str] = ()) -> str:
    """The name to put into a first request: one that answers now if there is one."""
    only = set(allowed)
    names = [model.name for model in models if not only or model.name in only]
    return names[0] if names else next(iter(sorted(only)), "MODEL")


def steps(user: User) -> tuple[Step, ...]:
    """The checklist of someone new (WEB-13). Members see what they can do themselves. At most four queries."""
    made_key = Key.objects.visible_to(user).exists()
    called = Usage.objects.visible_to(user).filter(status__lt=UNANSWERED_FROM).exists()
    own = (
        Step(made_key, "Make a key", "Programs sign in with it.", "key-make", "New key"),
        Step(called, "Make the first call", "Copy the request on this page.", "request-list", "Requests"),
    )
    if not user.is_operator:
        return own
    connected = Node.objects.filter(state=NodeState.READY).exists()
    published = Model.objects.exclude(scaling_max=0, external=None).exists()
    return (
        Step(connected, "Connect a node", "A machine whose agent reports here.", "node-make", "Add a node"),
        Step(published, "Publish a model", "A catalog entry that may run.", "model-list", "Models"),
        *own,
    )
