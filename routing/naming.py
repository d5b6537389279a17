"""What somebody means who looks for a model's requests: they are recorded under its own name alone."""

from __future__ import annotations

from dataclasses import dataclass

from catalog.models import Model
from catalog.names import nearest
from routing import welcome
from tenants.models import User


@dataclass(frozen=True, slots=True)
class Meant:
    model: str
    """To look for."""
    note: str = ""
    """For the person, when that is not the name that they gave, or nothing has it now."""


def meant(name: str, user: User) -> Meant:
    """The model of that name or alias. Of models that this person may not use, nothing is told. At most two queries."""
    if not name:
        return Meant(name)
    allowed = None if user.is_operator else welcome.allowed(user)
    rows = Model.objects.order_by("position", "pk").values_list("name", "aliases", "adapters")
    models: list[str] = []
    found: Meant | None = None
    for model, aliases, adapters in rows:
        own = [adapter["name"] for adapter in adapters if allowed is None or allowed & {model, adapter["name"]}]
        if name in own:
            note = f"{name} is an adapter of {model}; its requests are among those of {model}."
            found = found or Meant(name, note)
        if allowed is not None and model not in allowed:
            continue
        if name == model:
            return Meant(name)
        if name in aliases:
            found = found or Meant(model, f"{name} is an alias of {model}, whose requests these are.")
        models.append(model)
    gone = "Requests that were recorded under that name are found all the same."
    return found or Meant(name, f"There is no model {name} that you can see.{nearest(name, models)} {gone}")
