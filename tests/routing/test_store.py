"""The gateway's edge to the database, and the whole of it as a process of its own."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.db.models import Sum
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from catalog.models import Model
from llmgw.core.models import Revision
from llmgw.core.store_clock import STORE_CLOCK
from nodes.models import ModelStatus, Node, NodeState, Replica, ReplicaLoad, Shard
from routing.store import AT_ONCE, DjangoStore, LoadRow
from routing.table import EMPTY, build
from tenants.actions import make_default_tree, make_key, make_operator, revoke_key
from tenants.audit import SYSTEM
from tenants.keys import digest
from tenants.limit_models import UsageSlot
from tenants.models import Key, Project, Usage, User
from tests.routing.test_journal import record

pytestmark = pytest.mark.django_db


@pytest.fixture
def owner() -> User:
    return make_operator(username="root", password="long enough", actor=SYSTEM)


@pytest.fixture
def project(owner: User) -> Project:
    return make_default_tree(owner=owner, actor=SYSTEM)


def test_the_contents_are_what_the_rows_say_and_change_with_the_revision(project: Project) -> None:
    store = DjangoStore()
    key, secret = make_key(project=project, name="k", actor=SYSTEM)
    Model.objects.create(name="m", aliases=["x"])
    node = Node.objects.create(name="n", state=NodeState.READY, address="10.0.0.1")
    replica = Replica.objects.create(name="m-1", model="m", profile="p", engine="vllm", state="ready", weight=7)
    Shard.objects.create(replica=replica, node=node, port=8000, state="ready")
    before = store.contents()
    table = build(before, EMPTY)
    assert table.grants[digest(secret)].key_id == key.pk
    assert table.names["x"].targets[0].address == ("m-1", "10.0.0.1", 8000)
    assert table.names["x"].targets[0].weight == 7
    revoke_key(key=key, actor=SYSTEM)
    assert store.revision() == Revision.current() > before.revision
    assert store.contents().grants == ()


def test_reading_the_table_costs_a_handful_of_queries_whatever_its_size(project: Project) -> None:
    store = DjangoStore()
    store.contents()
    for number in range(5):
        make_key(project=project, name=str(number), actor=SYSTEM)
        Model.objects.create(name=f"m{number}")
    with CaptureQueriesContext(
        connection,
    ) as seen:
        store.contents()
    assert len(seen) == 12


def test_usage_is_stored_once_however_often_it_is_handed_over(project: Project, owner: User) -> None:
    key, _ = make_key(project=project, name="k", actor=SYSTEM)
    rows = [
        record(number, project=project.pk, key=key.pk, user=owner.pk, prompt_tokens=number, first_token_ms=1.5)
        for number in range(2 * AT_ONCE + 3)
    ]
    store = DjangoStore()
    store.save_usage(rows[:5])
    store.save_usage(rows)
    store.save_usage(rows)
    store.save_usage([])
    assert Usage.objects.count() == len(rows)
    assert UsageSlot.objects.aggregate(Sum("requests"))["requests__sum"] == len(rows)
    row = Usage.objects.get(request_id="req-7")
    assert (row.project, row.key, row.user, row.prompt_tokens) == (project, key, owner, 7)
    assert (row.completion_tokens, row.first_token_ms, row.total_ms, row.cost) == (None, 1.5, 2.0, None)
    assert row.at.timestamp() == 1.5
    assert row.adapter == row.error_code == ""
    assert not row.estimated


@pytest.mark.django_db(transaction=True)
def test_usage_of_somebody_who_is_gone_is_still_counted() -> None:
    owner = make_operator(username="root", password="long enough", actor=SYSTEM)
    project = make_default_tree(owner=owner, actor=SYSTEM)
    DjangoStore().save_usage([record(1, project=project.pk, key=999, user=998), record(2, project=997)])
    first, second = Usage.objects.order_by("request_id")
    assert (first.project, first.key_id, first.user_id) == (project, None, None)
    assert second.project_id is None


def test_a_keys_last_use_is_noted(project: Project) -> None:
    key, _ = make_key(project=project, name="k", actor=SYSTEM)
    DjangoStore().save_key_use({key.pk: 1_000.0, 999: 5.0})
    found = Key.objects.get(pk=key.pk).last_used_at
    assert found is not None
    assert found.timestamp() == 1_000.0


def test_load_rows_are_replaced_forgotten_and_cleared_after_gateways_that_died() -> None:
    store = DjangoStore()
    old = timezone.now() - timedelta(hours=1)
    ReplicaLoad.objects.create(gateway="dead", replica="m-1", at=old)
    store.save_loads("g", [LoadRow("m-1", 1, 2, 3, 0.5), LoadRow("m-2", 0, None, None, None)])
    store.save_loads("g", [LoadRow("m-1", 4, None, 0, None)])
    row = ReplicaLoad.objects.get(gateway="g", replica="m-1")
    assert (row.in_flight, row.running, row.waiting, row.kv_used) == (4, None, 0, None)
    assert ReplicaLoad.objects.count() == 2
    store.forget_loads("g")
    assert not ReplicaLoad.objects.exists()


class Clock:
    def __init__(self, at: datetime) -> None:
        self.at = at

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return 0.0


def test_load_and_demand_are_dated_by_the_stores_clock_whatever_the_hosts_own() -> None:
    at = timezone.now() - timedelta(days=1)
    store = DjangoStore(Clock(at))
    store.save_loads("g", [LoadRow("m-1", 1, 2, 3, 0.5)])
    store.save_demand(["a"], False)
    assert ReplicaLoad.objects.get().at == at
    assert ModelStatus.objects.get(model="a").demand_at == at
    assert DjangoStore().clock is STORE_CLOCK


@pytest.mark.django_db(transaction=True)
def test_a_record_that_no_column_takes_is_left_out_and_keeps_no_other_out(
    project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [record(number, project=project.pk) for number in range(2 * AT_ONCE)]
    rows[30] = record(30, project=project.pk, prompt_tokens=2**70)
    rows[77] = record(77, project=999, completion_tokens=-(2**70))
    rows[90] = record(90, project=project.pk, at=1e12)  # a line of the journal that a disk has spoilt
    DjangoStore().save_usage(rows)
    assert Usage.objects.count() == len(rows) - 3
    assert caplog.text.count("is left out") == 3
    assert "req-30" in caplog.text
    assert "req-77" in caplog.text
