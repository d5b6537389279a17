"""A choice of a build, for real: a real agent, its stream over a port, passes over real rows; engines are played."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import uvicorn
from channels.db import database_sync_to_async
from django.utils import timezone

from agent.config import AgentSettings
from agent.main import Agent
from catalog import models as catalog
from llmgw.asgi import application
from nodes import actions, choosing, passes
from nodes.models import Command, ModelStatus, Node, Replica
from tenants.audit import SYSTEM
from tests.agent.conftest import end_engines, gguf, settings_for, stub
from tests.factories import make_model

__all__ = ["gguf", "stub"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]
LIMIT_S = 200
OFF = {"llamacpp": "none"}


async def in_db(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return await database_sync_to_async(function)(*args, **kwargs)


async def until(what: str, holds: Callable[[], Any]) -> Any:
    """Let passes run until `holds` gives something, which is asked of the rows."""
    end = monotonic() + LIMIT_S
    while True:
        await in_db(passes.run_pass, timezone.now())
        if found := await in_db(holds):
            return found
        assert monotonic() < end, f"not within {LIMIT_S} s: {what}"
        await asyncio.sleep(0.05)


@dataclass
class Machine:
    settings: AgentSettings

    @property
    def chosen(self) -> Path:
        return self.settings.work_dir / "engines" / "chosen.json"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """An agent there, started anew each time."""
        self.settings.work_dir.mkdir(exist_ok=True)
        stopped = asyncio.Event()
        agent = asyncio.create_task(Agent(self.settings).serve(stopped))
        try:
            yield
        finally:
            stopped.set()
            await agent


@pytest.fixture
async def machine(tmp_path: Path, stub: Path) -> AsyncIterator[Machine]:
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", ws="websockets-sansio", log_config=None))
    place = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[place]))
    _, token = await in_db(actions.make_node, name="n", actor=SYSTEM)
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    told = settings_for(f"http://127.0.0.1:{place.getsockname()[1]}", tmp_path, stub)
    one = Machine(told.model_copy(update={"token_file": tmp_path / "token"}))
    yield one
    end_engines(one.settings)
    server.should_exit = True
    await serving


def choose(build: str) -> bool:
    return choosing.choose_build(node=Node.objects.get(), engine="llamacpp", build=build, actor=SYSTEM)


def goes_by() -> Any:
    return Node.objects.get().inventory.get("engine_builds")


def ready() -> list[str]:
    return [each.replica for each in Replica.objects.endpoints() if each.usable]


def more_are_wanted() -> str:
    """Why the second replica has no place."""
    catalog.Model.objects.update(scaling_min=2, scaling_max=2)
    return str([row.reasons for row in ModelStatus.objects.all() if row.reasons] or "")


async def test_an_engine_switched_off_stays_off_through_lost_directories_and_stores_and_what_runs_goes_on(
    machine: Machine, gguf: Path
) -> None:
    await in_db(make_model, "m", source=str(gguf))
    async with machine.serving():
        [first] = await until("ready", ready)
        assert await in_db(goes_by) == {}
        assert await in_db(choose, "none")
        await until("off", lambda: goes_by() == OFF)
        assert "Switched off by the control plane" in await until("no place", more_are_wanted)
    machine.chosen.unlink()
    async with machine.serving():
        await until("told again", lambda: goes_by() == OFF and machine.chosen.exists())
    await in_db(lambda: Node.objects.update(engine_builds={}, inventory={}))  # as a store that was made anew
    async with machine.serving():
        await until("found", lambda: Node.objects.get().engine_builds == OFF)
        assert await in_db(ready) == [first]
        assert await in_db(choose, "auto")
        assert first in await until("two", lambda: len(ready()) == 2 and ready())
    sent = await in_db(lambda: list(Command.objects.filter(body__type="set_engine_build").order_by("pk")))
    assert [(row.body["build"], row.ok) for row in sent] == [("none", True), ("none", True), ("auto", True)]
