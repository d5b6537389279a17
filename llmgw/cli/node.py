"""`llmgw node` and `llmgw server ca`: certificates for agents, on the machine that holds the authority."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from llmgw.cli import ctl_nodes

app = typer.Typer(help="Let machines join with certificates, and forget them.", no_args_is_help=True)

Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="server.yaml; everything has a default.")]


def ca(
    name: Annotated[
        list[str] | None, typer.Option(help="Name or address that agents dial; may be repeated. Those held are kept.")
    ] = None,
    config: Config = None,
) -> None:
    """Make the authority that proves agents, and the certificate of the listener they dial. Again adds names."""
    from llmgw.ops import nodes

    _use(config)
    for line in nodes.ca(tuple(name or ())):
        typer.echo(line)


@app.command()
def add(
    name: str,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write its files. Default: ./node-NAME")
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="A new certificate; earlier ones are void at once.")] = False,
    config: Config = None,
) -> None:
    """Make a node, and a certificate and key for its agent (0600)."""
    from llmgw.ops import nodes

    _use(config)
    for line in nodes.add(name, out, renew=renew):
        typer.echo(line)


app.command()(ctl_nodes.remove)


def _use(config: Path | None) -> None:
    if config is not None:
        os.environ["LLMGW_CONFIG"] = str(config)
