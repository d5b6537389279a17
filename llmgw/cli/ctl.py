"""`llmgw ctl`: look at a control plane and change it, over its API and nothing else."""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from typer.core import TyperGroup

from llmgw.cli import client, ctl_names, ctl_show, given
from tenants.keys import PREFIX_LENGTH

MAX_FILE_BYTES = 2 * 1024 * 1024


class Reaching(TyperGroup):
    """Its options are taken after its commands too, where people put them; the help of each does not repeat them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        late = [copy.copy(option) for option in self.params if option.name in ("url", "token_file")]
        for option in late:
            option.__dict__.update(hidden=True, expose_value=False, callback=_given_late)
        groups: list[Any] = [self]
        for group in groups:
            for command in group.commands.values():
                command.params.extend(late)
                groups += [command] if hasattr(command, "commands") else []


app = typer.Typer(
    help="Look at a control plane and change it, over its API. Each command takes --url and --token-file, too.",
    no_args_is_help=True,
    cls=Reaching,
)
models_app = typer.Typer(help="The catalog: what is served, and how it can run.", invoke_without_command=True)
keys_app = typer.Typer(help="Project keys.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(keys_app, name="keys")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="How many at most.")]
Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="The control plane; else LLMGW_URL.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="File with an API token; else LLMGW_TOKEN_FILE.")
]


@dataclass(frozen=True, slots=True)
class Target:
    url: str | None = None
    token_file: Path | None = None

    def connect(self) -> AbstractContextManager[client.Client]:
        return client.connect(self.url, self.token_file)


@app.callback()
def target(ctx: typer.Context, url: Url = None, token_file: TokenFile = None) -> None:
    """Without options: the control plane that `llmgw up` runs with ./data or LLMGW_DATA_DIR."""
    ctx.obj = Target(url, token_file)


def _given_late(ctx: typer.Context, option: Any, value: str | Path | None) -> None:
    if value is not None:
        ctx.obj = replace(ctx.obj, **{option.name: value})


def _server(ctx: typer.Context) -> AbstractContextManager[client.Client]:
    found = ctx.obj if isinstance(ctx.obj, Target) else Target()
    return found.connect()


def _show(data: Any, as_json: bool, human: Any) -> None:
    if as_json:
        ctl_show.as_json(data)
    else:
        human(data)


# --- the cluster -----------------------------------------------------------------------------------------------------
@app.command()
def status(ctx: typer.Context, json: Json = False) -> None:
    """The cluster now, in the dashboard's numbers."""
    with _server(ctx) as server:
        _show(server.get("summary"), json, ctl_show.status)


@app.command()
def nodes(ctx: typer.Context, json: Json = False) -> None:
    """Machines: state, load, what they hold."""
    with _server(ctx) as server:
        summary = server.get("summary")
        now = ctl_show.moment(summary["at"])
        _show(summary["nodes"], json, lambda lines: ctl_show.nodes(lines, now))  # type: ignore[arg-type]


@app.command()
def replicas(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    json: Json = False,
) -> None:
    """Running copies: where, how far, how busy."""
    with _server(ctx) as server:
        summary = server.get("summary")
        now = ctl_show.moment(summary["at"])
        lines = [each for each in summary["replicas"] if model in (None, each["model"])]
        _show(lines, json, lambda lines: ctl_show.replicas(lines, now))  # type: ignore[arg-type]


