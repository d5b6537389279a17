"""The same product on PostgreSQL and Redis with several gateways: two settings, the same journey."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest
import redis

from tests.e2e.product import LLMGW, MODEL, Product, clean_environment, product
from tests.services import free_port, postgres_server, redis_server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@dataclass
class Grown:
    product: Product
    gateways: list[str]
    postgres: str
    redis: str

    def chat(self, base_url: str, key: str, **extra: object) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 3, **extra}
        return httpx.post(
            f"{base_url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=180
        )


@contextlib.contextmanager
def _gateway(config: Path, data: Path) -> Iterator[str]:
    port = free_port()
    with open(data.parent / f"gateway-{port}.log", "wb") as log:
        process = subprocess.Popen(
            [*LLMGW, "server", "run", "gateway", "--config", str(config), "--port", str(port)],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env={**clean_environment(), "LLMGW_DATA_DIR": str(data)},
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, (data.parent / f"gateway-{port}.log").read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/ready", timeout=10).status_code == 200
        return False

    try:
        wait_until("the further gateway is ready", ready, 120)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def grown() -> Iterator[Grown]:
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        broker = stack.enter_context(redis_server())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmgw-grown-")))
        config = folder / "server.yaml"
        config.write_text(f"store:\n  url: {postgres}\nredis:\n  url: {broker}\n")
        one = stack.enter_context(product("--config", str(config)))
        further = [stack.enter_context(_gateway(config, one.data)) for _ in range(2)]
        yield Grown(one, [one.base_url, *further], postgres, broker)


def test_every_gateway_serves_and_every_request_is_stored_once(grown: Grown) -> None:
    ids = [grown.chat(url, grown.product.key).headers["x-request-id"] for url in grown.gateways]

    def stored() -> bool:
        with psycopg.connect(grown.postgres) as connection:
            rows = connection.execute("SELECT request_id, completion_tokens FROM tenants_usage").fetchall()
        found = [row[0] for row in rows if row[0] in ids]
        return sorted(found) == sorted(ids)

    wait_until("all three requests are in PostgreSQL, once each", stored, 60)
    assert not (grown.product.data / "llmgw.sqlite3").exists()


def test_a_new_key_works_and_a_revoked_one_stops_at_every_gateway(grown: Grown) -> None:
    made = grown.product.ctl_json("keys", "make", "everywhere")
    key = made["secret"]
    for url in grown.gateways:
        wait_until(f"{url} takes the key", lambda url=url: grown.chat(url, key).status_code == 200, 20)
    revoked = grown.product.ctl("keys", "revoke", made["key"]["prefix"])
    assert revoked.returncode == 0, revoked.stderr
    for url in grown.gateways:
        wait_until(f"{url} refuses the key", lambda url=url: grown.chat(url, key).status_code == 401, 20)


def test_rings_travel_over_redis_and_jobs_do_too(grown: Grown) -> None:
    with redis.Redis.from_url(grown.redis) as client:
        listening = [one for one in client.client_list() if int(one["psub"]) > 0]
        assert len(listening) >= 3, "serve and both gateways listen for rings"
        wait_until(
            "Celery has used the broker", lambda: any(b"kombu" in name for name in client.scan_iter("*kombu*")), 60
        )
    assert not (grown.product.data / "queue").exists(), "no files are queued beside Redis"


def test_ctl_and_dashboard_numbers_come_from_the_shared_store(grown: Grown) -> None:
    status = grown.product.ctl_json("status")
    assert status["models"][0]["name"] == MODEL
    assert status["models"][0]["ready"] == 1
