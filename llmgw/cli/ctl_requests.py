"""`llmgw ctl usage` and `llmgw ctl requests`: what was used, and finished requests by what is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from llmgw.cli import client, ctl_names, ctl_show
from llmgw.cli.ctl import Json, Limit, _project, _server, _show
from tenants.figures import milliseconds, number
from tenants.keys import PREFIX_LENGTH

Model = Annotated[str | None, typer.Option(help="Only this model's.")]
Project = Annotated[str | None, typer.Option(help="Only this project's, by name or number.")]


def usage(
    ctx: typer.Context,
    model: Model = None,
    project: Project = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="From then on; else since midnight UTC.")] = None,
    limit: Limit = 20,
    json: Json = False,
) -> None:
    """What was used, and the latest requests."""
    with _server(ctx) as server:
        chosen = {"model": model, "since": since, "project": _project(server, project) if project else None}
        totals = server.get("usage/totals", **chosen)
        rows = server.pages("usage", limit, **chosen)
        _show({"totals": totals, "latest": rows}, json, _print_usage)
        _remark(server, model, rows)


def _print_usage(found: Any) -> None:
    totals = found["totals"]
    ctl_show.line(
        f"Since {totals['since'][:19]} UTC: {number(totals['requests'])} requests, {number(totals['failed'])} failed, "
        f"{number(totals['prompt_tokens'])} tokens read, {number(totals['completion_tokens'])} written"
    )
    _print(found["latest"])


def requests(
    ctx: typer.Context,
    project: Project = None,
    key: Annotated[str | None, typer.Option(metavar="PREFIX", help="Only this key's; or the key's number.")] = None,
    model: Model = None,
    result: Annotated[str | None, typer.Option(help="ok, refused, left (the client went away) or failed.")] = None,
    code: Annotated[str | None, typer.Option(help="Only those that ended with this error code.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Ended from then on: 2027-01-31T00:00.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Ended before then.")] = None,
    limit: Limit = 20,
    json: Json = False,
) -> None:
    """Finished requests, newest first. Why one went where it went: llmgw why ID"""
    with _server(ctx) as server:
        # The whole secret may have been pasted: no more than its beginning is sent.
        shown = key if key is None or key.isdecimal() else key[:PREFIX_LENGTH]
        rows = server.pages(
            "requests",
            limit,
            project=_project(server, project) if project else None,
            key=shown,
            model=model,
            result=result,
            code=code,
            since=since,
            until=until,
        )
        _show(rows, json, _print)
        _remark(server, model, rows, also="alias")


def _remark(server: client.Client, model: str | None, rows: list[Any], also: str = "") -> None:
    """Whether the name may be why nothing was found."""
    if model and not rows:
        then = "Requests that were recorded under that name would be found all the same."
        ctl_names.remark(server, [model], then, also=also)


def _print(rows: Iterable[Any]) -> None:
    ctl_show.table(
        "",
        ("at", "request", "model", "project", ">status", "code", ">read", ">written", ">time"),
        (
            (
                each["at"][:19],
                each["request_id"],
                each["model"],
                each["project_name"],
                each["status"],
                each["error_code"],
                number(each["prompt_tokens"]),
                number(each["completion_tokens"]),
                milliseconds(each["total_ms"]),
            )
            for each in rows
        ),
        "No requests.",
    )
