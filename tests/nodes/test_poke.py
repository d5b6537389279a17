"""Asking for a pass holds nobody up and survives the queue: one that is away, one that was started again."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from django.conf import settings

from llmgw import config
from llmgw.celery import app as scheduling
from llmgw.celery import broker
from nodes import poke
from tests.services import free_port, wait_until

app: Celery


@pytest.mark.django_db
def test_a_queue_that_is_started_again_takes_the_next_poke(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    django_capture_on_commit_callbacks: Callable[..., Any],
) -> None:
    caplog.set_level("INFO", "nodes.poke")
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    queue = Celery("poked", set_as_current=False)
    queue.conf.update(broker(settings.LLMGW.model_copy(update={"redis": config.Redis(url=url)})))
    monkeypatch.setitem(globals(), "app", queue)
    monkeypatch.setattr(poke, "APP", f"{__name__}.app")

    def ask() -> None:
        with django_capture_on_commit_callbacks(execute=True):
            poke.poke()

    def start() -> subprocess.Popen[bytes]:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        with redis.Redis(port=port) as client:
            wait_until("Redis answers", lambda: _pings(client))
        return process

    def waiting() -> int:
        with redis.Redis(port=port) as client:
            return int(client.llen("celery"))  # type: ignore[arg-type]

    first = start()
    ask()
    assert waiting() == 1
    caplog.clear()
    first.send_signal(signal.SIGKILL)
    first.wait()
    ask()
    ask()
    again = start()
    ask()
    ask()
    assert waiting() >= 1, "the first one may go into a connection that is gone"
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "The queue does not take a pass",
        "The queue takes passes again",
    ]
    again.send_signal(signal.SIGTERM)
    again.wait()
    queue.close()


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.mark.django_db
def test_a_pass_is_run_on_hosts_whose_clock_is_half_a_minute_ahead(
    monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Callable[..., Any]
) -> None:
    """A job names the time until which it may be run, by the clock of whoever asks for it."""
    queue = Celery("skewed", broker="memory://", set_as_current=False)
    monkeypatch.setitem(globals(), "app", queue)
    monkeypatch.setattr(poke, "APP", f"{__name__}.app")
    with django_capture_on_commit_callbacks(execute=True):
        poke.poke()
    scheduled = scheduling.conf.beat_schedule["reconcile"]
    queue.send_task(scheduled["task"], **scheduled["options"])
    ahead = datetime.now(UTC) + timedelta(seconds=30)
    with queue.connection_for_read() as link, link.SimpleQueue("celery") as jobs:
        for _ in range(2):
            job = jobs.get(block=False)
            assert job.headers["task"] == poke.RECONCILE
            assert datetime.fromisoformat(job.headers["expires"]) > ahead
            job.ack()
