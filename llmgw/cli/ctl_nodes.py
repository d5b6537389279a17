"""`llmgw ctl`, the part about nodes: drain, remove, labels, cores, engines, certificates, what comes ahead of need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote

import typer

from llmgw.cli import client, ctl_show
from llmgw.cli.ctl import Json, Limit, _server, _show

certificates_app = typer.Typer(help="Certificates that prove nodes.", no_args_is_help=True)


def drain(ctx: typer.Context, node: str, json: Json = False) -> None:
    """Move a node's replicas elsewhere, new ones first where there is room."""
    done = f"{node} is being drained: its replicas move. Undo: llmgw ctl uncordon {node}"
    _send(ctx, "POST", node, "/drain", None, json, done)


def remove(
    ctx: typer.Context,
    node: str,
    force: Annotated[bool, typer.Option("--force", help="Also one that is not lost; its engines run on.")] = False,
    json: Json = False,
) -> None:
    """Forget a lost node at once, with its token and certificates."""
    with _server(ctx) as server:
        server.ask("DELETE", _path(node), query={"force": "true"} if force else {})
        _show({"removed": node}, json, lambda _: ctl_show.line(f"{node} is forgotten, and nothing proves it any more."))


def label(
    ctx: typer.Context,
    node: str,
    labels: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...", help="NAME- takes one away.")],
    json: Json = False,
) -> None:
    """Set labels that profiles can ask for. They win over those in the node's agent.yaml."""
    with _server(ctx) as server:
        change = dict(_change(each) for each in labels)
        done = server.send("PATCH", _path(node), {"labels": change})
        shown = ", ".join(f"{name}={value}" for name, value in sorted(done["labels"].items())) or "none"
        _show(done, json, lambda _: ctl_show.line(f"Labels of {node}: {shown}"))


def reserve(
    ctx: typer.Context,
    node: str,
    cores: Annotated[float, typer.Argument(min=0, help="CPU cores that no replica is counted on.")],
    json: Json = False,
) -> None:
    """Keep CPU cores of a node for other things."""
    _send(ctx, "PATCH", node, "", {"reserved_cores": cores}, json, f"{cores:g} cores of {node} are kept from replicas.")


def engines(
    ctx: typer.Context,
    node: str,
    disable: Annotated[list[str] | None, typer.Option(help="No new replicas of this engine; may be repeated.")] = None,
    json: Json = False,
) -> None:
    """Say which engines a node gets no new replicas of. Without --disable it gets all."""
    off = disable or []
    done = f"{node} gets no new replicas of {', '.join(off)}." if off else f"{node} gets replicas of every engine."
    _send(ctx, "PATCH", node, "", {"disabled_engines": off}, json, done)


def address(
    ctx: typer.Context,
    node: str,
    address: Annotated[str, typer.Argument(help="Host name or IP address. Left out: where its agent says.")] = "",
    json: Json = False,
) -> None:
    """Pin where gateways reach a node's engines, whatever its agent says. Without an address it is unpinned."""
    done = (
        f"{node} is reached at {address}." if address else f"{node} is reached where its agent says, once it registers."
    )
    _send(ctx, "PATCH", node, "", {"pinned_address": address}, json, done)


def fetch(ctx: typer.Context, node: str, source: str, json: Json = False) -> None:
    """Bring weights onto a node before a replica needs them."""
    _send(
        ctx, "POST", node, "/fetch", {"source": source}, json, f"{node} fetches it. See: llmgw ctl events --node {node}"
    )


def install(ctx: typer.Context, node: str, engine: str, json: Json = False) -> None:
    """Install an engine on a node before a replica needs it."""
    done = f"{node} installs {engine}. See: llmgw ctl events --node {node}"
    _send(ctx, "POST", node, "/install", {"engine": engine}, json, done)


@certificates_app.command("list")
def list_certificates(ctx: typer.Context, limit: Limit = 100, json: Json = False) -> None:
    """Which certificates prove which node, and until when."""
    with _server(ctx) as server:
        _show(
            server.pages("certificates", limit),
            json,
            lambda rows: ctl_show.table(
                "",
                ("node", "serial", "made", "by", "expires"),
                (
                    (each["node"], each["serial"], each["made_at"][:19], each["made_by"], each["expires_at"][:19])
                    for each in rows
                ),
                "No certificates. Make one: llmgw node add NAME",
            ),
        )


@certificates_app.command()
def revoke(ctx: typer.Context, node: str, json: Json = False) -> None:
    """Void a node's certificates at once; its stream ends. The node and its engines stay."""
    _send(
        ctx,
        "POST",
        node,
        "/revoke-certificates",
        None,
        json,
        f"No certificate proves {node} any more. Make another: llmgw node add {node}",
    )


def _change(text: str) -> tuple[str, str | None]:
    name, is_set, value = text.partition("=")
    if is_set:
        return name, value
    if not text.endswith("-"):
        raise client.CtlError(f"{text} is no label: write NAME=VALUE, or NAME- to take one away.", client.UNASKED)
    return text[:-1], None


def _send(ctx: typer.Context, method: str, node: str, tail: str, body: Any, as_json: bool, done: str) -> None:
    with _server(ctx) as server:
        _show(server.send(method, _path(node) + tail, body), as_json, lambda _: ctl_show.line(done))


def _path(node: str) -> str:
    return f"nodes/{quote(node, safe='')}"


COMMANDS: tuple[Callable[..., None], ...] = (drain, remove, label, reserve, engines, address, fetch, install)
