"""A remark about names that the catalog does not have: prices and allowlists may come before their model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from catalog.names import nearest
from llmgw.cli import client, ctl_show


def remark(server: client.Client, names: Sequence[str], then: str, *, also: str = "") -> None:
    """Say on standard error which of `names` are no model's, and what follows. `also`: alias or adapter, if they count.

    Only operators see the catalog; others are told nothing, and what was done stays done.
    """
    if not names:
        return
    try:
        models = server.get("models")["results"]
    except client.CtlError:
        return
    for name in names:
        if text := _remark(name, models, then, also):
            typer.echo(ctl_show.one_line(text), err=True)


def _remark(name: str, models: Sequence[Mapping[str, Any]], then: str, also: str) -> str:
    own = {model["name"] for model in models}
    others = {
        "alias": {alias: model["name"] for model in models for alias in model.get("aliases", ())},
        "adapter": {adapter["name"]: model["name"] for model in models for adapter in model.get("adapters", ())},
    }
    counting = own.union(others.get(also, ()))
    if name in counting:
        return ""
    for kind, held in others.items():
        if name in held:
            return f"{name} is an {kind} of {held[name]}, and only the model's own name counts here. Name {held[name]}."
    sought = f"model or {also}" if also else "model"
    return f"The catalog has no {sought} {name}.{nearest(name, counting)} {then}"
