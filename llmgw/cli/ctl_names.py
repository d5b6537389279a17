"""A remark about names that the catalog does not have: prices and allowlists may come before their model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from catalog.names import nearest
from llmgw.cli import client, ctl_show


def remark(server: client.Client, names: Sequence[str], then: str, *, adapters: bool = False) -> None:
    """Say on standard error which of `names` are no model's, and what follows from that. `adapters`: theirs count too.

    Only operators see the catalog; others are told nothing, and what was done stays done.
    """
    if not names:
        return
    try:
        models = server.get("models")["results"]
    except client.CtlError:
        return
    for name in names:
        if text := _remark(name, models, then, adapters=adapters):
            typer.echo(ctl_show.one_line(text), err=True)


def _remark(name: str, models: Sequence[Mapping[str, Any]], then: str, *, adapters: bool) -> str:
    own = {model["name"] for model in models}
    aliases = {alias: model["name"] for model in models for alias in model.get("aliases", ())}
    of = {adapter["name"]: model["name"] for model in models for adapter in model.get("adapters", ())}
    if name in own or (adapters and name in of):
        return ""
    if name in aliases or name in of:
        kind, model = ("alias", aliases[name]) if name in aliases else ("adapter", of[name])
        return f"{name} is an {kind} of {model}, and only the model's own name counts here. Name {model}."
    kind = "model or adapter" if adapters else "model"
    return f"The catalog has no {kind} {name}.{nearest(name, [*own, *(of if adapters else ())])} {then}"
