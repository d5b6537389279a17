"""What a node holds is told again when it has changed, and not otherwise."""

from __future__ import annotations

from pathlib import Path

from agent.config import AgentSettings
from agent.main import Agent


async def test_a_heartbeat_tells_the_inventory_only_when_a_file_has_come(tmp_path: Path) -> None:
    agent = Agent(AgentSettings(node="n", work_dir=tmp_path))
    first = (await agent.register("127.0.0.1")).inventory
    assert first.files == ()
    assert (await agent.heartbeat(first)).inventory is None
    folder = tmp_path / "models" / "url" / "x"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "a.gguf.sealed").write_bytes(b"{}")
    told = (await agent.heartbeat(first)).inventory
    assert told is not None
    assert [(Path(file.path).name, file.size_bytes) for file in told.files] == [("a.gguf", 4)]
    assert (await agent.heartbeat(told)).inventory is None
    assert (await agent.heartbeat(first)).inventory is not None, "another stream has not heard of it"
