"""Join tokens in the open are said, at start and in the summary; on a trusted network they are not."""

from __future__ import annotations

import pytest
from django.conf import settings

from llmgw import config
from llmgw.ops.serve import exposed_to
from nodes.exposure import exposed
from nodes.snapshot import current_summary

TRUSTED = ("127.0.0.1", "::1", "localhost", "10.0.0.5", "192.168.1.2", "fd00::1", "fe80::1")
OPEN = ("0.0.0.0", "::", "", "8.8.8.8", "2606:4700::1", "gateway.example.org")


@pytest.mark.parametrize("host", TRUSTED)
def test_nothing_is_said_of_a_trusted_network(host: str) -> None:
    assert exposed(host, 8080, join_tokens=True) == ""


@pytest.mark.parametrize("host", OPEN)
def test_tokens_in_the_open_are_said_with_what_to_do(host: str) -> None:
    text = exposed(host, 8080, join_tokens=True)
    assert "8080" in text
    assert "Use certificates (llmgw server ca) and set agents.join_tokens to false" in text
    assert exposed(host, 8080, join_tokens=False) == ""


@pytest.mark.django_db
def test_the_start_and_the_summary_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [alert for alert in current_summary().alerts if alert.subject == "agents"]
    public = settings.LLMGW.model_copy(update={"listen": config.Listen(host="0.0.0.0")})
    monkeypatch.setattr(settings, "LLMGW", public)
    [alert] = [alert for alert in current_summary().alerts if alert.subject == "agents"]
    assert (alert.state, alert.text) == ("warn", exposed_to(public))
    certified = public.model_copy(update={"agents": config.Agents(port=8444, join_tokens=False)})
    monkeypatch.setattr(settings, "LLMGW", certified)
    assert (current_summary().alerts, exposed_to(certified)) == ((), "")
