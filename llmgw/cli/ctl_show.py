"""How `llmgw ctl` prints: tables for people, the API's own JSON for programs. Unknown reads "–", never 0."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from tenants import money
from tenants.figures import UNKNOWN, ago, number, percent, size

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 10_000
COLOURS = {
    "green": ("ready", "ok"),
    "yellow": ("loading", "starting", "fetching", "installing", "draining", "stopping", "joining", "warn", "cordoned"),
    "red": ("failed", "lost", "cannot run", "unreachable"),
}
_COLOUR = {state: colour for colour, states in COLOURS.items() for state in states}
Record = Mapping[str, Any]


def clean(value: object) -> str:
    """Text from outside, without anything that could move the cursor or colour the terminal."""
    text = UNKNOWN if value is None else str(value)
    text = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, "replace").decode(encoding)


def one_line(value: object) -> str:
    return clean(value).replace("\n", " ")


def secret(text: object) -> None:
    """Alone on its line, for a person to keep or a script to read."""
    print(one_line(text))


def console() -> Console:
    from rich.console import Console

    # What goes into a pipe is not cut to a width nobody sees.
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def as_json(value: object) -> None:
    # Escapes outside ASCII: a program reads them all the same, and every terminal can print them.
    print(json.dumps(value, indent=2))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], empty: str) -> None:
    """One line a record. A column written ">name" is right-aligned; one named "state" is coloured by its word."""
    from rich.table import Table
    from rich.text import Text

    found = [[one_line(value) for value in row] for row in rows]
    out = console()
    if title:
        out.print(Text(title, style="bold"))
    if not found:
        out.print(Text(empty, style="dim"))
        return
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        shown.add_column(
            Text(column.lstrip(">")), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in found:
        cells = zip(columns, row, strict=True)
        shown.add_row(*(Text(cell, style=_COLOUR.get(cell, "") if column == "state" else "") for column, cell in cells))
    out.print(shown)


def line(text: str) -> None:
    from rich.text import Text

    console().print(Text(clean(text)))


def moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def since(text: str | None, now: datetime) -> str:
    return ago(moment(text), now)


_CAPACITY = ("total", "used", "starting", "free", "closed", "faulty", "reserved")


# --- the summary -----------------------------------------------------------------------------------------------------
def status(summary: Record) -> None:
    """The dashboard's numbers, in the dashboard's order."""
    now = moment(summary["at"])
    assert now is not None
    alerts = [(each["state"], each["subject"], each["text"]) for each in summary["alerts"]]
    table("Needs a person", ("state", "what", "why"), alerts, "Nothing needs you.")
    line("")
    table(
        "Capacity",
        ("class", "unit", ">total", ">used", ">starting", ">free", ">closed", ">faulty", ">reserved", ">nodes"),
        (
            (
                each["gpu_class"],
                each["unit"],
                *(number(each[key], 1) for key in _CAPACITY),
                each["nodes"],
            )
            for each in summary["capacity"]
        ),
        "No node has joined. Make a join token: llmgw ctl node-token NAME",
    )
    if summary["fabrics"]:
        line("")
        wholes(summary["fabrics"])
    if summary["quotas"]:
        line("")
        quotas(summary["quotas"], title="Cards of teams")
    line("")
    nodes(summary["nodes"], now, title="Nodes")
    line("")
    models(summary["models"], now)
    line("")
    replicas(summary["replicas"], now, title="Replicas")
    if summary["idle"]:
        line("")
        idle(summary["idle"], now)
    line("")
    users(summary["users"])
    flight = summary["in_flight"]
    silent = f"; {number(flight['silent'])} ready replicas not told of" if flight["silent"] else ""
    line(f"In flight now: {'unknown' if flight['requests'] is None else number(flight['requests'])}{silent}")
    line("")
    today(summary)


def today(summary: Record) -> None:
    used, currency = summary["usage_today"], summary["currency"]
    if summary["projects_today"]:
        table(
            "Projects today (UTC)",
            ("project", ">requests", ">failed", ">tokens read", ">written", ">spend"),
            (
                (
                    f"{each['team']} / {each['project']}",
                    *(number(each["usage"][key]) for key in _USED),
                    spend(each["usage"], currency),
                )
                for each in summary["projects_today"]
            ),
            "",
        )
    line(
        f"Today (UTC): {number(used['requests'])} requests, {number(used['failed'])} failed, "
        f"{number(used['prompt_tokens'])} tokens read, {number(used['completion_tokens'])} written, "
        f"spend: {spend(used, currency)}"
    )


_USED = ("requests", "failed", "prompt_tokens", "completion_tokens")


def spend(used: Record, currency: str) -> str:
    """What it cost, and how many requests had no price and are not in it."""
    if used["spend"] is None:
        return "no price"
    cost = money.text(money.units(Decimal(used["spend"])), currency)
    return f"{cost}, {number(used['unpriced'])} without a price" if used["unpriced"] else cost


def quotas(lines: Iterable[Record], *, title: str = "", empty: str = "") -> None:
    table(
        title,
        ("team", "class", ">held", ">may hold", "models", "note"),
        (
            (
                each["team"],
                each["gpu_class"],
                number(each["held"]),
                "not limited" if each["allowed"] is None else number(each["allowed"]),
                ", ".join(each["models"]),
                each["note"],
            )
            for each in lines
        ),
        empty,
    )


def wholes(lines: Iterable[Record]) -> None:
    table(
        "Whole nodes free per fabric",
        ("fabric", "class", ">Gbit/s", ">nodes", ">up", ">whole free", ">their cards", "note"),
        (
            (
                each["fabric"],
                each["gpu_class"] or "none",
                number(each["rate_gbit_s"], 1),
                *(number(each[key]) for key in ("nodes", "up", "free", "free_cards")),
                each["note"],
            )
            for each in lines
        ),
        "",
    )


def idle(lines: Iterable[Record], now: datetime) -> None:
    table(
        "Holding hardware, nobody asking",
        ("replica", "node", ">cards", ">cores", "last asked", "why it stays"),
        (
            (
                each["replica"],
                each["node"],
                number(each["cards"]),
                number(each["cores"], 1),
                since(each["idle_since"], now),
                each["note"],
            )
            for each in lines
        ),
        "",
    )


def users(lines: Iterable[Record]) -> None:
    table(
        "Using the cluster in the last 5 minutes",
        ("project", "model", ">requests", ">tokens a minute"),
        (
            (
                f"{each['team']} / {each['project']}",
                each["model"] or UNKNOWN,
                number(each["requests"]),
                number(each["tokens_per_minute"]),
            )
            for each in lines
        ),
        "Nobody.",
    )


def nodes(lines: Iterable[Record], now: datetime, *, title: str = "") -> None:
    table(
        title,
        ("name", "state", "marks", ">cores", ">memory", ">CPU", ">disk free", ">GPUs", ">replicas", ">files", "seen"),
        (
            (
                each["name"],
                each["state"],
                " ".join(mark for mark in ("cordoned", "draining") if each[mark]) or "-",
                f"{number(each['cores_used'], 1)} of {number(each['cores'])}",
                f"{size(each['memory_used_bytes'])} of {size(each['memory_bytes'])}",
                percent(each["cpu_percent"]),
                size(each["disk_free_bytes"]),
                cards(each),
                each["replicas"],
                each["files"],
                since(each["last_seen_at"], now),
            )
            for each in lines
        ),
        "No nodes. Make a join token: llmgw ctl node-token NAME",
    )


def cards(node: Record) -> str:
    """8: 4 used, 2 free, 2 faulty."""
    if not node["gpus"]:
        return "unknown" if node["gpus_note"] else "-"
    faulty = f", {node['gpus_faulty']} faulty" if node["gpus_faulty"] else ""
    return f"{node['gpus']}: {node['gpus_used']} used, {node['gpus_free']} free{faulty}"


def models(lines: Iterable[Record], now: datetime) -> None:
    held = list(lines)
    table(
        "Models",
        ("name", "state", ">ready", ">wanted", ">slots", ">in flight", ">waiting", "note"),
        (
            (
                each["name"],
                each["state"],
                each["ready"],
                each["wanted"],
                each["slots"],
                number(each["in_flight"]),
                number(each["waiting"]),
                each["note"],
            )
            for each in held
        ),
        "No models. Write a catalog and load it: llmgw ctl models apply -f FILE",
    )
    for each in held:
        for reason in each["why_not"]:
            line(f"  {each['name']}: {reason}")
        for wait in waits(each, now):
            line(f"  {each['name']}: {wait}")


def waits(model: Record, now: datetime) -> Iterator[str]:
    """Where a model is left alone after failures, and until when."""
    for each in model["waits"]:
        where = f"on node {each['node']}" if each["node"] else "everywhere"
        at = moment(each["next_try_at"])
        times = "1 failure" if each["failures"] == 1 else f"{each['failures']} failures in a row"
        next_try = f"next try {ago(at, now)}, at {at:%H:%M:%S} UTC" if at and at > now else "next try at once"
        yield f"{each['profile']} waits {where} after {times}, {next_try}: {each['reason']}"


def replicas(lines: Iterable[Record], now: datetime, *, title: str = "") -> None:
    table(
        title,
        ("name", "model", "profile", "node", "state", ">slots", ">in flight", ">running", ">waiting", "made", "note"),
        (
            (
                each["name"],
                each["model"],
                each["profile"],
                each["node"],
                each["state"],
                each["slots"],
                *(number(each[key]) for key in ("in_flight", "running", "waiting")),
                since(each["made_at"], now),
                each["note"],
            )
            for each in lines
        ),
        "No replicas run.",
    )


# --- the catalog -----------------------------------------------------------------------------------------------------
def catalog(documents: Iterable[Record]) -> None:
    """Per model its name, min and max, then a line a profile, all in their order of declaration."""
    held = list(documents)
    if not held:
        line("No models. Write a catalog and load it: llmgw ctl models apply -f FILE")
    for model in held:
        scaling = model.get("scaling", {})
        line(f"{model['name']}  min {scaling.get('min', 0)}  max {scaling.get('max', 0)}")
        if "external" in model:
            line(f"  external  {model['external']['url']}")
        for profile in model.get("profiles", []):
            words = (
                profile["name"],
                profile.get("engine", "vllm"),
                profile.get("gpu_class") or "cpu",
                f"tp {profile.get('tp', 1)}",
                f"nodes {profile.get('nodes', 1)}",
                f"priority {profile.get('priority', 0)}",
            )
            line("  " + "  ".join(words))


def applied(done: Record) -> None:
    for kind in ("added", "changed", "removed"):
        if done[kind]:
            line(f"{kind}: {', '.join(done[kind])}")
    if not any(done[kind] for kind in ("added", "changed", "removed")):
        line("Nothing changed.")
    line(f"The catalog is at version {done['version']}.")
    notices(done)


def notices(done: Record) -> None:
    for notice in done["notices"]:
        line(f"Note: model {notice['model']}: {notice['field']}: {notice['text']}")
