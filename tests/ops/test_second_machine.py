"""A second machine's `llmgw up` on one store does not take the first one's node away."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from llmgw import config
from llmgw.ops import prepare
from nodes.models import Node
from tests.factories import make_node

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _data_dir_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "current", lambda: config.Settings(data_dir=tmp_path))


def test_a_node_that_another_machine_speaks_for_keeps_its_token() -> None:
    node = make_node("local")
    with pytest.raises(config.ConfigError, match="another machine is node local of this store"):
        prepare.node_token("local")
    assert Node.objects.get().token_digest == node.token_digest


def test_one_that_nothing_is_heard_of_is_taken_over(tmp_path: Path) -> None:
    node = make_node("local", seen_at=timezone.now() - timedelta(minutes=1))
    prepare.node_token("local")
    assert Node.objects.get().token_digest != node.token_digest
    assert (tmp_path / "secrets" / "node-local").stat().st_mode & 0o777 == 0o600


def test_its_own_token_goes_on_while_its_agent_speaks() -> None:
    prepare.node_token("local")
    Node.objects.update(last_seen_at=timezone.now())
    before = Node.objects.get().token_digest
    prepare.node_token("local")
    assert Node.objects.get().token_digest == before
