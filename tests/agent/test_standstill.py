"""A control plane that stands still closes nothing: its agents go to another one, and leave none that is only busy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import agent.session
import agent.stream
from agent.session import Session
from tests.agent.conftest import ControlPlane, eventually, settings_for
from tests.agent.test_session import speaking, status

GONE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seldom enough asked that a slow machine answers in time, but for what is tried here."""
    monkeypatch.setattr(agent.session, "PING_S", 0.2)
    monkeypatch.setattr(agent.session, "ALONE_PING_S", 0.2)
    monkeypatch.setattr(agent.stream, "QUIET_S", 1.0)
    monkeypatch.setattr(agent.stream, "SILENT_S", 3600.0)


@pytest.fixture
async def other() -> AsyncIterator[ControlPlane]:
    plane = ControlPlane()
    async with plane.listening():
        yield plane


@asynccontextmanager
async def still(first: ControlPlane, folder: Path, *others: str) -> AsyncIterator[Session]:
    """An agent whose control plane has just begun to stand still."""
    settings = settings_for(first.url, folder, None).model_copy(update={"control_plane": [first.url, *others]})
    async with speaking(settings) as session:
        await eventually(lambda: first.heartbeats)
        first.stand_still()
        yield session


async def test_another_control_plane_is_taken_and_the_one_that_stands_still_is_left(
    control_plane: ControlPlane, other: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with still(control_plane, tmp_path, other.url):
        await eventually(lambda: len(other.heartbeats) >= 2)
        control_plane.go_on()
        await eventually(lambda: control_plane.closes)
        assert other.closes == []
    assert (len(control_plane.registers), len(other.registers)) == (1, 1)
    assert f"{control_plane.url} has not answered for 1 s. Asking another control plane" in caplog.text


async def test_it_is_kept_while_nobody_else_takes_the_node_and_goes_on_once_it_answers(
    control_plane: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with still(control_plane, tmp_path, GONE):
        await eventually(lambda: caplog.text.count(f"No stream to {GONE}") >= 3)
        control_plane.go_on()
        count = len(control_plane.heartbeats)
        await eventually(lambda: len(control_plane.heartbeats) > count + 10)
        control_plane.cut()
        await eventually(lambda: len(control_plane.registers) == 2)
    assert len(control_plane.opened_at) == 2
    assert caplog.text.count(f"No stream to {control_plane.url}") == 1


async def test_one_that_was_only_busy_is_gone_on_with_and_the_other_is_not_troubled(
    control_plane: ControlPlane, other: ControlPlane, tmp_path: Path
) -> None:
    other.first = lambda: None
    async with still(control_plane, tmp_path, other.url):
        await eventually(lambda: other.registers)
        control_plane.go_on()
        await eventually(lambda: other.closes)
        assert other.closes == ["the control plane before answers again"]
        count = len(control_plane.heartbeats)
        await eventually(lambda: len(control_plane.heartbeats) > count)
        assert control_plane.closes == []
    assert len(control_plane.registers) == 1


async def test_one_that_ends_meanwhile_leaves_the_other_which_hears_of_every_transition(
    control_plane: ControlPlane, other: ControlPlane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other.first = lambda: None
    async with still(control_plane, tmp_path, other.url) as session:
        await eventually(lambda: other.registers)
        session.publish(status("while nobody answers"))
        control_plane.cut()
        await eventually(lambda: f"No stream to {control_plane.url}" in caplog.text)
        await other.send_raw('{"type":"welcome","node":"n","heartbeat_s":0.2}')
        await eventually(lambda: other.heartbeats)
        assert [each.tail for each in other.statuses] == ["while nobody answers"]
    assert (len(control_plane.registers), len(other.registers)) == (1, 1)


async def test_the_only_control_plane_is_not_left_for_being_busy(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bool] = []
    change = Session._change

    async def watched(session: Session) -> None:
        await change(session)
        seen.extend(each.silent for each in session._streams)

    monkeypatch.setattr(Session, "_change", watched)
    async with still(control_plane, tmp_path):
        await eventually(lambda: True in seen)
        control_plane.go_on()
        await eventually(lambda: seen[-1] is False)
    assert len(control_plane.opened_at) == 1
    assert "Asking another" not in caplog.text
