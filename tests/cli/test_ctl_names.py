"""Which requests `llmgw ctl` finds by other names than models have, and what it remarks."""

from __future__ import annotations

import json

from tests import factories
from tests.api.cast import make_usage
from tests.cli.conftest import Ctl


def test_requests_are_found_by_an_alias_and_usage_says_whose_it_is(llmgw: Ctl) -> None:
    factories.make_model("big", aliases=["chat"])
    assert llmgw("ctl", "requests", "--model", "chat").stderr == ""
    make_usage(factories.make_project("Apps"), request_id="r1", model="big")
    found = llmgw("ctl", "requests", "--model", "chat", "--json")
    assert ([row["request_id"] for row in json.loads(found.stdout)], found.stderr) == (["r1"], "")
    usage = llmgw("ctl", "usage", "--model", "chat", "--json")
    assert (json.loads(usage.stdout)["latest"], usage.exit_code) == ([], 0)
    assert usage.stderr == "chat is an alias of big, and only the model's own name counts here. Name big.\n"


def test_a_name_that_finds_nothing_and_is_no_models_is_remarked_on(llmgw: Ctl) -> None:
    factories.make_model("smollm2")
    make_usage(factories.make_project("Apps"), request_id="r1", model="gone")
    none = llmgw("ctl", "requests", "--model", "smolm2")
    assert (none.exit_code, none.stdout) == (0, "No requests.\n")
    assert none.stderr.startswith("The catalog has no model or alias smolm2. Did you mean smollm2? Requests that")
    old = llmgw("ctl", "requests", "--model", "gone")
    assert ("r1" in old.stdout, old.stderr) == (True, "")
