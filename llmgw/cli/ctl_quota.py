"""`llmgw ctl quota`: how many cards the models of a team may hold."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from llmgw.cli import ctl_show
from llmgw.cli.ctl import Json, Limit, _server, _show
from llmgw.cli.ctl_limits import NONE, Kind, _find

quota_app = typer.Typer(help="How many cards of a class the models of a team may hold.", no_args_is_help=True)
TeamArgument = Annotated[str, typer.Argument(metavar="TEAM", help="Its name, short name or number.")]


@quota_app.command("list")
def list_quotas(
    ctx: typer.Context,
    team: Annotated[str | None, typer.Option(help="Only of this team.")] = None,
    limit: Limit = 1000,
    json: Json = False,
) -> None:
    """What teams may hold, what they hold, and which models do."""
    with _server(ctx) as server:
        slug = _find(server, Kind.team, team)["slug"] if team else None
        _show(server.pages("quotas", limit, team=slug), json, _print_quotas)


@quota_app.command("set")
def set_quota(
    ctx: typer.Context,
    team: TeamArgument,
    gpu_class: Annotated[str, typer.Argument(metavar="CLASS", help="As nodes report it, such as h100-80g.")],
    cards: Annotated[str, typer.Argument(metavar="CARDS", help="How many; 0: none. none: no limit.")],
    json: Json = False,
) -> None:
    """Say how many cards a team's models may hold. What runs already stays; new replicas keep to it."""
    if cards != NONE and not (cards.isascii() and cards.isdecimal() and len(cards) < 10):
        raise typer.BadParameter(f"{cards!r} is no number and not none.", param_hint="CARDS")
    with _server(ctx) as server:
        path = f"teams/{_find(server, Kind.team, team)['id']}/quotas/{quote(gpu_class, safe='')}"
        done = server.send("DELETE", path) if cards == NONE else server.send("PUT", path, {"cards": int(cards)})
        _show(done, json, lambda done: _print_quotas([done]))


def _print_quotas(found: Any) -> None:
    lines = [{**each, "team": each["team_slug"], "allowed": each["cards"]} for each in found]
    ctl_show.quotas(lines, empty="No team's cards are limited. Limit them: llmgw ctl quota set TEAM h100-80g 8")
