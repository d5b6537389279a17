"""The schedule is run by one of those that could: begun at once, handed over at once, and not at the queue's mercy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from django.conf import settings
from kombu import Connection

from llmgw import config
from llmgw.celery import broker
from llmgw.core import lease
from llmgw.ops.beat import Beat, LeadScheduler
from nodes.models import Event, Replica
from nodes.poke import RECONCILE
from tests.factories import make_model, make_node
from tests.services import free_port, redis_server, wait_until

NOW = datetime(2026, 11, 30, tzinfo=UTC)


class Keeper(lease.Keeper):
    """Has the lease when it is told to."""

    def __init__(self) -> None:
        super().__init__("leader", ttl_s=10)
        self.fence = 0
        self.given_back = 0

    def look(self) -> lease.Held | None:
        held = lease.Held("leader", "host:12:abcd", self.fence, 0, NOW, NOW)
        return held if self.fence else None

    def give_back(self) -> bool:
        self.given_back += 1
        return True


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("lead", broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {
        "reconcile": {"task": RECONCILE, "schedule": 30.0, "options": {"retry": False}},
        "hourly": {"task": "hourly", "schedule": 3600.0, "options": {"retry": False}},
    }
    yield app
    app.close()
    Connection("memory://").channel().queues.clear()


def enqueued(app: Celery) -> list[str]:
    found = []
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue("celery")
        while len(queue):
            message = queue.get_nowait()
            message.ack()
            found.append(message.headers["task"])
    return sorted(found)


def with_redis(url: str) -> config.Settings:
    found: config.Settings = settings.LLMGW.model_copy(update={"redis": config.Redis(url=url)})
    return found


def ticks(scheduler: LeadScheduler, times: int = 4) -> None:
    for _ in range(times):
        assert scheduler.tick() <= 0.5


@pytest.mark.django_db
def test_a_standby_enqueues_nothing_and_a_new_leader_everything_at_once(app: Celery) -> None:
    keeper = Keeper()
    scheduler = LeadScheduler(app, keeper=keeper)
    ticks(scheduler)
    assert enqueued(app) == []
    keeper.fence = 1
    ticks(scheduler)
    assert enqueued(app) == ["hourly", RECONCILE]
    ticks(scheduler)
    assert enqueued(app) == [], "neither is due again yet"
    assert Event.objects.get().text == "The control plane on host (process 12) leads now"


@pytest.mark.django_db
def test_a_leader_that_lost_the_lead_is_silent_until_it_has_it_anew(app: Celery) -> None:
    keeper = Keeper()
    scheduler = LeadScheduler(app, keeper=keeper)
    keeper.fence = 1
    ticks(scheduler)
    enqueued(app)
    keeper.fence = 0
    ticks(scheduler)
    assert enqueued(app) == []
    keeper.fence = 3
    ticks(scheduler)
    assert enqueued(app) == ["hourly", RECONCILE]


@pytest.mark.django_db
def test_who_leads_is_logged_once(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    keeper = Keeper()
    scheduler = LeadScheduler(app, keeper=keeper)
    ticks(scheduler)
    keeper.fence = 1
    ticks(scheduler)
    told = [record.getMessage() for record in caplog.records if "lead" in record.getMessage()]
    assert told == [
        "Another control plane leads; this one stands by",
        "This control plane leads: it runs the schedule",
    ]


@pytest.mark.django_db
def test_without_a_queue_the_leader_runs_passes_itself_and_goes_on(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.update(broker(with_redis("redis://127.0.0.1:1/0")))
    make_model()
    make_node()
    scheduler = LeadScheduler(app)
    ticks(scheduler)
    assert Replica.objects.exists()
    assert "passes are run here until the queue is back" in caplog.text
    assert "hourly" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.django_db
def test_a_queue_that_is_away_is_said_once_and_so_is_its_return(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    port = free_port()
    app.conf.update(broker(with_redis(f"redis://127.0.0.1:{port}/0")))
    told = []
    keeper = Keeper()
    scheduler = LeadScheduler(app, keeper=keeper)
    for turn, is_there in enumerate((False, False, True, True, False)):
        keeper.fence = turn + 1  # so that everything is due
        with redis_server(port) if is_there else contextlib.nullcontext():
            ticks(scheduler)
        told.append((caplog.text.count("passes are run here"), caplog.text.count("The queue takes jobs again")))
    assert told == [(1, 0), (1, 0), (1, 1), (1, 1), (2, 1)]


@pytest.mark.django_db
def test_a_clean_stop_gives_the_lead_back(app: Celery) -> None:
    keeper = Keeper()
    LeadScheduler(app, keeper=keeper).close()
    assert keeper.given_back == 1


def test_asking_the_schedule_to_stop_gives_the_lead_back_soon_and_from_its_own_thread(app: Celery) -> None:
    keeper = Keeper()
    stopped_in: list[str] = []

    def make(**kwargs: Any) -> LeadScheduler:
        return LeadScheduler(keeper=keeper, **{k: v for k, v in kwargs.items() if k != "schedule_filename"})

    give_back = keeper.give_back

    def noted() -> bool:
        stopped_in.append(threading.current_thread().name)
        return give_back()

    keeper.give_back = noted  # type: ignore[method-assign]
    beat = Beat(app, make)
    beat.start()
    beat.ask_to_stop()
    wait_until("the schedule has stopped", lambda: not beat.thread.is_alive(), 30)
    assert stopped_in == ["beat"]
    assert keeper.given_back == 1
