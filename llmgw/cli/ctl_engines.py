"""`llmgw ctl engine-build`: which build of an engine a node uses."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from llmgw.cli import client, ctl_show
from llmgw.cli.ctl import Json, _server, _show
from llmgw.cli.ctl_show import Record


def engine_build(
    ctx: typer.Context,
    node: str,
    engine: Annotated[str | None, typer.Argument(help="Only this one: vllm, sglang or llamacpp.")] = None,
    build: Annotated[str | None, typer.Argument(help="auto, none, or a build's name. Without it, it is shown.")] = None,
    json: Json = False,
) -> None:
    """Show or choose which builds of engines a node uses. What runs there is not touched."""
    path = f"nodes/{quote(node, safe='')}/builds"
    with _server(ctx) as server:
        if engine is not None and build is not None:
            done = server.send("PUT", f"{path}/{quote(engine, safe='')}", {"build": build})
            _show(done, json, lambda line: _print(node, [line]))
            return
        lines = server.get(path)
        found = [line for line in lines if engine in (None, line["engine"])]
        if not found:
            known = ", ".join(line["engine"] for line in lines)
            raise client.CtlError(f"There is no engine {engine}; known: {known}.", client.UNASKED)
        _show(found, json, lambda lines: _print(node, lines))


def _print(node: str, lines: list[Record]) -> None:
    ctl_show.table(
        "",
        ("engine", "chosen", "build", "version", "state", "note"),
        (
            (line["engine"], line["chosen"], each["name"], each["version"], each["state"], each["reason"])
            for line in lines
            for each in line["builds"] or ({"name": None, "version": None, "state": None, "reason": ""},)
        ),
        "",
    )
    for line in lines:
        if line["note"]:
            ctl_show.line(f"  {line['engine']}: {line['note']}. See: llmgw ctl events --node {node}")
