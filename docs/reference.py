"""Write docs/reference/*.md from the code that they describe; `--check` only says whether they are current.

Finds the tree from its own path, so it runs from any directory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "reference"
MADE = "<!-- Written by docs/reference.py; change the code and run `make docs`. -->\n\n"
sys.path.insert(0, str(ROOT))


def settings_page(title: str, tree: type[BaseModel], prefix: str, intro: str) -> str:
    lines = [f"# {title}\n", MADE + intro, "", "| setting | environment | default | meaning |", "|---|---|---|---|"]
    for path, field in _fields(tree):
        default = field.get_default(call_default_factory=True) if field.default is not PydanticUndefined else None
        shown = "required" if field.is_required() else _shown(default)
        variable = f"`{prefix}{'__'.join(path).upper()}`" if not any("[]" in part for part in path) else "in the list"
        meaning = (field.description or "").replace("\n", " ")
        lines.append(f"| `{'.'.join(path)}` | {variable} | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def _fields(tree: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in tree.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, (*above, name))
            continue
        yield (*above, name), field
        each = next(iter(get_args(inner)), None) if get_origin(inner) is list else None
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield from _fields(each, (*above, f"{name}[]"))


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if value in ([], (), {}, ""):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def cli_page() -> str:
    import typer.main

    from llmgw.cli.main import app

    lines = ["# Command line\n", MADE + "Every command takes `--help`."]

    def walk(command: Any, name: str) -> None:
        context = command.context_class(command, info_name=name)
        inner = getattr(command, "commands", {})
        usage = " ".join(command.collect_usage_pieces(context)).replace("[OPTIONS] ", "").replace("[OPTIONS]", "")
        lines.append(f"\n## `{name}{' ' + usage if usage else ''}`\n\n{(command.help or '').strip()}")
        options = [parameter.get_help_record(context) for parameter in command.params]
        rows = [record for record in options if record and record[0] not in ("--help", "-h, --help")]
        if rows and not inner:
            lines.append("\n| option | meaning |\n|---|---|")
            lines.extend(f"| `{left.replace('|', chr(92) + '|')}` | {right} |" for left, right in rows)
        for sub in sorted(inner):
            walk(inner[sub], f"{name} {sub}")

    walk(typer.main.get_command(app), "llmgw")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    from llmgw.core.metrics import REGISTRY

    lines = ["# Metrics\n", MADE + "Served at `/metrics` of every gateway and web process.", ""]
    lines += ["| metric | kind | meaning |", "|---|---|---|"]
    for family in sorted(REGISTRY.collect(), key=lambda family: family.name):
        if family.name.startswith("llmgw_"):
            suffix = "_total" if family.type == "counter" else ""
            lines.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def protocol_page() -> str:
    import inspect

    import msgspec

    from agent import protocol

    intro = (
        f"JSON messages over one websocket at `{protocol.PATH}`, version {protocol.VERSION}, tagged by `type`; at most "
        f"{protocol.MAX_MESSAGE_BYTES:,} bytes each. Sizes are bytes, durations seconds; what is absent is unknown."
    )
    lines = ["# Agent protocol\n", MADE + intro]
    for name, message in inspect.getmembers(protocol, inspect.isclass):
        if not issubclass(message, protocol.Struct) or message is protocol.Struct:
            continue
        tag = message.__struct_config__.tag
        lines.append(f"\n## {name}{f' (`{tag}`)' if tag else ''}\n")
        if message.__doc__:
            lines.append(f"{' '.join(message.__doc__.split())}\n")
        lines += ["| field | kind | default |", "|---|---|---|"]
        for field in msgspec.structs.fields(message):
            kind = str(message.__annotations__[field.name]).replace("|", "\\|")
            given = field.default if field.default is not msgspec.NODEFAULT else msgspec.NODEFAULT
            if given is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                given = field.default_factory()
            shown = "required" if given is msgspec.NODEFAULT else _shown(given)
            lines.append(f"| `{field.encode_name}` | {kind} | {shown} |")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    from drf_spectacular.generators import SchemaGenerator

    schema = SchemaGenerator().get_schema(public=True)
    intro = (
        "The REST API; `/api/docs/` on a running control plane has every shape, `/api/schema/` the OpenAPI document."
    )
    lines = ["# API\n", MADE + intro, "", "| method | path | does |", "|---|---|---|"]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            does = (operation.get("summary") or operation.get("description") or "").strip().splitlines()
            lines.append(f"| {method.upper()} | `{path}` | {does[0] if does else ''} |")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("LLMGW_DATA_DIR", scratch)
        from llmgw.ops.prepare import django_setup

        django_setup()
        import nodes.gauges  # noqa: F401
        import routing.asgi  # noqa: F401 - every collector is defined once it is imported
        from agent.config import AgentSettings
        from llmgw.config import Settings

        server = (
            "Settings of the control plane: `server.yaml` (named by `--config` or `LLMGW_CONFIG`), then environment."
        )
        agent = "Settings of a node's agent: `agent.yaml` (named by `--config`), then environment."
        return {
            "settings.md": settings_page("server.yaml", Settings, "LLMGW_", server),
            "agent-settings.md": settings_page("agent.yaml", AgentSettings, "LLMGW_AGENT_", agent),
            "cli.md": cli_page(),
            "metrics.md": metrics_page(),
            "agent-protocol.md": protocol_page(),
            "api.md": api_page(),
        }


def stale() -> list[str]:
    """Names of pages that are not what the code says now."""
    return [
        name
        for name, text in pages().items()
        if not (TARGET / name).exists() or (TARGET / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        old = stale()
        if old:
            print(f"docs/reference is out of date ({', '.join(old)}). Run: make docs", file=sys.stderr)
        return 1 if old else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (TARGET / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
