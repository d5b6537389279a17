"""`llmgw ctl model`: one model of the catalog and its adapters."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from llmgw.cli import ctl_show
from llmgw.cli.ctl import Json, _server, _show

model_app = typer.Typer(help="One model of the catalog.", no_args_is_help=True)
adapters_app = typer.Typer(help="LoRA adapters of a model.", no_args_is_help=True)
model_app.add_typer(adapters_app, name="adapters")

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Its name; not an alias.")]


def _path(model: str) -> str:
    return f"models/{quote(model, safe='')}"


@adapters_app.command("list")
def list_adapters(ctx: typer.Context, model: ModelArgument, json: Json = False) -> None:
    """Names and sources, in their order."""
    with _server(ctx) as server:
        rows = server.get(f"{_path(model)}/adapters")["results"]
        empty = f"None. Add one: llmgw ctl model adapters add {model} NAME SOURCE"
        _show(
            rows,
            json,
            lambda rows: ctl_show.table(
                "", ("name", "source"), ((each["name"], each["source"]) for each in rows), empty
            ),
        )


@adapters_app.command("add")
def add_adapter(
    ctx: typer.Context,
    model: ModelArgument,
    name: Annotated[str, typer.Argument(help="What clients ask for; no other model, alias or adapter has it.")],
    source: Annotated[
        str, typer.Argument(help="GGUF file for llama.cpp, PEFT directory for vLLM and SGLang: a path on nodes.")
    ],
    json: Json = False,
) -> None:
    """Add one. Its file is read first, where the control plane can, and refused if it is none for the model."""
    with _server(ctx) as server:
        done = server.send("POST", f"{_path(model)}/adapters", {"name": name, "source": source})
        _show(done, json, lambda done: _changed(done, f"{name} is an adapter of {model}."))


@adapters_app.command("remove")
def remove_adapter(
    ctx: typer.Context,
    model: ModelArgument,
    name: Annotated[str, typer.Argument(help="Of the adapter.")],
    json: Json = False,
) -> None:
    """Take one from a model; its file stays."""
    with _server(ctx) as server:
        done = server.send("DELETE", f"{_path(model)}/adapters", adapter=name)
        _show(done, json, lambda done: _changed(done, f"{name} is no adapter of {model} any more."))


@model_app.command()
def scale(
    ctx: typer.Context,
    model: ModelArgument,
    least: Annotated[int, typer.Argument(metavar="MIN", min=0, help="Replicas that are kept up.")],
    most: Annotated[
        int | None,
        typer.Argument(metavar="MAX", min=0, help="Else MIN. MIN 0 with a MAX: on demand. 0 0: off.", show_default=""),
    ] = None,
    json: Json = False,
) -> None:
    """Say how many replicas are kept up and how many there may be."""
    with _server(ctx) as server:
        held = server.get(_path(model))
        limits = {key: value for key, value in held.get("scaling", {}).items() if key == "idle_timeout"}
        limits |= {"min": least, "max": least if most is None else most}
        done = server.send("PUT", _path(model), {**held, "scaling": limits})
        _show(done, json, lambda done: _changed(done, f"{model}: min {limits['min']}, max {limits['max']}."))


def _changed(done: Any, text: str) -> None:
    ctl_show.line(text)
    ctl_show.line(f"The catalog is at version {done['version']}.")
    ctl_show.notices(done)
