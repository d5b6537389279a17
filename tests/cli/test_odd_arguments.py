"""Arguments that nobody means, and names that come from machines: a sentence and an exit code, one line a record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.utils import timezone

from llmgw.cli import ctl_show
from nodes.models import Event
from tenants.models import Key
from tests import factories
from tests.cli.conftest import Ctl

ODD = (
    "",
    " ",
    ".",
    "..",
    "../../summary",
    "a/b",
    "?x=1",
    "#",
    "%2e%2e",
    "\x1b[2J",
    "\u202eevil",
    "a\nb",
    "ä",
    "9" * 30,
)
COMMANDS = (
    ("why",),
    ("ctl", "cordon"),
    ("ctl", "uncordon"),
    ("ctl", "drain"),
    ("ctl", "remove"),
    ("ctl", "node-token", "--renew"),
    ("ctl", "keys", "revoke"),
    ("ctl", "models", "rollback"),
    ("ctl", "models", "scale"),
    ("ctl", "budgets", "remove"),
    ("ctl", "prices", "remove"),
)
HOSTILE = "n\x1b]0;owned\x07\x1b[31m\u202e\u2066x\r\nready  ok\x00[bold]b[/bold]:smile:" + "w" * 500


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_argument_does_anything_to_what_it_does_not_name(llmgw: Ctl, command: tuple[str, ...]) -> None:
    node = factories.make_node("box")
    key, _ = factories.make_key()
    for odd in ODD:
        result = llmgw(*command, odd)
        assert isinstance(result.exception, SystemExit), (odd, result.exception)
        assert result.exit_code in (1, 2), (odd, result.output)
        assert "Traceback" not in result.output
        assert "\x1b[2J" not in result.output
        assert "\u202e" not in result.output
    node.refresh_from_db()
    key.refresh_from_db()
    assert (node.cordoned_at, node.draining_at, key.revoked_at) == (None, None, None)


@pytest.mark.parametrize("beginning", ["", "s", "sk-"])
def test_less_than_a_prefix_revokes_no_key_even_if_there_is_one_only(llmgw: Ctl, beginning: str) -> None:
    factories.make_key()
    result = llmgw("ctl", "keys", "revoke", beginning)
    assert result.exit_code == 2
    assert "is no prefix of a key" in result.output
    assert not Key.objects.exclude(revoked_at=None).exists()


@pytest.mark.parametrize("lang", ["C", "C.UTF-8", "de_DE.ISO-8859-1"])
@pytest.mark.django_db(transaction=True)
def test_a_pipe_gets_one_line_a_record_whatever_machines_are_called(token_file: Path, lang: str) -> None:
    Event.objects.create(at=timezone.now(), kind="refused", text=HOSTILE, node="x")
    Event.objects.create(at=timezone.now(), kind="lead", text="the next one", node="x")
    done = subprocess.run(
        [sys.executable, "-m", "llmgw", "ctl", "events"],
        env={**os.environ, "LLMGW_TOKEN_FILE": str(token_file), "LANG": lang, "LC_ALL": lang, "PYTHONUTF8": "0"},
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.decode("utf-8", "replace").splitlines()
    assert header.split() == ["at", "what", "text"]
    assert len(lines) == 2
    assert "[bold]b[/bold]:smile:" in lines[1]
    assert not [letter for letter in done.stdout if letter < 32 and letter != 10]
    assert "\u202e" not in done.stdout.decode("utf-8", "replace")


def test_a_secret_is_printed_as_letters_whatever_a_server_sends(capsys: pytest.CaptureFixture[str]) -> None:
    ctl_show.secret("at-\x1b[2Jx\n\u202e")
    assert capsys.readouterr().out == "at- [2Jx  \n"


@pytest.mark.parametrize("name", ["status", "keys", "models"])
def test_who_leaves_ctl_out_is_told_the_whole_command(llmgw: Ctl, name: str) -> None:
    result = llmgw(name, "--json")
    assert result.exit_code == 2
    assert f"No such command '{name}'. Did you mean: llmgw ctl {name}" in result.output
