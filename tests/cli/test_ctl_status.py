"""What `llmgw ctl status` says of use: what is in flight, and what projects spent today."""

from __future__ import annotations

from django.utils import timezone

from nodes.models import ReplicaLoad
from tenants import rollup
from tests import factories
from tests.cli.conftest import Ctl
from tests.tenants.test_rollup import of


def spent() -> None:
    evals = factories.make_project("evals", team=factories.make_team("Research"))
    priced, free = factories.make_key(project=evals)[0], factories.make_key(project=factories.make_project("bot"))[0]
    now = timezone.now().timestamp()
    rollup.add([of(priced, at=now, cost=1_234_500_000), of(priced, at=now, cost=None), of(free, at=now, cost=None)])


def lines(llmgw: Ctl) -> list[str]:
    return [" ".join(line.split()) for line in llmgw("ctl", "status").stdout.splitlines()]


def test_status_says_what_projects_spent_today_and_what_had_no_price(llmgw: Ctl) -> None:
    spent()
    said = lines(llmgw)
    assert "Research / evals 2 0 20 10 12.345 EUR, 1 without a price" in said
    assert [line for line in said if line.endswith("/ bot 1 0 10 5 no price")]
    assert said[-1].endswith("3 requests, 0 failed, 30 tokens read, 15 written, spend: 12.345 EUR, 2 without a price")


def test_status_says_what_is_in_flight_as_far_as_it_is_known(llmgw: Ctl) -> None:
    factories.make_model()
    node = factories.make_node()
    told, _ = factories.make_replica(node=node), factories.make_replica(node=node)
    assert "In flight now: unknown; 2 ready replicas not told of" in lines(llmgw)
    for gateway in ("a", "b"):
        ReplicaLoad.objects.create(gateway=gateway, replica=told.name, in_flight=3, at=timezone.now())
    assert "In flight now: 6; 1 ready replicas not told of" in lines(llmgw)