@app.command()
def events(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only of this replica.")] = None,
    node: Annotated[str | None, typer.Option(help="Only of this node.")] = None,
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """What happened and why, newest first."""
    with _server(ctx) as server:
        rows = server.pages("events", limit, model=model, replica=replica, node=node)
        _show(
            rows,
            json,
            lambda rows: ctl_show.table(
                "",
                ("at", "what", "text"),
                ((each["at"][:19], each["kind"], each["text"]) for each in rows),
                "Nothing has happened yet.",
            ),
        )


@app.command()
def cordon(ctx: typer.Context, node: str, json: Json = False) -> None:
    """Place nothing new on a node; what runs there goes on."""
    _mark(
        ctx, node, "cordon", f"{node} is cordoned: nothing new is placed there. Undo: llmgw ctl uncordon {node}", json
    )


@app.command()
def uncordon(ctx: typer.Context, node: str, json: Json = False) -> None:
    """Let replicas be placed on a node again."""
    _mark(ctx, node, "uncordon", f"{node} takes replicas again.", json)


def _mark(ctx: typer.Context, node: str, action: str, done: str, as_json: bool) -> None:
    with _server(ctx) as server:
        _show(server.send("POST", f"nodes/{quote(node, safe='')}/{action}"), as_json, lambda _: ctl_show.line(done))


@app.command("node-token")
def node_token(
    ctx: typer.Context,
    name: str,
    renew: Annotated[
        bool, typer.Option("--renew", help="A new token for a node that there is; the old one is void.")
    ] = False,
    json: Json = False,
) -> None:
    """Let a machine join: make the node, or renew its token, and print the join token, once."""
    path, body = (f"nodes/{quote(name, safe='')}/token", None) if renew else ("nodes", {"name": name})
    with _server(ctx) as server:
        _show(server.send("POST", path, body), json, lambda made: _print_join_token(made, name))


def _print_join_token(made: Any, node: str) -> None:
    ctl_show.secret(made.get("token") or made["join_token"])
    _aside(f"This is the join token of {node}; it is not shown again. Keep it in a 0600 file there.")


# --- the catalog -----------------------------------------------------------------------------------------------------
@models_app.callback()
def models(ctx: typer.Context, json: Json = False) -> None:
    """Without a command: every model with its min and max, and a line a profile."""
    if ctx.invoked_subcommand is None:
        with _server(ctx) as server:
            _show(server.get("models")["results"], json, ctl_show.catalog)


File = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="The catalog as YAML; - reads standard input.")
]


@models_app.command()
def apply(
    ctx: typer.Context,
    file: File,
    note: Annotated[str | None, typer.Option(help="Why; kept with the version.")] = None,
    json: Json = False,
) -> None:
    """Make a file the whole catalog. One problem anywhere, and the old catalog stays."""
    with _server(ctx) as server:
        _show(_put(server, file, note=note), json, ctl_show.applied)


@models_app.command()
def check(ctx: typer.Context, file: File, json: Json = False) -> None:
    """Say whether a file would be taken as the catalog, and change nothing."""
    with _server(ctx) as server:
        done = _put(server, file, check="true")
        if not json:
            ctl_show.line(f"{file} is a valid catalog.")
        _show(done, json, ctl_show.notices)


