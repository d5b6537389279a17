"""Which build of an engine starts is the control plane's to say: kept, told, and taken by what starts next (AG-32)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import builds
from agent.choices import Choices
from agent.config import AgentSettings
from agent.host import Host
from agent.installer import Installer, InstallError
from agent.main import Agent, inventory_text
from agent.protocol import AUTO, NONE, Fetch, InstallEngine, SetEngineBuild, Welcome
from tests.agent.conftest import AgentTask, ControlPlane, eventually, spec, told

HERE = Host(address="127.0.0.1", architecture="x86_64", cores=1, memory_bytes=1)
WITH_CARDS = Host(address="127.0.0.1", architecture="x86_64", gpus=2)
NAMES = st.sampled_from([AUTO, NONE, "cpu", "cu13"])
OFF = "Switched off by the control plane. To use llamacpp again: llmgw ctl engine-build NODE llamacpp auto."


@given(NAMES, st.sampled_from(["cpu", "cu13"]))
def test_a_build_is_used_where_it_or_the_best_was_chosen_and_else_says_how_to_use_it(chosen: str, name: str) -> None:
    why = builds.passed_over("llamacpp", name, chosen)
    assert (why == "") == (chosen in (AUTO, name))
    assert why == "" or why.endswith((f"engine-build NODE llamacpp {name}.", "engine-build NODE llamacpp auto."))


# --- kept ------------------------------------------------------------------------------------------------------------
def test_choices_are_kept_for_their_owner_only_and_outlast_the_agent(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "chosen.json"
    one = Choices(path)
    one.keep("vllm", NONE)
    one.keep("llamacpp", "xllamacpp")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["chosen.json"]  # written whole, or not at all
    assert Choices(path).told() == {"vllm": NONE, "llamacpp": "xllamacpp"}
    one.keep("llamacpp", AUTO)
    one.keep("sglang", AUTO)
    assert (Choices(path).told(), Choices(path).of("llamacpp")) == ({"vllm": NONE}, AUTO)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "cannot be read from"),
        ("x" * 70_000, "cannot be read from"),
        ('["vllm"]', "does not hold which builds"),
        ('{"vllm": 1}', "does not hold which builds"),
    ],
)
def test_spoilt_choices_are_none_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, says: str
) -> None:
    path = tmp_path / "chosen.json"
    path.write_text(content)
    assert Choices(path).told() == {}
    assert says in caplog.text
    assert Choices(tmp_path / "gone").told() == {}


def test_a_choice_that_cannot_be_written_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "engines").touch()
    one = Installer(tmp_path / "engines")
    assert "the choice of none for vllm cannot be kept" in one.choose("vllm", NONE, HERE)
    assert (one.chosen(), one.refusal("vllm")) == ({}, "")


# --- taken -----------------------------------------------------------------------------------------------------------
def test_an_unknown_build_or_engine_is_answered_with_those_that_there_are(tmp_path: Path) -> None:
    named = Installer(tmp_path, binaries={"llamacpp": Path(sys.executable)})
    says = "This node has no build 'xllamacpp' of llamacpp; choose auto, named or none."
    assert named.choose("llamacpp", "xllamacpp", HERE) == says
    one = Installer(tmp_path)
    says = "This node has no build 'cu13' of llamacpp; choose auto, xllamacpp or none."
    assert one.choose("llamacpp", "cu13", HERE) == says
    assert one.choose("vllm", "cu13", HERE) == "This node has no build 'cu13' of vllm; choose auto or none."
    assert one.choose("magic", NONE, HERE) == "This agent knows no engine 'magic'; it knows llamacpp, sglang, vllm."
    assert one.chosen() == {}


async def test_an_engine_that_is_switched_off_gives_no_build_and_says_so(tmp_path: Path) -> None:
    one = Installer(tmp_path, binaries={"vllm": Path(sys.executable)})
    for engine in ("llamacpp", "vllm", "sglang"):
        assert one.choose(engine, NONE, WITH_CARDS) == ""
        assert one.held(engine, HERE) is None
        with pytest.raises(InstallError, match="Switched off by the control plane"):
            await one.ensure(engine, HERE)
    assert one.refusal("llamacpp") == OFF
    assert {(each.engine, each.usable) for each in one.present(WITH_CARDS)} == {
        (engine, False) for engine in ("llamacpp", "vllm", "sglang")
    }
    assert all("Switched off" in each.reason for each in one.present(WITH_CARDS))
    assert one.choose("vllm", AUTO, HERE) == ""
    assert (await one.ensure("vllm", HERE)).argv == (sys.executable,)


async def test_a_chosen_build_that_has_left_the_node_is_not_replaced_by_another(tmp_path: Path) -> None:
    first = Installer(tmp_path)
    assert first.choose("llamacpp", "xllamacpp", HERE) == ""
    assert [(each.name, each.usable) for each in first.present(HERE)] == [("xllamacpp", True)]
    named = Installer(tmp_path, binaries={"llamacpp": Path(sys.executable)})  # since then, in agent.yaml
    says = "Not chosen: the control plane chose xllamacpp. To use it: llmgw ctl engine-build NODE llamacpp named."
    assert [(each.name, each.usable, each.reason) for each in named.present(HERE)] == [("named", False, says)]
    assert named.held("llamacpp", HERE) is None
    with pytest.raises(InstallError, match="the control plane chose xllamacpp"):
        await named.ensure("llamacpp", HERE)
    assert named.choose("llamacpp", "named", HERE) == ""
    with pytest.raises(InstallError, match="the control plane chose named"):
        await Installer(tmp_path).ensure("llamacpp", HERE)
    assert (await named.ensure("llamacpp", HERE)).name == "named"


# --- over the stream -------------------------------------------------------------------------------------------------
async def test_what_runs_goes_on_what_starts_next_is_refused_and_the_inventory_says_so_at_once(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    await told(control_plane, agent, spec(gguf))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["ready"], what="ready")
    assert control_plane.registers[0].inventory.engine_builds == {}
    for _ in range(2):
        await control_plane.send(SetEngineBuild(engine="llamacpp", build=NONE), number=50)
    await eventually(lambda: len(control_plane.acks) == 3)
    assert [(ack.id, ack.ok) for ack in control_plane.acks[1:]] == [(50, True), (50, True)]
    assert agent.log.count("the control plane chose none") == 1
    await eventually(lambda: any(beat.inventory for beat in control_plane.heartbeats))
    seen = [beat.inventory for beat in control_plane.heartbeats if beat.inventory][-1]
    assert seen
    assert seen.engine_builds == {"llamacpp": NONE}
    assert [(build.usable, build.reason) for build in seen.builds] == [(False, OFF)]

    number = await control_plane.send(InstallEngine(engine="llamacpp"))
    await told(control_plane, agent, spec(gguf, "r2"))
    await eventually(lambda: control_plane.states("r2")[-1:] == ["failed"])
    assert control_plane.states("r2") == ["failed"]  # before anything was fetched for it
    assert control_plane.last("r2").status.reason == OFF
    assert control_plane.states("r1")[-1] == "ready"
    await eventually(
        lambda: control_plane.heartbeats[-1].errands and control_plane.heartbeats[-1].errands[-1].command == number
    )
    assert control_plane.heartbeats[-1].errands[-1].reason == OFF


async def test_a_choice_outlasts_the_agent_and_a_wrong_one_is_refused_with_the_builds_there_are(
    agent: AgentTask, control_plane: ControlPlane, agent_settings: AgentSettings
) -> None:
    agent.start()
    await eventually(lambda: control_plane.registers)
    await control_plane.send(SetEngineBuild(engine="llamacpp", build="cu13"))
    await control_plane.send(SetEngineBuild(engine="vllm", build=NONE))
    await eventually(lambda: len(control_plane.acks) == 2)
    assert [(ack.ok, ack.error) for ack in control_plane.acks] == [
        (False, "This node has no build 'cu13' of llamacpp; choose auto, named or none."),
        (True, ""),
    ]
    path = agent_settings.work_dir / "engines" / "chosen.json"
    assert json.loads(path.read_text()) == {"vllm": NONE}
    after = await Agent(agent_settings).register("127.0.0.1")
    assert after.inventory.engine_builds == {"vllm": NONE}
    assert "chosen      vllm: none" in inventory_text(after.inventory)
    path.unlink()
    assert (await Agent(agent_settings).register("127.0.0.1")).inventory.engine_builds == {}


async def test_a_choice_is_told_before_the_next_heartbeat_would(
    agent: AgentTask, control_plane: ControlPlane, gguf: Path
) -> None:
    control_plane.first = lambda: Welcome(node="n", heartbeat_s=3600)
    agent.start()
    await eventually(lambda: control_plane.heartbeats)
    await control_plane.send(Fetch(source=str(gguf)))
    await control_plane.send(SetEngineBuild(engine="llamacpp", build=NONE))
    await eventually(lambda: len(control_plane.heartbeats) == 2)
    found = control_plane.heartbeats[-1].inventory
    assert found
    assert not found.builds[0].usable
