"""What the pages, the API and the command line say about a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from datetime import timezone as timezone_of
from decimal import Decimal

import pytest
from django.utils import timezone

from agent.protocol import Gpu, Progress
from catalog import spec
from catalog.models import Model as ModelRow
from nodes import snapshot
from nodes.alerts import Alert
from nodes.lines import ModelLine, WaitLine
from nodes.models import Backoff as BackoffRow
from nodes.models import ModelStatus, ReplicaLoad
from nodes.state import Backoff, Cluster, Load, Shard, Status, in_words
from nodes.summary import FlightLine, ProjectLine, Summary, UsageLine, summarise
from nodes.totals import CapacityLine
from routing.loops import LOADS_AT_LEAST_S, LOADS_S
from tenants import rollup
from tenants.models import CapacityQuota
from tests.factories import make_key, make_model, make_node, make_project, make_replica, make_team
from tests.nodes.fleets import NOW
from tests.nodes.test_placement import GOOD, MODEL
from tests.nodes.test_reconcile import DIGEST, SERVING
from tests.pages import machines, rows
from tests.tenants.test_rollup import NOON, Row, of

NONE = UsageLine(0, 0, 0, 0)


def summed(**fields: object) -> Summary:
    return summarise(replace(Cluster(nodes=(GOOD,), models=(MODEL,)), **fields), NONE, NOW)  # type: ignore[arg-type]


def line(**fields: object) -> ModelLine:
    return summed(**fields).models[0]


HELD = Backoff("m", "cpu", DIGEST, 3, NOW + timedelta(seconds=8), "out of memory")
WHY = Status("m", ("good (cpu): is cordoned",))


def test_a_ready_model_counts_what_it_can_serve() -> None:
    busy = replace(SERVING, weight=4, load=Load(NOW, in_flight=3, waiting=1))
    found = line(replicas=(busy,))
    assert (found.state, found.ready, found.slots, found.in_flight, found.waiting) == ("ready", 1, 4, 3, 1)
    assert found.note == ""


def test_unknown_load_stays_unknown() -> None:
    found = line(replicas=(replace(SERVING, load=Load(NOW, in_flight=3)), replace(SERVING, name="s")))
    assert found.in_flight is None


@pytest.mark.parametrize(
    ("fields", "state", "note"),
    [
        ({}, "loading", "waits for a node"),
        ({"replicas": (replace(SERVING, state="loading"),)}, "loading", "r is loading"),
        ({"backoffs": (HELD,)}, "failed", "out of memory"),
        ({"statuses": (WHY,)}, "cannot run", "no node can run it"),
        ({"models": (replace(MODEL, scaling=spec.Scaling(0, 1)),)}, "on demand", ""),
        ({"models": (replace(MODEL, scaling=spec.Scaling(0, 0)),)}, "off", ""),
        ({"models": (replace(MODEL, external=spec.External("https://x", "y")),)}, "external", "served by https://x"),
        (
            {"models": (replace(MODEL, scaling=spec.Scaling(2, 2)),), "replicas": (SERVING,)},
            "ready",
            "1 of 2 replicas are ready",
        ),
        (
            {
                "models": (replace(MODEL, scaling=spec.Scaling(2, 2)),),
                "replicas": (SERVING,),
                "backoffs": (HELD,),
            },
            "ready",
            "1 of 2 replicas are ready: out of memory",
        ),
    ],
)
def test_a_models_state_is_one_word_and_what_to_know(fields: dict[str, object], state: str, note: str) -> None:
    found = line(**fields)
    assert (found.state, found.note) == (state, note)


def test_why_not_is_told_line_by_line() -> None:
    assert line(statuses=(WHY,)).why_not == ("good (cpu): is cordoned",)


@pytest.mark.parametrize(
    ("wanted", "state", "shown"),
    [
        ("run", "ready", "ready"),
        ("drain", "ready", "draining"),
        ("stop", "ready", "stopping"),
        ("stop", "failed", "failed"),
    ],
)
def test_a_replica_shows_what_is_asked_of_it(wanted: str, state: str, shown: str) -> None:
    asked = replace(SERVING, wanted=wanted, state=state)  # type: ignore[arg-type]
    assert summed(replicas=(asked,)).replicas[0].state == shown


def test_a_replica_on_its_way_says_how_far_it_is() -> None:
    fetching = replace(SERVING, state="fetching", shards=(Shard("good", note="40 % of 10.0 MB"),))
    assert summed(replicas=(fetching,)).replicas[0].note == "40 % of 10.0 MB"
    assert summed(replicas=(replace(fetching, state="ready"),)).replicas[0].note == ""


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (Progress(), ""),
        (Progress(note="resolving"), "resolving"),
        (Progress(done_bytes=5 * 10**6), "fetched: 5.0 MB"),
        (Progress(done_bytes=5 * 10**6, total_bytes=10**7), "50 % of 10.0 MB"),
        (Progress(done_bytes=0, total_bytes=10**7, note="weights"), "weights: 0 % of 10.0 MB"),
    ],
)
def test_progress_in_words(progress: Progress, words: str) -> None:
    assert in_words(progress) == words


def test_capacity_counts_cores_and_cards_and_no_faulty_one_as_used_or_free() -> None:
    cards = tuple(
        Gpu(uuid=f"GPU-{i}", index=i, name="L4", gpu_class="l4-22g", healthy=i != 3, fault="" if i != 3 else "ECC")
        for i in range(4)
    )
    node = replace(GOOD, gpus=cards, reserved_cores=1)
    on_cards = replace(SERVING, name="g", shards=(Shard("good", 0, "ready", 0, ("GPU-0",)),))
    loading = replace(on_cards, name="h", ready_at=None, shards=(Shard("good", 0, "loading", 0, ("GPU-1", "GPU-3")),))
    found = summed(nodes=(node,), replicas=(SERVING, on_cards, loading))
    assert found.capacity == (
        CapacityLine("l4-22g", "cards", 4, 1, 1, 1, 0, 1, 0, 1),
        CapacityLine("cpu", "cores", 8, 4, 0, 3, 0, 0, 1, 1),
    )
    assert Alert("warn", "good", "Card 3 (L4) of good is faulty: ECC", None) in found.alerts
    assert (found.nodes[0].gpus, found.nodes[0].gpus_faulty, found.nodes[0].cores_used) == (4, 1, 4)


def test_alerts_name_what_needs_a_person() -> None:
    lost, silent = replace(GOOD, name="a", state="lost"), replace(GOOD, name="b", state="unreachable")
    assert [alert.state for alert in summed(nodes=(lost, silent)).alerts] == ["failed", "warn"]
    [failed] = summed(backoffs=(HELD,)).alerts
    assert failed.text == "m does not start (3 in a row): out of memory"
    [full] = summed(nodes=(replace(GOOD, disk_free_bytes=3 * 10**6),)).alerts
    assert full.text == "The disk of node good has 3 MB free; free some, or nothing new can be stored."
    [nowhere] = summed(statuses=(WHY,)).alerts
    assert nowhere.text == "m finds no place: good (cpu): is cordoned"
    [short] = summed(models=(replace(MODEL, scaling=spec.Scaling(2, 2)),), replicas=(SERVING,)).alerts
    assert short.text == "m: 1 of 2 replicas are ready"


def test_a_model_says_where_it_is_left_alone_and_until_when() -> None:
    here = replace(HELD, node="good", failures=1, next_try_at=NOW + timedelta(seconds=2))
    over = replace(HELD, profile="other", next_try_at=NOW)
    found = line(backoffs=(HELD, here, over))
    assert found.waits == (
        WaitLine("cpu", "good", 1, NOW + timedelta(seconds=2), "out of memory"),
        WaitLine("cpu", "", 3, NOW + timedelta(seconds=8), "out of memory"),
    )
    assert found.next_try_at == NOW + timedelta(seconds=2)


def test_a_replica_names_the_ranks_that_wait_for_their_leader() -> None:
    shards = (Shard("good", note="starts"), Shard("b", 1, "waiting"), Shard("c", 2, "waiting"))
    starting = replace(SERVING, state="starting", shards=shards)
    note = "starts; rank 1 on b, 2 on c waiting until rank 0 listens"
    assert summed(replicas=(starting,)).replicas[0].note == note


def test_a_replica_that_ended_says_so_until_the_next_pass_and_holds_no_card() -> None:
    card = Gpu(uuid="GPU-0", index=0, name="L4", gpu_class="l4-22g")
    ended = replace(SERVING, state="stopped", reason="", shards=(Shard("good", 0, "stopped", gpus=("GPU-0",)),))
    found = summed(nodes=(replace(GOOD, gpus=(card,)),), replicas=(ended,))
    assert (found.models[0].state, found.models[0].note) == ("failed", "r has stopped")
    assert [line.free for line in found.capacity if line.gpu_class == "l4-22g"] == [1]


def test_cards_that_cannot_be_read_need_a_person() -> None:
    [alert] = summed(nodes=(replace(GOOD, gpus_fault="the driver does not answer"),), replicas=(SERVING,)).alerts
    assert alert.text == (
        "The cards of good cannot be read: the driver does not answer. Nothing new is placed on them."
    )


def test_a_model_whose_team_there_is_not_needs_a_person() -> None:
    stray = replace(MODEL, team="gone")
    [alert] = summed(models=(stray,), replicas=(SERVING,), quotas={"red": {}}).alerts
    assert alert.text == "m names the team gone, which there is not: no quota binds it. Correct its team."
    assert not summed(models=(stray,), replicas=(SERVING,), quotas={"gone": {}}).alerts
    assert summed(models=(stray,)).models[0].team == "gone"


@pytest.mark.django_db
def test_a_summary_from_rows_costs_fourteen_queries_however_many_rows(django_assert_num_queries) -> None:  # type: ignore[no-untyped-def]
    for name in ("a", "b", "c"):
        make_model(name)
        make_replica(model=name, node=make_node())
        rollup.add([of(make_key()[0], at=timezone.now().timestamp())])
    with django_assert_num_queries(14):
        found = snapshot.current_summary()
    assert [node.files for node in found.nodes] == [0, 0, 0]
    assert found.nodes[0].engines == ("llamacpp (xllamacpp 0.2)",)
    assert found.nodes[0].load_1m == 0.5
    assert len(found.replicas) == 3


@pytest.mark.django_db
def test_today_begins_at_midnight_utc_whatever_the_zone_of_now() -> None:
    midnight = datetime(2026, 11, 29, tzinfo=UTC)
    times = (midnight - timedelta(seconds=1), midnight, midnight + timedelta(hours=5))
    rollup.add([Row(at=at.timestamp(), status=502, completion_tokens=None) for at in times])
    now = (midnight + timedelta(hours=6)).astimezone(timezone_of(timedelta(hours=9)))
    assert snapshot.current_summary(now).usage_today == UsageLine(2, 2, 20, 0, Decimal("0.000002"))


@pytest.mark.django_db
def test_spend_of_today_is_told_in_all_and_by_project_the_busiest_first_and_never_as_zero_without_a_price() -> None:
    now = NOON.replace(hour=13)
    evals, search = make_project("evals", team=make_team("Research")), make_project("search")
    busy, quiet, gone = (make_key(project=project)[0] for project in (evals, search, make_project()))
    rollup.add([of(busy, cost=150_000_000), of(busy, cost=None), of(busy, status=502, cost=0), of(quiet, cost=None)])
    rollup.add([of(gone, cost=1), Row(project=None, cost=None)])
    gone.delete()
    gone.project.delete()
    found = snapshot.current_summary(now)
    assert found.projects_today == (
        ProjectLine(evals.pk, "evals", "Research", UsageLine(3, 1, 30, 15, Decimal("1.5"), 1)),
        ProjectLine(search.pk, "search", search.team.name, UsageLine(1, 0, 10, 5, None, 1)),
    )
    assert found.usage_today == UsageLine(6, 1, 60, 30, Decimal("1.50000001"), 3)
    assert found.currency == "EUR"
    assert snapshot.current_summary(now + timedelta(days=2)).usage_today == UsageLine(0, 0, 0, 0, Decimal(0))


def test_requests_in_flight_are_summed_as_far_as_they_are_known() -> None:
    busy, leaving = replace(SERVING, load=Load(NOW, in_flight=3)), replace(SERVING, name="s", wanted="drain")
    leaving = replace(leaving, load=Load(NOW, in_flight=2))
    silent = replace(SERVING, name="t", load=Load(NOW))
    starting = replace(SERVING, name="u", state="loading")
    assert summed(replicas=(busy, leaving, silent, starting)).in_flight == FlightLine(5, silent=1)
    assert summed(replicas=(silent, replace(silent, name="v", load=None))).in_flight == FlightLine(None, silent=2)
    assert summed().in_flight == FlightLine(None, silent=0)


@pytest.mark.django_db
def test_what_a_list_or_a_page_of_one_shows_is_what_the_summary_says() -> None:
    rows.make_cluster(6)
    rows.make_idle("quiet", node=make_node("b", state="lost"))
    machines.make_fleet()
    now = timezone.now()
    BackoffRow.objects.create(model="model-0001", profile="cpu", failures=2, next_try_at=now + timedelta(hours=1))
    ModelStatus.objects.create(model="model-0002", reasons=["node-0001 (cpu): is cordoned"])
    team = make_team("research")
    CapacityQuota.objects.create(team=team, gpu_class="h100-80g", cards=4)
    ModelRow.objects.filter(name__in=["deepseek", "model-0001"]).update(team=team.slug)
    whole = snapshot.current_summary(now)
    assert [line.team for line in whole.quotas] == ["research"]
    assert snapshot.quota_lines("research") == whole.quotas
    assert snapshot.quota_lines("other") == ()
    held = snapshot.holdings()
    assert (len(held.nodes), held.capacity, held.quotas) == (len(whole.nodes), whole.capacity, whole.quotas)
    assert snapshot.node_lines() == whole.nodes
    assert snapshot.replica_lines(now) == whole.replicas
    assert snapshot.model_lines(now) == whole.models
    for node in whole.nodes:
        assert snapshot.node_lines(node.name) == (node,)
        there = tuple(line for line in whole.replicas if node.name in line.node.split(", "))
        assert snapshot.replica_lines(now, node=node.name) == there
    for model in whole.models:
        assert snapshot.model_lines(now, model.name) == (model,)
        own = tuple(line for line in whole.replicas if line.model == model.name)
        assert snapshot.replica_lines(now, model=model.name) == own
    for replica in whole.replicas:
        assert snapshot.replica_lines(now, name=replica.name) == (replica,)
    assert (
        snapshot.node_lines("gone") == snapshot.model_lines(now, "gone") == snapshot.replica_lines(now, name="x") == ()
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("ages_s", "in_flight", "running"), [((1, 2), 5, 1), ((1, 30), None, 1), ((1, 90), 2, 1), ((30, 40), None, None)]
)
def test_a_gateway_gone_quiet_makes_the_load_unknown_until_it_is_given_up(
    ages_s: tuple[int, int], in_flight: int | None, running: int | None
) -> None:
    make_model()
    replica = make_replica()
    now = timezone.now()
    for gateway, age_s, held in zip("ab", ages_s, (2, 3), strict=True):
        ReplicaLoad.objects.create(
            gateway=gateway, replica=replica.name, in_flight=held, running=1, at=now - timedelta(seconds=age_s)
        )
    [found] = snapshot.current_summary(now).replicas
    assert (found.in_flight, found.running) == (in_flight, running)


def test_a_load_that_does_not_change_stays_known_between_two_reports_of_it() -> None:
    assert timedelta(seconds=LOADS_AT_LEAST_S + 2 * LOADS_S) <= snapshot.FRESH


@pytest.mark.django_db
def test_disk_free_is_what_the_register_said_until_a_heartbeat_says_more() -> None:
    make_node("a", load={})
    make_node("b", inventory={}, load={})
    assert [node.disk_free_bytes for node in snapshot.current_summary().nodes] == [50 * 1024**3, None]
