"""What `llmgw up` says while it starts and when it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmgw.config import Listen, Settings
from llmgw.ops import announce, prepare
from tests.e2e.product import clean_environment


def summary(*models: dict[str, Any], node: str = "ready", replicas: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    usual = {"ready": 0, "note": "", "why_not": [], "next_try_at": None}
    nodes = [{"name": "local", "state": node}]
    return {"nodes": nodes, "models": [usual | model for model in models], "replicas": list(replicas)}


def replica(node: str, state: str, note: str = "") -> dict[str, Any]:
    return {"model": "m", "node": node, "state": state, "note": note}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (summary(), "the catalog holds no model"),
        (summary({"name": "m", "state": "off"}), "the catalog keeps no model up"),
        (summary({"name": "m", "state": "on demand"}), "the catalog keeps no model up"),
        (summary({"name": "m", "state": "failed", "note": "it is no GGUF."}), "m does not start: it is no GGUF."),
        (
            summary({"name": "m", "state": "cannot run", "why_not": ["local: has 0 cores"]}),
            "m finds no place: local: has 0 cores",
        ),
    ],
)
def test_a_start_that_nothing_will_finish_is_explained(found: dict[str, Any], says: str) -> None:
    assert announce.stuck(found) == says


@pytest.mark.parametrize(
    "found",
    [
        {},
        summary(node="joining"),
        summary({"name": "m", "state": "failed"}, {"name": "n", "state": "loading"}),
        summary({"name": "m", "state": "off"}, {"name": "n", "state": "external"}),
    ],
)
def test_a_start_that_is_under_way_or_not_known_yet_is_not_called_stuck(found: dict[str, Any]) -> None:
    assert announce.stuck(found) is None


def test_only_what_the_local_agent_does_not_say_itself_is_said() -> None:
    replicas = (replica("local", "loading"), replica("far", "loading"), replica("local", "fetching", "2 of 4 GB"))
    assert announce.news(summary(replicas=replicas), "local") == [
        "m on far: loading",
        "m on local: fetching, 2 of 4 GB",
    ]


def test_the_next_try_is_said_with_its_time() -> None:
    found = summary({"name": "m", "state": "failed", "next_try_at": "2026-11-29T19:03:13Z"})
    (line,) = announce.news(found, "local")
    assert line.startswith("m is tried again at ")
    assert line.endswith(":03:13")


def first(**given: str | None) -> prepare.First:
    return prepare.First(**({"admin": "admin", "password": None, "project_key": None, "sign_in_path": None} | given))  # type: ignore[arg-type]


def test_a_key_is_forgotten_once_it_was_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(data_dir=tmp_path)
    settings.secrets_dir.mkdir()
    kept = settings.secrets_dir / prepare.FIRST_KEY_FILE
    kept.write_text("sk-x")
    announce.tell(settings, first(), model="other")
    assert kept.exists()
    announce.tell(settings, first(project_key="sk-x"), why_not="the catalog holds no model")
    assert not kept.exists()
    ready, sign_in, _, nothing, _, key = capsys.readouterr().out.splitlines()
    assert "(model other)" in ready
    assert sign_in.endswith("/sign-in/ as admin")
    assert nothing.endswith("yet: the catalog holds no model.")
    assert "OPENAI_API_KEY=sk-x" in key


@pytest.mark.parametrize("password", [None, "p"])
def test_a_password_is_named_only_where_its_file_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], password: str | None
) -> None:
    announce.tell(Settings(data_dir=tmp_path), first(sign_in_path="/first/x/", password=password))
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("Sign in first: ")
    assert (prepare.PASSWORD_FILE in line) == bool(password)


def test_who_can_come_in_is_said_unless_nobody_else_can() -> None:
    assert announce.reachable(Settings()) == ""
    everywhere = announce.reachable(Settings(listen=Listen(host="0.0.0.0", port=9000)))
    assert "every address of this machine" in everywhere
    assert "listen.public_url" in everywhere
    assert "public_url" not in announce.reachable(Settings(listen=Listen(host="10.0.0.7")))


def test_a_command_to_type_is_one_that_the_shell_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert announce.command(".venv/bin/llmgw") == ".venv/bin/llmgw"
    assert announce.command("/usr/lib/llmgw/__main__.py") == "llmgw"
    program = tmp_path / "llmgw"
    program.write_text("")
    program.chmod(0o755)
    assert announce.command(str(program)) == "llmgw"
    assert announce.command(str(tmp_path / "a b" / "llmgw")) == f"'{tmp_path / 'a b' / 'llmgw'}'"


def test_the_first_key_outlives_a_start_that_was_broken_off(tmp_path: Path) -> None:
    code = "from llmgw.ops import prepare\nprint(prepare.everything('local', scripted=False).project_key)"

    def prepared() -> str:
        environment = {**clean_environment(), "LLMGW_DATA_DIR": str(tmp_path)}
        return subprocess.check_output([sys.executable, "-c", code], text=True, timeout=110, env=environment).strip()

    key = prepared()
    assert key.startswith("sk-")
    assert prepared() == key
    (tmp_path / "secrets" / prepare.FIRST_KEY_FILE).unlink()
    assert prepared() == "None"
