"""`llmgw ctl fabrics`: the networks that replicas may span, over all nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from llmgw.cli import ctl_show
from llmgw.cli.ctl import Json, _server, _show
from llmgw.cli.ctl_show import Record
from tenants.figures import number


def fabrics(
    ctx: typer.Context,
    fabric: Annotated[
        str | None, typer.Argument(help="Also every port of this one; none: those that are in no fabric.")
    ] = None,
    json: Json = False,
) -> None:
    """Fabrics over all nodes: where they are up, what stands behind them, and what does not agree."""
    with _server(ctx) as server:
        _show(server.get("fabrics", fabric=fabric), json, lambda found: _print(found, fabric))


def _print(found: Record, fabric: str | None) -> None:
    ctl_show.table(
        "",
        ("name", "state", ">nodes up", "links", ">Gbit/s", "stands behind it"),
        (
            (
                each["name"],
                "up" if each["up"] == each["nodes"] else "in part" if each["up"] else "down",
                f"{each['up']} of {each['nodes']}",
                ", ".join(each["kinds"]) or None,
                number(each["rate_gbit_s"]),
                "\n".join(each["networks"]) or None,
            )
            for each in found["fabrics"]
        ),
        "No node declares a fabric. Name them in agent.yaml, e.g. fabrics: {ib0: [mlx5_0]}",
    )
    for each in found["fabrics"]:
        for text in (*each["marks"], *each["down"]):
            ctl_show.line(f"  {each['name']}: {text}")
    if fabric:
        _ports(found, fabric)


def _ports(found: Record, fabric: str) -> None:
    ctl_show.table(
        "Ports",
        ("node", "fabric", "adapter", ">port", "state", "links", ">Gbit/s", "stands behind it", "GIDs", "note"),
        (
            (
                each["node"],
                each["fabric"] or "none",
                each["adapter"],
                each["number"],
                each["state"].lower() or None,
                each["link_layer"] or None,
                number(each["rate_gbit_s"]),
                each["reports"] or None,
                each["gids"] or None,
                each["note"],
            )
            for each in found["ports"]
        ),
        f"No port is in {fabric}.",
    )
