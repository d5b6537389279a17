"""Every process is killed with kill -9, alone and under a stream: engines live on, no finished request is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.product import MODEL, Product, product
from tests.services import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def running() -> Iterator[Product]:
    with product() as one:
        yield one


class Stream(threading.Thread):
    """A streamed request read in the background; `ended_well` once [DONE] came."""

    def __init__(self, running: Product, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.running, self.max_tokens = running, max_tokens
        self.begun = threading.Event()
        self.ended_well = False
        self.request_id = ""
        self.start()
        assert self.begun.wait(120), "the stream never began"

    def run(self) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me a very long story about the sea."}],
            "max_tokens": self.max_tokens,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self.running.key}"}
        url = f"{self.running.base_url}/v1/chat/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=180) as answer:
                self.request_id = answer.headers["x-request-id"]
                for line in answer.iter_lines():
                    self.begun.set()
                    if line == "data: [DONE]":
                        self.ended_well = True
        except httpx.HTTPError:
            pass
        finally:
            self.begun.set()


def requests_stored(running: Product) -> dict[str, int]:
    rows = running.api("/api/v1/usage")["results"]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["request_id"]] = counts.get(row["request_id"], 0) + 1
    return counts


def wait_for_usage(running: Product, request_id: str) -> None:
    def stored() -> bool:
        try:
            return requests_stored(running).get(request_id) == 1
        except httpx.HTTPError:
            return False

    wait_until(f"request {request_id} is stored exactly once", stored, 60)


@pytest.mark.parametrize("part", ["worker", "agent"])
def test_killing_worker_or_agent_does_not_touch_a_running_stream(running: Product, part: str) -> None:
    wait_until("the model answers", running.answers, 240)
    engines, old = running.engine_pids(), running.pids()[part]
    assert len(engines) == 1
    stream = Stream(running, 120)
    os.kill(old, signal.SIGKILL)
    running.wait_for_restart(part, old)
    stream.join(180)
    assert stream.ended_well
    wait_for_usage(running, stream.request_id)
    assert running.engine_pids() == engines, "the engine was replaced"
    assert running.answers()

    def adopted() -> bool:
        lines = running.api("/api/v1/summary")["replicas"]
        return [line["state"] for line in lines] == ["ready"]

    wait_until("the one replica is ready again", adopted, 120)
    assert running.engine_pids() == engines


def test_killing_serve_leaves_the_engine_and_loses_no_finished_request(running: Product) -> None:
    wait_until("the model answers", running.answers, 240)
    engines, old = running.engine_pids(), running.pids()["serve"]
    finished = [running.chat(max_tokens=2).headers["x-request-id"] for _ in range(5)]
    stream = Stream(running, 400)
    os.kill(old, signal.SIGKILL)
    stream.join(180)
    assert not stream.ended_well
    running.wait_for_restart("serve", old)
    wait_until("requests work again", running.answers, 120)
    for request_id in finished:
        wait_for_usage(running, request_id)
    assert running.engine_pids() == engines


def test_a_killed_engine_is_rebuilt_after_a_pause_that_the_pages_show(running: Product) -> None:
    wait_until("the model answers", running.answers, 240)
    (engine,) = running.engine_pids()
    os.kill(engine, signal.SIGKILL)

    def explained() -> bool:
        model = running.api("/api/v1/summary")["models"][0]
        return model["state"] != "ready"

    wait_until("the model is shown as not ready", explained, 60)
    refused = running.chat()
    assert refused.status_code in (200, 502, 503)
    if refused.status_code == 503:
        assert refused.json()["error"]["code"] in ("model_loading", "engine_down")
        assert int(refused.headers["retry-after"]) > 0
    wait_until("the model answers again", running.answers, 300)
    (replacement,) = running.engine_pids()
    assert replacement != engine
    events = " ".join(event["text"] for event in running.api("/api/v1/events")["results"])
    # An agent that adopted the engine is not its parent, and says that it cannot know more.
    assert "killed by signal 9" in events or "exit status unknown" in events


def test_ctrl_c_stops_everything_and_the_next_start_is_warm_and_keeps_all() -> None:
    with product() as one:
        request_id = one.chat(max_tokens=3).headers["x-request-id"]
        key = one.key
        assert one.stop(signal.SIGINT) == 0
        assert one.all_pids() == [], "processes were left behind"
        assert not one.bootstrap_file.exists(), "it would name processes that are gone"
        one.start()
        assert one.key == key, "a script that starts again keeps its key"
        wait_for_usage(one, request_id)
        assert one.answers()