@models_app.command()
def export(
    ctx: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write here, not to the terminal.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the catalog as YAML, ready for `apply`."""
    with _server(ctx) as server:
        if json:
            ctl_show.as_json({"models": server.get("models")["results"]})
            return
        text = server.text("catalog")
    if out is None:
        typer.echo(text.encode(), nl=False)  # UTF-8 in any locale, as a file would be
        return
    scratch = out.with_name(f".{out.name}.writing")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(out)
    except OSError as error:
        _aside(f"llmgw: {out} cannot be written: {error.strerror}. Name another file with -o.")
        raise typer.Exit(client.UNASKED) from None


@models_app.command()
def versions(ctx: typer.Context, limit: Limit = 20, json: Json = False) -> None:
    """Earlier catalogs: who changed it and when, newest first."""
    with _server(ctx) as server:
        _show(
            server.pages("catalog/versions", limit),
            json,
            lambda rows: ctl_show.table(
                "",
                (">version", "made at", "by", "note"),
                ((each["number"], each["made_at"][:19], each["made_by"], each["note"]) for each in rows),
                "The catalog was never changed.",
            ),
        )


@models_app.command()
def rollback(ctx: typer.Context, version: Annotated[int, typer.Argument(min=1)], json: Json = False) -> None:
    """Make an earlier version the catalog again, as a new version."""
    with _server(ctx) as server:
        _show(server.send("POST", f"catalog/versions/{version}/roll-back"), json, ctl_show.applied)


def _put(server: client.Client, file: Path, **query: object) -> Any:
    """Send a file as the catalog. What is wrong in it names the file."""
    try:
        return server.send("PUT", "catalog", _text_of(file), **query)
    except client.CtlError as error:
        if not error.lines:
            raise
        name = "standard input" if str(file) == "-" else file
        raise client.CtlError(f"{name}: {error}", error.code, lines=error.lines) from None


def _text_of(file: Path) -> str:
    try:
        raw = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if str(file) == "-" else file.read_bytes()
        if len(raw) > MAX_FILE_BYTES:
            raise client.CtlError(
                f"{file} has more than {MAX_FILE_BYTES} bytes; no catalog is that large.", client.UNASKED
            )
        return raw.decode("utf-8")
    except OSError as error:
        raise client.CtlError(
            f"{file} cannot be read: {error.strerror}. Name an existing file.", client.UNASKED
        ) from None
    except UnicodeDecodeError:
        raise client.CtlError(f"{file} is not UTF-8 text. Save it as such.", client.UNASKED) from None


# --- keys ------------------------------------------------------------------------------------------------------------
@keys_app.command("list")
def list_keys(ctx: typer.Context, limit: Limit = 100, json: Json = False) -> None:
    """Keys by prefix, newest first; secrets are nowhere."""
    with _server(ctx) as server:
        _show(
            server.pages("keys", limit),
            json,
            lambda rows: ctl_show.table(
                "",
                (">number", "prefix", "name", "project", "owner", "made", "last used", "expires", "state"),
                (
                    (
                        each["id"],
                        each["prefix"],
                        each["name"],
                        each["project_name"],
                        each["owner"],
                        each["made_at"][:19],
                        (each["last_used_at"] or "never")[:19],
                        (each["expires_at"] or "never")[:19],
                        "revoked" if each["revoked_at"] else "live",
                    )
                    for each in rows
                ),
                "No keys. Make one: llmgw ctl keys make NAME",
            ),
        )


@keys_app.command()
def make(
    ctx: typer.Context,
    name: str,
    project: Annotated[
        str | None, typer.Option(help="Project by name or number; needed when there are several.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Allow only this model; may be repeated.")] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="When it stops, e.g. 2027-01-31T00:00:00Z.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a key for a project and print it, once."""
    ends = given.moment("--expires", expires) if expires else None
    with _server(ctx) as server:
        body: dict[str, object] = {"project": _project(server, project), "name": name, "models_allowed": model or []}
        if ends:
            body["expires_at"] = ends
        _show(server.send("POST", "keys", body), json, _print_key)
        ctl_names.remark(server, model or (), "The key may use it once there is one.", also="adapter")


def _print_key(made: Any) -> None:
    ctl_show.secret(made["secret"])
    _aside(f"This is key {made['key']['name']} of {made['key']['project_name']}; it is not shown again.")


def _project(server: client.Client, wanted: str | None) -> int:
    found = server.pages("projects", 10_000)
    if wanted is not None:
        found = [each for each in found if wanted in (each["name"], each["slug"], str(each["id"]))]
    if len(found) == 1:
        return int(found[0]["id"])
    known = ", ".join(f"{each['team']} / {each['name']} ({each['id']})" for each in found[:10])
    if wanted is None:
        text = f"Name a project with --project: {known}." if found else "There is no project that you can see."
    else:
        text = (
            f"{wanted} could be {known}; give its number."
            if found
            else f"There is no project {wanted} that you can see."
        )
    raise client.CtlError(text, client.UNASKED)


@keys_app.command()
def revoke(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(metavar="PREFIX", help="As `keys list` shows it; or the key's number.")],
    json: Json = False,
) -> None:
    """Stop a key at once."""
    with _server(ctx) as server:
        pk = int(key) if key.isascii() and key.isdecimal() else _live_key(server, key)
        done = server.send("POST", f"keys/{pk}/revoke")
        _show(done, json, lambda key: ctl_show.line(f"Key {key['prefix']}... ({key['name']}) is revoked."))


def _live_key(server: client.Client, text: str) -> int:
    """Its number. The whole secret may have been pasted: no more than its beginning is sent or shown."""
    prefix = text[:PREFIX_LENGTH]
    if len(prefix) < PREFIX_LENGTH:
        raise client.CtlError(
            f"{prefix!r} is no prefix of a key, which has {PREFIX_LENGTH} characters. See them: llmgw ctl keys list",
            client.UNASKED,
        )
    found = [each for each in server.pages("keys", 1000, prefix=prefix) if not each["revoked_at"]]
    if not found:
        raise client.CtlError(f"No live key begins with {prefix}. See them: llmgw ctl keys list")
    if len(found) > 1:
        names = ", ".join(f"{each['prefix']} {each['name']} ({each['id']})" for each in found[:10])
        raise client.CtlError(f"{prefix} could be {names}; give its number.", client.UNASKED)
    return int(found[0]["id"])


def _aside(text: str) -> None:
    """For the person, beside what a script reads."""
    typer.echo(ctl_show.one_line(text), err=True)
