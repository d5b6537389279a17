"""`llmgw doctor`: which control plane it looks for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmgw.cli.main import app


@pytest.fixture
def serving() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def write(path: Path, address: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"control_plane": [address], "work_dir": str(path.parent)}))
    return path


@pytest.mark.parametrize("named", [True, False])
def test_where_llmgw_up_runs_its_own_address_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: str, named: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / ("state" if named else "data") / "agent.yaml", serving)
    if named:
        monkeypatch.setenv("LLMGW_DATA_DIR", str(tmp_path / "state"))
    else:
        monkeypatch.delenv("LLMGW_DATA_DIR", raising=False)
    assert f"{serving} answers" in CliRunner().invoke(app, ["doctor"]).output


def test_a_config_that_is_named_comes_before_that_of_llmgw_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: str
) -> None:
    monkeypatch.setenv("LLMGW_DATA_DIR", str(tmp_path / "state"))
    write(tmp_path / "state" / "agent.yaml", "http://127.0.0.1:1")
    own = write(tmp_path / "agent.yaml", serving)
    assert f"{serving} answers" in CliRunner().invoke(app, ["doctor", "--config", str(own)]).output


def test_elsewhere_it_is_looked_for_at_the_default_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_DATA_DIR", str(tmp_path))
    assert "http://127.0.0.1:8080 " in CliRunner().invoke(app, ["doctor"]).output
