"""The command line against a real server on a real port, with the token of an operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pytest_django.live_server_helper import LiveServer
from typer.testing import CliRunner

from llmgw.cli.main import app
from tenants import actions
from tenants.audit import SYSTEM
from tenants.models import User
from tests import factories

Ctl = Callable[..., Result]


@pytest.fixture
def root(transactional_db: None) -> User:
    return factories.make_user("root", is_superuser=True)


@pytest.fixture
def token_file(root: User, tmp_path: Path, live_server: LiveServer) -> Path:
    _, secret = actions.make_api_token(user=root, name="ctl", scopes=["read", "write"], actor=SYSTEM)
    path = tmp_path / "ctl.json"
    path.write_text(json.dumps({"url": live_server.url, "token": secret}))
    return path


@pytest.fixture
def llmgw(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    monkeypatch.setenv("LLMGW_TOKEN_FILE", str(token_file))

    def run(*words: str, input: str | None = None) -> Result:
        return CliRunner().invoke(app, words, input=input)

    return run
