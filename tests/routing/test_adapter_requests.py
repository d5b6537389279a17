"""Requests for LoRA adapters through a whole gateway: to real llama.cpp, and to a process as strict as vLLM (GW-44)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent.engines.base import Build, Launch
from agent.engines.llamacpp import LlamaCpp
from agent.host import Host
from agent.installer import Installer
from catalog import spec
from nodes.state import Endpoint
from routing.lora import Adapter
from tests.agent.conftest import free_port
from tests.agent.conftest import spec as shard_spec
from tests.routing.conftest import Start
from tests.routing.gateways import KEY, Running, code, contents, endpoint, eventually, grant, key_of
from tests.routing.test_adapters import Vllm, healthy, peft
from tests.stubs import tiny_gguf

BASE_ONLY, RED_ONLY = "sk-base" + "b" * 40, "sk-redd" + "r" * 40
GRANTS = (
    grant(),
    grant(BASE_ONLY, key_id=2, models=frozenset({"m"})),
    grant(RED_ONLY, key_id=3, models=frozenset({"red"})),
)
HOST = Host(address="127.0.0.1", architecture=os.uname().machine, cores=2, memory_bytes=2**33)


def model(*adapters: Adapter, **fields: Any) -> spec.Model:
    listed = tuple(spec.Adapter(each.name, each.source) for each in adapters)
    return spec.Model(name="m", aliases=("chat",), adapters=listed, **fields)


def vllm_endpoint(vllm: Vllm, replica: str = "m-1") -> Endpoint:
    return endpoint(vllm.port, replica, engine="vllm", max_loaded_adapters=vllm.limit, slots=64)


@pytest.fixture
async def vllm(tmp_path: Path) -> AsyncIterator[Vllm]:
    folder = tmp_path / "vllm"
    folder.mkdir()
    one = Vllm(folder)
    with one.serving(VLLM_API_KEY=key_of("m-1"), STUB_ADAPTER_S="0.1"):
        await one.ready()
        yield one


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


# --- vLLM ------------------------------------------------------------------------------------------------------------
async def test_a_cold_adapter_is_loaded_once_for_twenty_requests_and_the_base_goes_on(
    vllm: Vllm, tmp_path: Path, start: Start
) -> None:
    red = peft(tmp_path, "red")
    async with start(contents(vllm_endpoint(vllm), models=[model(red)])) as gateway:
        asked = [gateway.chat({"model": "red"}) for _ in range(20)]
        found = await asyncio.gather(*asked, gateway.chat({"model": "chat"}), gateway.chat())
        assert {said(each).split()[0] for each in found[:20]} == {red.engine_name}
        assert [said(each).split()[0] for each in found[20:]] == ["m", "m"]
        assert vllm.told("load", "unload") == ["load red"]
        assert found[0].headers["x-llmgw-model"] == "m"
        records = await gateway.records(22)
        assert sorted(each.adapter for each in records) == ["", ""] + ["red"] * 20
        assert {each.model for each in records} == {"m"}


async def test_a_streamed_answer_of_an_adapter_has_its_usage_counted_and_hidden(
    vllm: Vllm, tmp_path: Path, start: Start
) -> None:
    red = peft(tmp_path, "red")
    async with start(contents(vllm_endpoint(vllm), models=[model(red)])) as gateway:
        answer = await gateway.chat({"model": "red", "stream": True, "max_tokens": 3})
        events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert [json.loads(each[6:])["choices"][0]["delta"]["content"].strip() for each in events[1:-1]] == [
            red.engine_name,
            "word",
            "word",
        ]
        assert events[-1] == "data: [DONE]"
        [record] = await gateway.records()
        assert (record.adapter, record.completion_tokens, record.estimated) == ("red", 3, False)


async def test_the_least_recently_used_adapter_makes_room(vllm: Vllm, tmp_path: Path, start: Start) -> None:
    wanted = [peft(tmp_path, name) for name in ("red", "blue", "green")]
    async with start(contents(vllm_endpoint(vllm), models=[model(*wanted)])) as gateway:
        for name in ("red", "blue", "red", "green", "red", "blue"):
            assert said(await gateway.chat({"model": name})).startswith(f"{name}@")
    assert vllm.told("load", "unload") == [
        "load red",
        "load blue",
        "unload blue",
        "load green",
        "unload green",
        "load blue",
    ]


async def test_an_adapter_is_allowed_on_its_own(vllm: Vllm, tmp_path: Path, start: Start) -> None:
    red, blue = peft(tmp_path, "red"), peft(tmp_path, "blue")
    async with start(contents(vllm_endpoint(vllm), models=[model(red, blue)], grants=GRANTS)) as gateway:
        refused = [
            await gateway.chat({"model": "red"}, key=BASE_ONLY),
            await gateway.chat({"model": "blue"}, key=RED_ONLY),
            await gateway.chat({"model": "m"}, key=RED_ONLY),
            await gateway.chat({"model": "chat"}, key=RED_ONLY),
        ]
        assert [(each.status_code, code(each)) for each in refused] == [(403, "model_forbidden")] * 4
        assert "may not use model red" in refused[0].text
        hidden = await gateway.chat({"model": red.engine_name})
        assert (hidden.status_code, code(hidden)) == (404, "model_unknown")
        assert vllm.told("load") == []
        assert said(await gateway.chat({"model": "red"}, key=RED_ONLY)).startswith("red@")
        listed = {}
        for key in (KEY, BASE_ONLY, RED_ONLY):
            answer = await gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            listed[key] = [each["id"] for each in answer.json()["data"]]
        assert listed == {KEY: ["blue", "chat", "m", "red"], BASE_ONLY: ["chat", "m"], RED_ONLY: ["red"]}


async def test_a_client_cannot_name_an_adapter_past_its_key(vllm: Vllm, tmp_path: Path, start: Start) -> None:
    red = peft(tmp_path, "red")
    async with start(contents(vllm_endpoint(vllm), models=[model(red)], grants=GRANTS)) as gateway:
        for own in ({"lora": [{"id": 0, "scale": 1}]}, {"lora_path": red.engine_name}):
            refused = await gateway.chat({"model": "m", **own}, key=BASE_ONLY)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(own)))
        assert said(await gateway.chat({"model": "m", "lora": []}, key=BASE_ONLY)).startswith("m ")


async def test_an_adapter_that_cannot_be_loaded_is_named_and_the_base_is_well(
    vllm: Vllm, tmp_path: Path, start: Start
) -> None:
    broken = Adapter("red", str(tmp_path / "nowhere"), "")
    async with start(contents(vllm_endpoint(vllm), models=[model(broken)])) as gateway:
        for _ in range(5):
            failed = await gateway.chat({"model": "red"})
            assert (failed.status_code, code(failed)) == (502, "engine_failed")
            text = failed.json()["error"]["message"]
            assert text.startswith("Adapter red cannot be used now: the engine does not load it: Loading lora red@")
            assert "No adapter found for" in text
        [target] = gateway.gateway.plane.table.targets
        assert target.health.until is None
        assert said(await gateway.chat()).startswith("m ")


async def test_a_changed_adapter_is_another_version_and_the_old_one_answers_whoever_still_has_it(
    vllm: Vllm, tmp_path: Path, start: Start
) -> None:
    red = peft(tmp_path, "red")
    newer = tmp_path / "newer"
    newer.mkdir()
    second = Adapter("red", peft(newer, "red").source, "")
    store = contents(vllm_endpoint(vllm), models=[model(red)])
    async with start(store) as gateway:
        first = said(await gateway.chat({"model": "red"})).split()[0]
        gateway.store.change(models=(model(second),))
        await eventually(lambda: gateway.gateway.plane.table.revision == gateway.store.now.revision)
        assert said(await gateway.chat({"model": "red"})).split()[0] != first
    assert vllm.told("load", "unload") == ["load red", "load red"]


async def test_an_engine_that_lost_an_adapter_gets_it_again_unseen(vllm: Vllm, tmp_path: Path, start: Start) -> None:
    red = peft(tmp_path, "red")
    async with start(contents(vllm_endpoint(vllm), models=[model(red)])) as gateway:
        assert said(await gateway.chat({"model": "red"})).startswith("red@")
        async with vllm.client as http:
            http.headers["authorization"] = f"Bearer {key_of('m-1')}"
            gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": red.engine_name})
            assert gone.status_code == 200
        assert said(await gateway.chat({"model": "red"})).startswith("red@")
        [target] = gateway.gateway.plane.table.targets
        assert target.health.until is None
    assert vllm.told("load", "unload") == ["load red", "unload red", "load red"]


async def test_requests_follow_the_replica_that_has_the_adapter(vllm: Vllm, tmp_path: Path, start: Start) -> None:
    red = peft(tmp_path, "red")
    folder = tmp_path / "other"
    folder.mkdir()
    other = Vllm(folder)
    with other.serving(VLLM_API_KEY=key_of("m-2")):
        await other.ready()
        both = contents(vllm_endpoint(vllm), vllm_endpoint(other, "m-2"), models=[model(red)])
        async with start(both) as gateway:
            replicas = [(await gateway.chat({"model": "red"})).headers["x-llmgw-replica"] for _ in range(8)]
            assert len(set(replicas)) == 1
            bases = {(await gateway.chat()).headers["x-llmgw-replica"] for _ in range(8)}
            assert bases == {"m-1", "m-2"}
        assert sorted([*vllm.told("load"), *other.told("load")]) == ["load red"]


async def test_a_client_that_leaves_while_its_adapter_loads_harms_nobody(
    vllm: Vllm, tmp_path: Path, start: Start
) -> None:
    red = peft(tmp_path, "red")
    async with start(contents(vllm_endpoint(vllm), models=[model(red)])) as gateway:
        with pytest.raises(httpx.ReadTimeout):
            await gateway.chat({"model": "red"}, timeout=0.05)
        assert said(await gateway.chat({"model": "red"})).startswith("red@")
        await gateway.quiet()
        [target] = gateway.gateway.plane.table.targets
        assert target.in_flight == 0
        assert target.attached is not None
        assert target.attached.holdings is not None
        use = target.attached.holdings.use(red.engine_name)
        assert use is not None
        assert use.requests == 1
    assert vllm.told("load") == ["load red"]


# --- llama.cpp -------------------------------------------------------------------------------------------------------
PLAIN = f" {tiny_gguf.BASE}"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return asyncio.run(Installer(tmp_path_factory.mktemp("engines")).ensure("llamacpp", HOST))


@contextmanager
def llamacpp(build: Build, folder: Path, *names: str) -> Iterator[int]:
    """llama.cpp as the agent starts it: the tiny model with an adapter for each name. Its port, ready soon."""
    weights = str(tiny_gguf.write_model(folder / "tiny.gguf"))
    adapters = tuple(str(tiny_gguf.write_adapter(folder / f"{name}.gguf", name)) for name in names)
    launch = Launch(build, weights, free_port(), adapters=adapters, key=key_of("m-1"))
    (command,) = LlamaCpp().commands(shard_spec(weights, model="m"), HOST, launch)
    environment = {"PATH": os.environ["PATH"], **dict(command.env), **dict(command.secrets)}
    with (folder / "log").open("wb") as log, subprocess.Popen(command.argv, env=environment, stderr=log) as child:
        try:
            yield launch.port
        finally:
            child.kill()


@asynccontextmanager
async def tiny_gateway(build: Build, folder: Path, start: Start) -> AsyncIterator[Running]:
    with llamacpp(build, folder, "red", "blue") as port:
        await healthy(port)
        sources = tuple(str(folder / f"{name}.gguf") for name in ("red", "blue"))
        one = endpoint(port, adapters=("red", "blue"), adapter_sources=sources)
        held = (("red", sources[0]), ("blue", sources[1]), ("green", "/not-there-yet.gguf"))
        models = [spec.Model(name="m", adapters=tuple(spec.Adapter(*each) for each in held))]
        async with start(contents(one, models=models, grants=GRANTS)) as gateway:
            yield gateway


async def test_real_llamacpp_answers_with_the_adapter_asked_for_and_never_with_what_another_left(
    build: Build, tmp_path: Path, start: Start
) -> None:
    question = {"messages": [{"role": "user", "content": "hi there, friend of mine"}], "temperature": 0}
    async with tiny_gateway(build, tmp_path, start) as gateway:
        for _ in range(2):
            for name, word in (("red", "red"), ("m", "plain"), ("blue", "blue"), ("m", "plain")):
                answer = await gateway.chat({"model": name, **question})
                assert said(answer) == PLAIN.replace("plain", word)
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        again = await gateway.chat({"model": "m", **question})
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        records = await gateway.records(9)
        assert sorted(each.adapter for each in records) == [""] * 5 + ["blue"] * 2 + ["red"] * 2


async def test_every_way_to_ask_llamacpp_keeps_adapters_apart(build: Build, tmp_path: Path, start: Start) -> None:
    messages = {"messages": [{"role": "user", "content": "hi there, friend of mine"}], "temperature": 0}
    async with tiny_gateway(build, tmp_path, start) as gateway:

        async def text(path: str, body: dict[str, Any]) -> str:
            answer = await gateway.http.post(path, json=body, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200, answer.text
            return answer.text

        for name, word in (("red", "red answer"), ("m", "plain answer"), ("blue", "blue answer")):
            assert word in await text("/v1/completions", {"model": name, "prompt": "hi", "temperature": 0})
            assert word in await text("/v1/responses", {"model": name, "input": "hi", "temperature": 0})
            assert word in await text("/v1/messages", {"model": name, "max_tokens": 20, **messages})
            counted = json.loads(await text("/v1/messages", {"model": name, "max_tokens": 20, **messages}))["usage"]
            assert counted["output_tokens"] == 6
            streamed = await text("/v1/chat/completions", {"model": name, "stream": True, **messages})
            assert word.split()[0] in streamed


async def test_what_llamacpp_cannot_do_with_an_adapter_is_refused_with_what_to_do(
    build: Build, tmp_path: Path, start: Start
) -> None:
    async with tiny_gateway(build, tmp_path, start) as gateway:
        embedding = await gateway.chat(b'{"model":"red","input":"hi"}', path="/v1/embeddings")
        assert (embedding.status_code, code(embedding)) == (404, "route_unknown")
        assert "The engine of adapter red takes it at /v1/chat/completions" in embedding.text
        coming = await gateway.chat({"model": "green"})
        assert (coming.status_code, code(coming)) == (503, "model_loading")
        assert "Adapter green is not on any replica of model m yet" in coming.text
        forced = await gateway.chat(b'{"model":"m","messages":[],"l\\u006fra":[{"id":0,"scale":1}]}', key=BASE_ONLY)
        assert (forced.status_code, forced.json()["error"]["param"]) == (400, "lora")
        forbidden = await gateway.chat({"model": "blue"}, key=RED_ONLY)
        assert forbidden.status_code == 403
