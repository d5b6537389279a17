"""Each process that serves hears the rings of others over Redis, whatever its role."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis

from llmgw import agents_asgi, config
from llmgw.core import doorbell
from routing.asgi import Gateway
from routing.table import Contents
from tests.routing.gateways import MemoryStore, eventually, served
from tests.services import redis_server


@pytest.mark.parametrize("role", ["web", "gateway", "gateway,web", "agents"])
async def test_a_serving_process_hears_what_others_ring_for(role: str, settings: Any, tmp_path: Path) -> None:
    with redis_server() as url, redis.Redis.from_url(url) as other_process:
        settings.LLMGW = config.Settings(data_dir=tmp_path, redis=config.Redis(url=url))
        async with served(application(role, settings.LLMGW)), asyncio.timeout(100):
            await eventually(other_process.pubsub_numpat)
            assert other_process.pubsub_numpat() == 1, "once a process"
            listener = doorbell.Listener([doorbell.commands_for("one")])
            other_process.publish(doorbell.PREFIX + doorbell.commands_for("one"), b"1")
            assert await listener.wait(60)
            listener.close()
        await eventually(lambda: not other_process.pubsub_numpat())


def application(role: str, own: config.Settings) -> Any:
    if role == "agents":
        return agents_asgi.application
    store = MemoryStore(Contents(1, (), (), (), b""))
    gateway = Gateway(settings=own, store=store, roles=frozenset(role.split(",")))

    async def scoped(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"
        await gateway.lifespan(scope, receive, send)

    return scoped
