"""`llmgw ctl limits`, `budgets` and `prices` against a real server on a real port."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pytest_django.live_server_helper import LiveServer

from tenants import actions, rollup
from tenants.audit import SYSTEM
from tenants.models import AuditEntry, Budget, Key, Organisation, Price, Project
from tests import factories
from tests.cli.conftest import Ctl
from tests.tenants.test_rollup import of


@pytest.fixture
def key(transactional_db: None) -> Key:
    return factories.make_key(project=factories.make_project("bot"), name="production")[0]


def test_limits_are_set_shown_and_lifted(llmgw: Ctl, key: Key) -> None:
    Organisation.objects.update(requests_per_minute=50)
    words = ("--requests-per-minute", "60", "--max-concurrent", "4", "--band", "low", "--model", "a", "--model", "b")
    done = llmgw("ctl", "limits", "set", "project", "bot", *words)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["requests", "per", "minute", "50", "organisation", "Default"] in lines
    assert ["tokens", "per", "minute", "–"] in lines
    assert ["max", "concurrent", "4", "set", "here"] in lines
    assert ["models", "a,", "b", "set", "here"] in lines
    shown = json.loads(llmgw("ctl", "limits", "show", "key", key.prefix, "--json").stdout)
    assert shown["effective"]["max_concurrent"] == {
        "value": 4,
        "of": {"subject": "project", "id": key.project_id, "name": "bot"},
    }
    lifted = ("--requests-per-minute", "none", "--band", "none", "--model", "none")
    assert llmgw("ctl", "limits", "set", "project", str(key.project_id), *lifted).exit_code == 0
    row = Project.objects.get()
    assert (row.requests_per_minute, row.max_concurrent, row.band, row.models_allowed) == (None, 4, "", [])
    assert {entry.via for entry in AuditEntry.objects.filter(action="set limits")} == {"cli"}


def test_what_cannot_be_set_is_said_in_words(llmgw: Ctl, key: Key) -> None:
    assert "Name a limit to set" in llmgw("ctl", "limits", "set", "project", "bot").stderr
    assert "is no number" in llmgw("ctl", "limits", "set", "project", "bot", "--max-concurrent", "x").stderr
    assert "There is no team nobody" in llmgw("ctl", "limits", "show", "team", "nobody").stderr
    secret = "sk-" + "x" * 43
    answer = llmgw("ctl", "limits", "show", "key", secret)
    assert "There is no key sk-xxxx that" in answer.stderr
    assert secret[:12] not in answer.output
    factories.make_project("bot")
    assert "give its number" in llmgw("ctl", "limits", "show", "project", "bot").stderr


def test_a_budget_is_made_changed_and_removed(llmgw: Ctl, key: Key) -> None:
    assert "llmgw ctl budgets set project NAME" in llmgw("ctl", "budgets", "list").stdout
    done = llmgw("ctl", "budgets", "set", "project", "bot", "--amount", "12.50")
    assert done.exit_code == 0, done.output
    assert "it counts nothing" in done.stdout
    rollup.add([of(key, at=Budget.objects.get().made_at.timestamp(), cost=10**8)])
    changed = llmgw("ctl", "budgets", "set", "project", "bot", "--amount", "20", "--warn", "--json")
    (budget,) = json.loads(llmgw("ctl", "budgets", "list", "--json").stdout)
    assert json.loads(changed.stdout) == budget
    assert (budget["amount"], budget["used"], budget["stops"], budget["period"]) == ("20", "1", False, "month")
    llmgw("ctl", "budgets", "set", "key", "production", "--amount", "5", "--unit", "tokens", "--period", "total")
    assert Budget.objects.count() == 2
    Budget.objects.create(project=key.project, unit="money", amount=1, period="month")
    assert "several such budgets" in llmgw("ctl", "budgets", "set", "project", "bot", "--amount", "5").stderr
    for row in Budget.objects.all():
        assert f"Budget {row.pk} is removed." in llmgw("ctl", "budgets", "remove", str(row.pk)).stdout
    assert "There is no budget 99. See them: llmgw ctl budgets list" in llmgw("ctl", "budgets", "remove", "99").stderr
    assert (
        "Tokens are whole"
        in llmgw("ctl", "budgets", "set", "project", "bot", "--amount", "1.5", "--unit", "tokens").stderr
    )


def test_prices_are_set_listed_and_removed(llmgw: Ctl, key: Key) -> None:
    assert "no budget of money counts anything" in llmgw("ctl", "prices", "list").stdout
    words = ("--input", "0.15", "--output", "0.6", "--cached-input", "0.05", "--from", "2026-11-01T00:00:00Z")
    done = llmgw("ctl", "prices", "set", "m", *words)
    assert done.exit_code == 0, done.output
    row = Price.objects.get()
    assert (row.input, row.cached_input, row.output) == (15_000_000, 5_000_000, 60_000_000)
    (price,) = json.loads(llmgw("ctl", "prices", "list", "--model", "m", "--json").stdout)
    assert (price["input"], price["valid_from"]) == ("0.15", "2026-11-01T00:00:00+00:00")
    assert "2026-11-01T00:00" in llmgw("ctl", "prices", "list").stdout
    assert f"Price {row.pk} is removed." in llmgw("ctl", "prices", "remove", str(row.pk)).stdout


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--input", "x", "is no amount of money. Write one such as 0.15"),
        ("--output", "NaN", "is no amount of money"),
        ("--cached-input", "0,15", "is no amount of money"),
        ("--from", "soon", "is no time. Write one such as 2027-01-31T00:00:00Z."),
    ],
)
def test_a_price_that_is_none_is_told_with_its_option_and_an_example(
    llmgw: Ctl, key: Key, option: str, text: str, said: str
) -> None:
    options = {"--input": "0.15", "--output": "0.6", option: text}
    done = llmgw("ctl", "prices", "set", "m", *(word for pair in options.items() for word in pair))
    assert done.exit_code == 2
    told = " ".join(done.stderr.replace("│", " ").split())
    assert f"Invalid value for {option}: {text!r} {said}" in told
    assert not Price.objects.exists()


def test_names_that_the_catalog_lacks_are_taken_and_remarked_on(llmgw: Ctl, key: Key) -> None:
    factories.make_model("smollm2", aliases=["chat"], adapters=[{"name": "french", "source": "/fr"}])

    def said(*words: str) -> str:
        done = llmgw("ctl", *words)
        assert done.exit_code == 0, done.output
        return done.stderr

    price = ("--input", "1", "--output", "2")
    typo = "The catalog has no model smolm2. Did you mean smollm2? The price counts once a model has that name.\n"
    assert said("prices", "set", "smolm2", *price) == typo
    alias = "chat is an alias of smollm2, and only the model's own name counts here. Name smollm2.\n"
    assert said("prices", "set", "chat", *price) == alias
    assert "french is an adapter of smollm2" in said("prices", "set", "french", *price)
    assert said("prices", "set", "smollm2", *price) == ""
    assert Price.objects.count() == 4
    names = ("--model", "smollm2", "--model", "french", "--model", "other", "--model", "chat")
    told = "The catalog has no model or adapter other. {} once there is one.\n" + alias
    assert said("limits", "set", "project", "bot", *names) == told.format("It is allowed")
    assert said("keys", "make", "mine", "--project", "bot", *names).endswith(told.format("The key may use it"))
    assert said("limits", "set", "project", "bot", "--model", "none") == ""
    assert Key.objects.get(name="mine").models_allowed == ["smollm2", "french", "other", "chat"]


def test_who_may_not_see_the_catalog_is_told_nothing_of_it(
    llmgw: Ctl, live_server: LiveServer, tmp_path: Path, key: Key
) -> None:
    factories.make_model("secret")
    alice = factories.make_user("alice")
    factories.make_project("hers", team=factories.make_team(owner=alice))
    _, token = actions.make_api_token(user=alice, name="ctl", scopes=["read", "write"], actor=SYSTEM)
    (tmp_path / "hers").write_text(token)
    options = ("--url", live_server.url, "--token-file", str(tmp_path / "hers"))
    done = llmgw("ctl", *options, "keys", "make", "k", "--project", "hers", "--model", "secre")
    assert (done.exit_code, "secret" in done.output, "not shown again" in done.stderr) == (0, False, True)
