"""LoRA adapters on a node: fetched with the weights, held unapplied by llama.cpp, chosen by each request (CAT-40)."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from agent import launching, validate
from agent.config import AgentSettings
from agent.engines.base import Build, Launch
from agent.engines.llamacpp import LlamaCpp
from agent.host import Host
from agent.protocol import Adapter, StartShard
from tests.agent.conftest import AgentTask, ControlPlane, eventually, settings_for, spec
from tests.stubs import tiny_gguf

HOST = Host(address="10.0.0.7", architecture="x86_64", cores=8, memory_bytes=32 * 2**30)
PLAIN = f" {tiny_gguf.BASE}"
RED = (Adapter(name="red", source="/a/red.gguf"),)


def command_line(*args: str, adapters: tuple[str, ...]) -> str:
    launch = Launch(Build("named", "1", ("llama-server",)), weights="/m/a.gguf", port=21007, adapters=adapters)
    (command,) = LlamaCpp().commands(spec("/m/a.gguf", args=args), HOST, launch)
    return " ".join(command.argv)


def test_adapters_are_held_unapplied_in_order_and_the_prompt_cache_is_off() -> None:
    assert command_line("--top-k", "1", adapters=("/a/red.gguf", "/a/blue.gguf")) == (
        "llama-server --model /m/a.gguf --alias tiny --host 10.0.0.7 --port 21007"
        " --lora-scaled /a/red.gguf:0 --lora-scaled /a/blue.gguf:0"
        " --parallel 1 --ctx-size 4096 --threads 4 --n-gpu-layers 0 --cache-ram 0 --metrics --offline --no-ui --top-k 1"
    )


def test_a_profile_that_turns_the_prompt_cache_on_is_refused_while_there_are_adapters() -> None:
    for args in (("--cache-ram", "512"), ("-cram=512",)):
        assert validate.refusal(spec("/m/a.gguf", args=args), HOST) is None
        refused = validate.refusal(spec("/m/a.gguf", args=args, adapters=RED), HOST)
        assert str(refused).startswith("args: Leave --cache-ram out")


def test_an_adapter_that_cannot_be_fetched_is_refused_by_name() -> None:
    one = msgspec.structs.replace(spec("/m/a.gguf"), adapters=(Adapter(name="red", source="org/red"),))
    assert str(validate.refusal(one, HOST)).startswith("adapter red: source 'org/red' is not one that a node can fetch")


@pytest.mark.parametrize(
    ("path", "head", "says"),
    [
        ("/a/red.gguf", b"GGUF", ""),
        ("/a/red", b"", "is not a GGUF file"),
        ("/a/red.bin", b"PK\3\4", "is not a GGUF file"),
        ("/a/x:y.gguf", b"GGUF", "comma or colon"),
        ("/a/x,y.gguf", b"GGUF", "comma or colon"),
    ],
)
def test_an_adapter_must_be_a_gguf_file_that_llamacpp_can_be_told_of(path: str, head: bytes, says: str) -> None:
    found = validate.adapter_refusal("llamacpp", "red", path, is_file=bool(head), head=head)
    assert (says in found and found.startswith(f"adapter red: {path} ")) if found else not says


def test_what_other_engines_take_for_an_adapter_is_theirs_to_say() -> None:
    assert validate.adapter_refusal("vllm", "red", "/a/red", is_file=False, head=b"") is None


def test_an_adapter_that_is_not_there_says_so(tmp_path: Path) -> None:
    assert "is not a GGUF file" in str(launching.look_at_adapter("llamacpp", "red", tmp_path / "none.gguf", tmp_path))


# --- the real thing --------------------------------------------------------------------------------------------------
@pytest.fixture
def agent_settings(control_plane: ControlPlane, tmp_path: Path) -> AgentSettings:
    return settings_for(control_plane.url, tmp_path, None)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[str]:
    """A web server with an adapter on it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    tiny_gguf.write_adapter(folder / "blue.gguf", "blue")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.timeout(300)
async def test_real_llamacpp_answers_with_the_adapter_that_a_request_names_and_with_the_base_otherwise(
    agent: AgentTask, control_plane: ControlPlane, tmp_path: Path, shelf: str
) -> None:
    adapters = (
        Adapter(name="red", source=str(tiny_gguf.write_adapter(tmp_path / "red.gguf", "red"))),
        Adapter(name="blue", source=f"{shelf}/blue.gguf"),
    )
    agent.start()
    await eventually(lambda: control_plane.registers)
    shard = spec(tiny_gguf.write_model(tmp_path / "tiny.gguf"), adapters=adapters)
    await control_plane.send(StartShard(spec=shard))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["ready"], limit_s=240, what=f"\n{agent.log}")
    fetched = agent.settings.work_dir / "models"
    assert [path.name for path in fetched.rglob("*.gguf")] == ["blue.gguf"]

    url = f"http://127.0.0.1:{control_plane.last('r1').status.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        attached = (await http.get("/lora-adapters")).json()
        assert [(each["id"], each["scale"]) for each in attached] == [(0, 0.0), (1, 0.0)]

        async def ask(scales: tuple[float, ...] | None, words: str = "hi there, friend of mine") -> tuple[str, int]:
            body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "temperature": 0}
            if scales is not None:
                body["lora"] = [{"id": number, "scale": scale} for number, scale in enumerate(scales)]
            answer = (await http.post("/v1/chat/completions", json=body)).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["message"]["content"], cached

        assert await ask(None, "how are you") == (PLAIN, 0)
        for _ in range(2):  # what one adapter computed is never another's, nor the base's
            assert await ask((1, 0)) == (PLAIN.replace("plain", "red"), 0)
            assert await ask((0, 1)) == (PLAIN.replace("plain", "blue"), 0)
            assert await ask((0, 0)) == (PLAIN, 0)
        assert (await ask((0, 0)))[1] > 0  # and its own is used again


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("none.gguf", "adapter red: {path} is not on this node. Put the weights there, or correct the source."),
        ("text.gguf", "adapter red: {path} is not a GGUF file. llama.cpp needs a LoRA adapter converted to GGUF."),
        ("other.gguf", "adapter red: It was made for qwen2, and the model is llama. Name one that was made for it."),
    ],
)
@pytest.mark.timeout(300)
async def test_a_shard_whose_adapter_is_missing_or_wrong_fails_and_says_which(
    agent: AgentTask, control_plane: ControlPlane, tmp_path: Path, source: str, says: str
) -> None:
    (tmp_path / "text.gguf").write_text("no adapter")
    tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2")
    path = tmp_path / source
    agent.start()
    await eventually(lambda: control_plane.registers)
    model = tiny_gguf.write_model(tmp_path / "tiny.gguf")
    await control_plane.send(StartShard(spec=spec(model, adapters=(Adapter(name="red", source=str(path)),))))
    await eventually(lambda: control_plane.states("r1")[-1:] == ["failed"], limit_s=240, what=f"\n{agent.log}")
    failed = control_plane.last("r1")
    assert failed.status.reason == says.format(path=path)
