"""`llmgw why ID`: what became of a request, and why a replica, model or node is as it is, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from llmgw.cli import client, ctl_show
from routing.explain import was_looked_for
from tenants.figures import ago, number

EVENTS = 5
TAIL_LINES = 12
Record = Mapping[str, Any]


def why(
    id: Annotated[str, typer.Argument(metavar="ID", help="A request id, or the name of a replica, model or node.")],
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help="The control plane; else LLMGW_URL.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with an API token; else LLMGW_TOKEN_FILE.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Explain a request, replica, model or node in the words of the pages."""
    with client.connect(url, token_file) as server:
        kind, found, events = _find(server, id)
        if json:
            ctl_show.as_json({"kind": kind, "found": found, "events": events})
            return
        for line in explain(kind, found, events):
            ctl_show.line(line)


def _find(server: client.Client, id: str) -> tuple[str, Record, list[Any]]:
    try:
        summary = server.get("summary")
    except client.CtlError as error:
        if error.code != client.REFUSED:
            raise
        summary = {"replicas": [], "models": [], "nodes": []}  # only operators see the cluster; a request may be theirs
    for kind in ("replica", "model", "node"):
        for line in summary[f"{kind}s"]:
            if id == line["name"] or id in line.get("aliases", ()):
                events = server.get("events", **{kind: line["name"], "limit": EVENTS})["results"]
                return kind, {**line, "now": summary["at"]}, events
    try:
        return "request", server.get(f"requests/{quote(id, safe='')}"), []
    except client.CtlError as error:
        if error.code != client.REFUSED:
            raise
    raise client.CtlError(
        f"Nothing is known as {ctl_show.clean(id)[:80]}: no request that has ended, no replica, model or node. "
        "See what there is: llmgw ctl status"
    )


def explain(kind: str, found: Record, events: list[Any]) -> Iterator[str]:
    """The lines of the answer."""
    if kind == "request":
        yield from _request(found)
        return
    now = ctl_show.moment(found["now"])
    assert now is not None
    if kind == "replica":
        yield from _replica(found, now)
    elif kind == "model":
        yield from _model(found, now)
    else:
        yield from _node(found, now)
    if events:
        yield "What happened last:"
        yield from (f"  {ago(ctl_show.moment(event['at']), now)}: {event['text']}" for event in events)


def _request(found: Record) -> Iterator[str]:
    yield f"Request {found['request_id']} to {found['route']}, which ended at {found['at'][:19]} UTC:"
    project, key = found["project_name"] or "no project", found["key_prefix"]
    yield f"  for {project}" + (f", key {key}…" if key else "")
    yield from (f"  {sentence}" for sentence in found["words"])
    if found["explained"] is None and was_looked_for(found["model"], found["replica"], found["error_code"]):
        yield "  Where else it could have gone is not kept, or not any more."


def _replica(found: Record, now: datetime) -> Iterator[str]:
    yield f"Replica {found['name']} of {found['model']} ({found['profile']}, {found['engine']}): {found['state']}."
    if found["note"]:
        yield f"  {found['note']}"
    yield f"  on {found['node'] or 'no node'}, made {ago(ctl_show.moment(found['made_at']), now)}" + (
        f", ready {ago(ctl_show.moment(found['ready_at']), now)}" if found["ready_at"] else ", not ready yet"
    )
    used, waiting = number(found["in_flight"]), number(found["waiting"])
    yield f"  {used} of {found['slots']} slots in use, {waiting} waiting in the engine"
    tail = [line for line in str(found["tail"]).splitlines() if line.strip()][-TAIL_LINES:]
    if tail:
        yield "The engine's last lines:"
        yield from (f"  {line}" for line in tail)


def _model(found: Record, now: datetime) -> Iterator[str]:
    yield f"Model {found['name']}: {found['state']}. {found['ready']} of {found['wanted']} wanted replicas are ready."
    if found["note"]:
        yield f"  {found['note']}"
    if found["next_try_at"]:
        at = ctl_show.moment(found["next_try_at"])
        yield f"  next try {ago(at, now)}" if at and at > now else "  next try at once"
    if found["waits"]:
        yield "Where it is left alone after failures:"
        yield from (f"  {wait}" for wait in ctl_show.waits(found, now))
    if found["why_not"]:
        yield "Where it was not placed:"
        yield from (f"  {reason}" for reason in found["why_not"])


def _node(found: Record, now: datetime) -> Iterator[str]:
    yield f"Node {found['name']}: {found['state']}. Last heard {ago(ctl_show.moment(found['last_seen_at']), now)}."
    if found["cordoned"]:
        yield f"  It is cordoned: nothing new is placed there. Undo: llmgw ctl uncordon {found['name']}"
    if found["draining"]:
        yield f"  It is being drained: its replicas move. Undo: llmgw ctl uncordon {found['name']}"
    held = "1 replica" if found["replicas"] == 1 else f"{found['replicas']} replicas"
    yield f"  {held}, {number(found['cores_used'], 1)} of {number(found['cores'])} cores counted"
    yield f"  engines: {', '.join(found['engines']) or 'none usable'}"
    if found["gpus_faulty"]:
        yield f"  {found['gpus_faulty']} of {found['gpus']} cards are faulty"
