"""Documents name only files that are there and commands that exist; so do the product's own messages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from llmgw.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(
    path
    for room in ("llmgw", "tenants", "catalog", "nodes", "routing", "agent", "templates")
    for pattern in ("*.py", "*.html", "*.sh")
    for path in (ROOT / room).rglob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LLMGW = typer.main.get_command(app)
COMMAND = re.compile(r"(?<![\w./-])llmgw ((?:[a-z][a-z-]*)(?: [^`\"'\n<>;|&)]+)?)")
# What follows the product's name on a command line (spec "Command line"); anything else is prose.
FIRST_WORDS = {
    "up",
    "server",
    "agent",
    "doctor",
    "join",
    "node",
    "mirror",
    "upgrade",
    "release",
    "ctl",
    "why",
    "version",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings], target


def commands(text: str) -> list[str]:
    found = [match.strip() for match in COMMAND.findall(text)]
    return [command for command in found if command.split()[0] in FIRST_WORDS]


def test_every_command_that_is_named_exists_with_its_options() -> None:
    named = [(file, text) for file in (*DOCUMENTS, *SOURCES) for text in commands(file.read_text())]
    assert named
    assert [f"{file.relative_to(ROOT)}: llmgw {text}: {why}" for file, text in named if (why := objection(text))] == []


def objection(text: str) -> str:
    """Why this command line is none of llmgw's; empty when it is."""
    command: Any = LLMGW
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    depth = 0
    for word in words:
        if hasattr(command, "commands"):
            if word in command.commands:
                command = command.commands[word]
                depth += 1
                continue
            if word.startswith("-") or not re.fullmatch(r"[a-z-]+[.,:]?", word):
                return ""
            word = word.rstrip(".,:")
            if word in command.commands:
                return ""
            return f"{command.name} has no {word}"
        if word.startswith("--"):
            option = word.rstrip(".,:)").partition("=")[0]
            known = [name for parameter in command.params for name in parameter.opts] + ["--help"]
            if option not in known:
                return f"{command.name} takes no {option}"
    if hasattr(command, "commands"):
        return ""
    names = {parameter.name for parameter in command.params if parameter.param_type_name == "argument"}
    return "" if names or len(words) <= depth or words[depth][0] in "-(" else f"{command.name} takes no {words[depth]}"


def test_a_wrong_command_would_be_found() -> None:
    assert objection("ctl stauts") == "ctl has no stauts"
    assert objection("ctl nodes add") == "nodes takes no add"
    assert objection("up --prot 1") == "up takes no --prot"
    assert objection("up --port 9000") == ""
    assert objection("server run gateway") == ""


def test_pages_and_messages_name_only_documents_that_are_there() -> None:
    named = [(path, name) for path in SOURCES for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|yaml)", path.read_text())]
    assert named
    assert [(str(path), name) for path, name in named if not (ROOT / name).exists()] == []
