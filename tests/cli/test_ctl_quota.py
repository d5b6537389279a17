"""`llmgw ctl quota` against a real server on a real port."""

from __future__ import annotations

import json

from tenants.models import AuditEntry, CapacityQuota
from tests import factories
from tests.cli.conftest import Ctl


def test_a_quota_is_set_listed_and_lifted(llmgw: Ctl) -> None:
    team = factories.make_team("Red Team")
    team.slug = "red"
    team.save()
    assert "llmgw ctl quota set TEAM h100-80g 8" in llmgw("ctl", "quota", "list").stdout
    done = llmgw("ctl", "quota", "set", "red", "h100-80g", "8")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split()[:4] == ["red", "h100-80g", "0", "8"]
    listed = json.loads(llmgw("ctl", "quota", "list", "--team", "Red Team", "--json").stdout)
    assert [(each["team_name"], each["cards"]) for each in listed] == [("Red Team", 8)]
    lifted = llmgw("ctl", "quota", "set", str(team.pk), "h100-80g", "none")
    assert "not limited" in lifted.stdout
    assert not CapacityQuota.objects.exists()
    told = AuditEntry.objects.filter(action="set capacity quota")
    assert [(entry.via, entry.target) for entry in told] == [("cli", "team Red Team")] * 2


def test_what_is_no_quota_is_said_in_words(llmgw: Ctl) -> None:
    factories.make_team("red")
    assert "is no number and not none" in llmgw("ctl", "quota", "set", "red", "h100-80g", "many").stderr
    assert "There is no team blue" in llmgw("ctl", "quota", "set", "blue", "h100-80g", "8").stderr
    assert "is not a class such as h100-80g" in llmgw("ctl", "quota", "set", "red", "H100", "8").stderr
    assert not CapacityQuota.objects.exists()
