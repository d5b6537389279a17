"""The `llmgw` command. Commands import what they need when they run, so that help comes at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agent.errors import ConfigError
from llmgw.cli import ctl, ctl_engines, ctl_fabrics, ctl_limits, ctl_nodes, ctl_quota, ctl_requests, node
from llmgw.cli.ctl_models import model_app
from llmgw.cli.why import why


class _Commands(TyperGroup):
    """Tells whoever left `ctl` out that it belongs there."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and name in getattr(self.commands["ctl"], "commands", {}):
            ctx.fail(f"No such command {name!r}. Did you mean: llmgw ctl {name}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="llmgw",
    cls=_Commands,
    help="Turns your own machines into one private LLM service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich would cost every help page a fifth of a second
    context_settings={"help_option_names": ["-h", "--help"]},
)
server = typer.Typer(help="Run the control plane's processes one by one.", no_args_is_help=True)
app.add_typer(server, name="server")
for command in (ctl_engines.engine_build, ctl_fabrics.fabrics, ctl_requests.usage, ctl_requests.requests):
    ctl.app.command()(command)
for act in ctl_nodes.COMMANDS:
    ctl.app.command()(act)
ctl.app.add_typer(ctl_nodes.certificates_app, name="cert")
app.add_typer(node.app, name="node")
server.command()(node.ca)
for name, group in (
    ("model", model_app),
    ("limits", ctl_limits.limits_app),
    ("budgets", ctl_limits.budgets_app),
    ("prices", ctl_limits.prices_app),
    ("quota", ctl_quota.quota_app),
):
    ctl.app.add_typer(group, name=name)
app.add_typer(ctl.app, name="ctl")
app.command()(why)

Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="server.yaml; everything has a default.")]

AgentConfig = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="agent.yaml")]


@app.command()
def up(
    data: Annotated[Path | None, typer.Option(help="Directory that keeps all state. Default: ./data")] = None,
    port: Annotated[int | None, typer.Option(help="Port for pages and API. Default: 8080")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1")] = None,
    bootstrap_file: Annotated[
        Path | None, typer.Option(help="Write addresses, first credentials and pids here (0600) once serving.")
    ] = None,
    config: Config = None,
) -> None:
    """Run everything one machine needs: pages, API, worker, local agent and a small model. Ctrl-C stops it all."""
    from llmgw.ops import up as ops

    options = {"LLMGW_DATA_DIR": data, "LLMGW_LISTEN__PORT": port, "LLMGW_LISTEN__HOST": host, "LLMGW_CONFIG": config}
    raise typer.Exit(ops.up({name: str(value) for name, value in options.items() if value is not None}, bootstrap_file))


@server.command()
def migrate(config: Config = None) -> None:
    """Bring the store up to date; on an empty one also make the first administrator, project, key and catalog."""
    from llmgw.ops import prepare

    raise typer.Exit(prepare.migrate(config))


@server.command()
def run(
    role: Annotated[str, typer.Argument(help="serve (gateway and web), gateway, web, agents, worker or beat")],
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Overrides listen.host (agents: agents.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides listen.port (agents: agents.port).")] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="How many processes share the port.")] = 1,
) -> None:
    """Run one of the control plane's processes in the foreground."""
    from llmgw.ops import serve

    raise typer.Exit(serve.run(role, config=config, host=host, port=port, processes=processes))


@app.command()
def agent(
    action: Annotated[str, typer.Argument(help="run, or inventory: print what the scheduler would see")] = "run",
    config: AgentConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable inventory.")] = False,
) -> None:
    """Run this machine's node agent."""
    os.environ.setdefault("LLMGW_PROCESS", "agent")  # before its log, which tells what writes
    from agent import main as node

    match action:
        case "run":
            arguments = []
        case "inventory":
            arguments = ["--inventory", "json" if as_json else "text"]
        case _:
            raise typer.BadParameter(f"there is no {action!r}; known: run, inventory")
    raise typer.Exit(node.main([*arguments, *(["--config", str(config)] if config else [])]))


@app.command()
def doctor(config: AgentConfig = None) -> None:
    """Check this machine before it joins, and say what to fix.

    Without --config as the node of the `llmgw up` that keeps its state in LLMGW_DATA_DIR or ./data, if there is one.
    """
    from agent import main as node

    own = Path(os.environ.get("LLMGW_DATA_DIR") or "data").expanduser() / "agent.yaml"
    if config is None and os.access(own, os.R_OK):
        config = own
    raise typer.Exit(node.main(["--doctor", *(["--config", str(config)] if config else [])]))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("llmgw"))


def main() -> None:
    """Entry point. A person's mistake ends in one sentence and exit code 2, never in a traceback."""
    try:
        app()
    except ConfigError as error:
        print(f"llmgw: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
