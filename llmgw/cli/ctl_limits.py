"""`llmgw ctl limits`, `budgets` and `prices`: who may use how much, and what it costs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from llmgw.cli import client, ctl_names, ctl_show, given
from llmgw.cli.ctl import Json, Limit, _server, _show
from tenants.figures import number
from tenants.keys import PREFIX_LENGTH

limits_app = typer.Typer(help="Limits of an organisation, team, project or key.", no_args_is_help=True)
budgets_app = typer.Typer(help="What may be used in a period.", no_args_is_help=True)
prices_app = typer.Typer(help="What a model's tokens cost.", no_args_is_help=True)

NONE = "none"


class Kind(StrEnum):
    organisation = "organisation"
    team = "team"
    project = "project"
    key = "key"


class Unit(StrEnum):
    money = "money"
    tokens = "tokens"


class Period(StrEnum):
    day = "day"
    week = "week"
    month = "month"
    total = "total"


KindArgument = Annotated[Kind, typer.Argument(help="Whose.", show_default=False)]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Its name or number; of a key also its prefix.")]


def _find(server: client.Client, kind: Kind, wanted: str) -> Any:
    """The one record of that name or number that this token sees."""
    found = [
        each
        for each in server.pages(f"{kind.value}s", 100_000)
        if wanted in (each["name"], each.get("slug"), str(each["id"]))
        or (each.get("prefix") and wanted.startswith(each["prefix"]))
    ]
    # A whole key may have been pasted: no more than its beginning is shown.
    shown = wanted[:PREFIX_LENGTH] if wanted.startswith("sk-") else wanted[:40]
    if len(found) == 1:
        return found[0]
    if not found:
        raise client.CtlError(f"There is no {kind.value} {shown} that you can see.", client.UNASKED)
    known = ", ".join(f"{each['name']} ({each['id']})" for each in found[:10])
    raise client.CtlError(f"{shown} could be {known}; give its number.", client.UNASKED)


# --- limits ----------------------------------------------------------------------------------------------------------
@limits_app.command("show")
def show_limits(ctx: typer.Context, kind: KindArgument, name: NameArgument, json: Json = False) -> None:
    """What holds for it: the tightest on its path, and whose it is."""
    with _server(ctx) as server:
        found = server.get(f"{kind.value}s/{_find(server, kind, name)['id']}/limits")
        _show(found, json, _print_limits)


@limits_app.command("set")
def set_limits(
    ctx: typer.Context,
    kind: KindArgument,
    name: NameArgument,
    requests_per_minute: Annotated[str | None, typer.Option(metavar="N", help="Or none.")] = None,
    tokens_per_minute: Annotated[str | None, typer.Option(metavar="N", help="Read and written. Or none.")] = None,
    max_concurrent: Annotated[str | None, typer.Option(metavar="N", help="Requests at once. Or none.")] = None,
    band: Annotated[str | None, typer.Option(metavar="BAND", help="Priority band. Or none.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Allow only this model or adapter; may be repeated. none: all.")
    ] = None,
    json: Json = False,
) -> None:
    """Set what you name; the rest stays. none lifts a limit here."""
    rates = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    body: dict[str, object] = {key: _rate(key, value) for key, value in rates.items() if value is not None}
    if band is not None:
        body["band"] = "" if band == NONE else band
    if model:
        body["models_allowed"] = [] if model == [NONE] else model
    with _server(ctx) as server:
        if not body:
            raise client.CtlError("Name a limit to set, such as --requests-per-minute 60.", client.UNASKED)
        found = server.send("PATCH", f"{kind.value}s/{_find(server, kind, name)['id']}/limits", body)
        _show(found, json, _print_limits)
        if model and model != [NONE]:
            ctl_names.remark(server, model, "It is allowed once there is one.", also="adapter")


def _rate(name: str, text: str) -> int | None:
    if text == NONE:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise typer.BadParameter(f"{text!r} is no number and not none.", param_hint=f"--{name.replace('_', '-')}")
    return int(text)


def _print_limits(found: Any) -> None:
    held = found["effective"]
    rates = ("requests_per_minute", "tokens_per_minute", "max_concurrent")
    rows = [(name.replace("_", " "), number(held[name]["value"]), _whose(held[name]["of"], found)) for name in rates]
    names = held["models_allowed"]["value"]
    shown = "all" if names is None else ", ".join(names) or "none"
    rows.append(("models", shown, ", ".join(_whose(each, found) for each in held["models_allowed"]["of"])))
    rows.append(("band", held["band"]["value"] or "the model's", _whose(held["band"]["of"], found)))
    ctl_show.table(f"{found['subject']} {found['name']}", ("limit", "value", "whose"), rows, "")


def _whose(of: Any, found: Any) -> str:
    if of is None:
        return ""
    own = (of["subject"], of["id"]) == (found["subject"], found["id"])
    return "set here" if own else f"{of['subject']} {of['name']}"


# --- budgets ---------------------------------------------------------------------------------------------------------
@budgets_app.command("list")
def list_budgets(ctx: typer.Context, limit: Limit = 100, json: Json = False) -> None:
    """Every budget that you see, with what is used of it."""
    with _server(ctx) as server:
        _show(server.pages("budgets", limit), json, _print_budgets)


@budgets_app.command("set")
def set_budget(
    ctx: typer.Context,
    kind: KindArgument,
    name: NameArgument,
    amount: Annotated[str, typer.Option(metavar="AMOUNT", help="Money such as 350 or 12.50, or whole tokens.")],
    unit: Annotated[Unit, typer.Option(help="Of what.")] = Unit.money,
    period: Annotated[Period, typer.Option(help="In which time; total: never resets.")] = Period.month,
    warn: Annotated[bool, typer.Option("--warn", help="Only show that it is used up; refuse nothing.")] = False,
    json: Json = False,
) -> None:
    """Make a budget, or change the one of the same unit and period."""
    with _server(ctx) as server:
        row = _find(server, kind, name)
        held = server.pages("budgets", 100, subject=kind.value, subject_id=row["id"])
        same = [each for each in held if (each["unit"], each["period"]) == (unit.value, period.value)]
        body = {"unit": unit.value, "amount": amount, "period": period.value, "stops": not warn}
        if len(same) > 1:
            known = ", ".join(str(each["id"]) for each in same)
            raise client.CtlError(f"{row['name']} has several such budgets ({known}). Remove all but one.")
        if same:
            done = server.send("PATCH", f"budgets/{same[0]['id']}", body)
        else:
            done = server.send("POST", "budgets", {**body, "subject": kind.value, "subject_id": row["id"]})
        _show(done, json, lambda done: _print_budgets([done]))


@budgets_app.command("remove")
def remove_budget(ctx: typer.Context, budget: Annotated[int, typer.Argument(metavar="NUMBER", min=1)]) -> None:
    """Remove a budget, by the number that the list shows; what was used stays recorded."""
    with _server(ctx) as server:
        server.ask("DELETE", f"budgets/{budget}")
        ctl_show.line(f"Budget {budget} is removed.")


def _print_budgets(found: Any) -> None:
    ctl_show.table(
        "",
        (">number", "whose", ">used", ">of", "unit", "period", "then", "resets", "note"),
        (
            (
                each["id"],
                f"{each['subject']} {each['name']}",
                each["used"],
                each["amount"],
                each["currency"] or each["unit"],
                each["period"],
                "refuses" if each["stops"] else "shows",
                (each["resets_at"] or "never")[:16],
                each["unpriced"],
            )
            for each in found
        ),
        "No budgets. Make one: llmgw ctl budgets set project NAME --amount 100",
    )


# --- prices ----------------------------------------------------------------------------------------------------------
@prices_app.command("list")
def list_prices(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    limit: Limit = 100,
    json: Json = False,
) -> None:
    """What models cost and from when on, the latest entries first."""
    with _server(ctx) as server:
        _show(server.pages("prices", limit, model=model), json, _print_prices)


@prices_app.command("set")
def set_price(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    input: Annotated[str, typer.Option(metavar="AMOUNT", help="Of a million tokens read.")],
    output: Annotated[str, typer.Option(metavar="AMOUNT", help="Of a million tokens written.")],
    cached_input: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="Of a million cached tokens; else as input.")
    ] = None,
    request: Annotated[str, typer.Option(metavar="AMOUNT", help="Of each request besides.")] = "0",
    valid_from: Annotated[str | None, typer.Option("--from", metavar="TIME", help="From then on; else now.")] = None,
    json: Json = False,
) -> None:
    """Say what a model costs from a time on. What was recorded keeps the cost that it had."""
    body: dict[str, object] = {
        "model": model,
        "input": given.amount("--input", input),
        "output": given.amount("--output", output),
        "cached_input": None if cached_input is None else given.amount("--cached-input", cached_input),
        "request": given.amount("--request", request),
    }
    if valid_from:
        body["valid_from"] = given.moment("--from", valid_from)
    with _server(ctx) as server:
        _show(server.send("POST", "prices", body), json, lambda done: _print_prices([done]))
        ctl_names.remark(server, [model], "The price counts once a model has that name.")


@prices_app.command("remove")
def remove_price(ctx: typer.Context, price: Annotated[int, typer.Argument(metavar="NUMBER", min=1)]) -> None:
    """Remove a price, by the number that the list shows."""
    with _server(ctx) as server:
        server.ask("DELETE", f"prices/{price}")
        ctl_show.line(f"Price {price} is removed.")


def _print_prices(found: Any) -> None:
    ctl_show.table(
        "",
        (">number", "model", "from", ">input", ">cached", ">output", ">request", "currency"),
        (
            (
                each["id"],
                each["model"],
                each["valid_from"][:16],
                each["input"],
                each["cached_input"] or each["input"],
                each["output"],
                each["request"],
                each["currency"],
            )
            for each in found
        ),
        "No prices: no budget of money counts anything. Set one: llmgw ctl prices set MODEL --input 0.1 --output 0.4",
    )
