"""The SDKs that people's programs are made of, and an editor's habits, against the real product."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import SecretStr

from tests.e2e.product import MODEL, Product, clean_environment, product
from tests.services import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CLIENTS = Path(__file__).parent / "clients"
TOOL_MODEL = "toolsmith"
"""The same weights under a chat template that knows tool calls."""
NOWHERE = "nowhere"
"""Published, and never run."""
GREETING: Any = [{"role": "user", "content": "Say hello."}]
CONVERSATION = json.loads((CLIENTS / "conversation.json").read_text())
TOOL: Any = {"type": "function", "function": CONVERSATION["tool"]}
EARLIER = CONVERSATION["earlier"]
TOOL_TALK: Any = [
    {"role": "user", "content": EARLIER["question"]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": EARLIER["id"],
                "type": "function",
                "function": {"name": TOOL["function"]["name"], "arguments": json.dumps(EARLIER["arguments"])},
            }
        ],
    },
    {"role": "tool", "tool_call_id": EARLIER["id"], "content": EARLIER["result"]},
    {"role": "user", "content": CONVERSATION["question"]},
]
WIDTH = 576
"""How many numbers the default model's embeddings have."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product() as one:
        catalog = yaml.safe_load(one.ctl("models", "export").stdout)
        (default,) = catalog["models"]
        (profile,) = default["profiles"]
        args = ["--ctx-size", "4096", "--jinja", "--chat-template", (CLIENTS / "tools.jinja").read_text()]
        talks = {**default, "name": TOOL_MODEL, "aliases": [], "profiles": [{**profile, "weight": 2, "args": args}]}
        never = {**default, "name": NOWHERE, "aliases": [], "scaling": {"min": 0, "max": 0}}
        path = tmp_path_factory.mktemp("catalog") / "models.yaml"
        path.write_text(yaml.safe_dump({**catalog, "models": [default, talks, never]}))
        applied = one.ctl("models", "apply", "--file", str(path))
        assert applied.returncode == 0, applied.stderr
        wait_until("both models answer", lambda: one.answers() and _answers(one, TOOL_MODEL), 240)
        yield one


def _answers(running: Product, model: str) -> bool:
    return running.chat(max_tokens=1, model=model).status_code == 200


def called(name: str, arguments: object) -> bool:
    return name == TOOL["function"]["name"] and arguments in ({"city": "Paris"}, {"city": "Rome"})


# --- openai-python ---------------------------------------------------------------------------------------------------
def test_openai_python_calls_tools_streamed_and_whole(running: Product) -> None:
    asked: Any = {"model": TOOL_MODEL, "messages": TOOL_TALK, "tools": [TOOL], "max_tokens": 40, "temperature": 0}
    with running.openai() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            stream.until_done()
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.id
        assert called(call.function.name, json.loads(call.function.arguments))


def test_openai_python_gets_the_same_embeddings_packed_and_as_numbers(running: Product) -> None:
    with running.openai() as client:
        packed = client.embeddings.create(model=MODEL, input=["one", "two"])  # it asks for base64 by itself
        numbers = client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [len(each.embedding) for each in packed.data] == [WIDTH, WIDTH]
    for one, other in zip(packed.data, numbers.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert packed.data[0].embedding != packed.data[1].embedding
    assert packed.usage.prompt_tokens > 0


def test_openai_python_gets_responses_whole_and_as_events(running: Product) -> None:
    with running.openai() as client:
        whole = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8)
        events = list(client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=8, stream=True))
    assert whole.output_text.strip()
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens <= 8
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.strip()


def test_openai_python_raises_its_own_class_for_each_kind_of_mistake(running: Product) -> None:
    long: Any = [{"role": "user", "content": "word " * 20_000}]
    with running.openai() as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="temperature"):
            create(model=MODEL, messages=GREETING, extra_body={"temperature": "warm"})
        with pytest.raises(openai.BadRequestError, match="context"):
            create(model=MODEL, messages=long)
        with pytest.raises(openai.NotFoundError, match=f"Did you mean {MODEL}"):
            create(model="smollm3", messages=GREETING)
        with pytest.raises(openai.InternalServerError, match=NOWHERE) as nowhere:
            create(model=NOWHERE, messages=GREETING)
    assert (nowhere.value.status_code, nowhere.value.code) == (503, "no_endpoint")
    assert int(nowhere.value.response.headers["retry-after"]) > 0
    with running.openai(key="sk-wrong") as stranger, pytest.raises(openai.AuthenticationError, match="sk-wron"):
        stranger.models.list()


def test_openai_python_waits_as_long_as_a_limit_says_and_then_gets_its_answer(running: Product) -> None:
    made = running.ctl_json("keys", "make", "one at a time")
    limited = running.api(f"/api/v1/keys/{made['key']['id']}/limits", {"max_concurrent": 1})
    assert limited["effective"]["max_concurrent"]["value"] == 1
    tries: list[tuple[int, float, float]] = []

    def note(response: Any) -> None:
        tries.append((response.status_code, float(response.headers.get("retry-after", 0)), time.monotonic()))

    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Tell a very long story."}]}
    notes = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    with notes, running.openai(key=made["secret"]) as client:
        patient = client.with_options(max_retries=100, http_client=notes)

        def limit_holds() -> bool:
            try:
                with client.chat.completions.create(**asked, max_tokens=1500, stream=True) as stream:
                    next(stream)
                    client.chat.completions.create(**asked, max_tokens=1)
            except openai.RateLimitError as refused:
                return refused.code == "rate_limited"
            return False

        wait_until("the limit holds", limit_holds, 30)
        waits = client.with_options(max_retries=100)  # for the end of the stream that has just been left
        stream = waits.chat.completions.create(**asked, max_tokens=300, stream=True)
        next(stream)
        reading = Thread(target=lambda: list(stream))
        reading.start()
        answer = patient.chat.completions.create(**asked, max_tokens=1)
        reading.join()
    assert answer.usage is not None
    assert [status for status, _, _ in tries[:-1]] == [429] * (len(tries) - 1)
    assert tries[0][0] == 429
    for (_, wish, before), (_, _, after) in pairwise(tries):
        assert wish >= 1
        assert after - before >= wish


# --- LangChain -------------------------------------------------------------------------------------------------------
def test_langchain_talks_streams_calls_tools_and_embeds(running: Product) -> None:
    url, key = f"{running.base_url}/v1", SecretStr(running.key)
    plain = ChatOpenAI(model=MODEL, base_url=url, api_key=key, max_completion_tokens=8)
    talks = ChatOpenAI(model=TOOL_MODEL, base_url=url, api_key=key, max_completion_tokens=40, temperature=0)
    answer = plain.invoke("Say hello.")
    assert str(answer.content).strip()
    assert answer.usage_metadata is not None
    assert 0 < answer.usage_metadata["output_tokens"] <= 8
    assert len([piece for piece in plain.stream("Say hello.") if piece.content]) > 1
    name = TOOL["function"]["name"]
    earlier = AIMessage("", tool_calls=[{"name": name, "args": EARLIER["arguments"], "id": EARLIER["id"]}])
    (call,) = (
        talks.bind_tools([TOOL])
        .invoke(
            [
                HumanMessage(EARLIER["question"]),
                earlier,
                ToolMessage(EARLIER["result"], tool_call_id=EARLIER["id"]),
                HumanMessage(CONVERSATION["question"]),
            ]
        )
        .tool_calls
    )
    assert called(call["name"], call["args"])
    # Its own cutting into tokens is OpenAI's, and would be fetched from the net.
    embeds = OpenAIEmbeddings(model=MODEL, base_url=url, api_key=key, check_embedding_ctx_length=False)
    assert [len(each) for each in embeds.embed_documents(["one", "two"])] == [WIDTH, WIDTH]


# --- the Anthropic SDK -----------------------------------------------------------------------------------------------
def test_anthropic_talks_streams_and_calls_tools(running: Product) -> None:
    with anthropic.Anthropic(base_url=running.base_url, api_key=running.key, max_retries=0, timeout=180) as client:
        asked: Any = {"model": MODEL, "messages": GREETING, "max_tokens": 8}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = "".join(stream.text_stream)
            final = stream.get_final_message()
        use: Any = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": EARLIER["arguments"]}
        result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": EARLIER["result"]}
        called_for = client.messages.create(
            model=TOOL_MODEL,
            max_tokens=40,
            extra_body={"temperature": 0},
            tools=[{"name": "get_weather", "input_schema": CONVERSATION["tool"]["parameters"]}],
            messages=[
                {"role": "user", "content": EARLIER["question"]},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result, {"type": "text", "text": CONVERSATION["question"]}]},
            ],
        )
        counted = client.messages.count_tokens(model=MODEL, messages=GREETING)
        with pytest.raises(anthropic.NotFoundError, match="GET /v1/models"):
            client.messages.create(**{**asked, "model": "nothing"})
    assert whole.content[0].type == "text"
    assert whole.content[0].text.strip()
    assert 0 < whole.usage.output_tokens <= 8
    assert streamed.strip()
    assert final.stop_reason in ("max_tokens", "end_turn")
    assert called_for.stop_reason == "tool_use"
    assert called_for.content[-1].type == "tool_use"
    assert called(called_for.content[-1].name, called_for.content[-1].input)
    assert counted.input_tokens > 0
    stranger = anthropic.Anthropic(base_url=running.base_url, api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="sk-wron"):
        stranger.messages.create(**asked)


# --- JavaScript ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def node() -> Path:
    """Node.js, with the packages of package.json beside the programs."""
    for program in ("node", "npm"):
        assert shutil.which(program), f"{program} is missing. On Debian, as root: apt-get install -y nodejs npm"
    wanted = json.loads((CLIENTS / "package.json").read_text())["dependencies"]

    with (CLIENTS / "package.json").open("rb") as only_one:  # worker of the tests installs them
        fcntl.flock(only_one, fcntl.LOCK_EX)
        _install(wanted)
    return Path(shutil.which("node") or "")


def _install(wanted: dict[str, str]) -> None:
    def there(name: str) -> bool:
        path = CLIENTS / "node_modules" / name / "package.json"
        return path.exists() and json.loads(path.read_text())["version"] == wanted[name]

    if not all(there(name) for name in wanted):
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"npm cannot install the JavaScript clients: {done.stderr[-2000:]}"


def saw(running: Product, node: Path, program: str) -> Any:
    environment = {"BASE_URL": running.base_url, "API_KEY": running.key, "MODEL": MODEL, "TOOL_MODEL": TOOL_MODEL}
    done = subprocess.run(
        [node, CLIENTS / program],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai_node_gets_all_that_openai_python_gets(running: Product, node: Path) -> None:
    seen = saw(running, node, "openai.mjs")
    assert seen["plain"]["text"].strip()
    assert 0 < seen["plain"]["tokens"] <= 8
    assert seen["stream"]["text"].strip()
    assert seen["stream"]["usages"] == 1
    assert called(seen["tool"]["name"], seen["tool"]["arguments"])
    assert seen["response"].strip()
    assert (seen["events"][0], seen["events"][-1]) == ("response.created", "response.completed")
    assert seen["embeddings"] == [WIDTH, WIDTH]
    assert seen["apart"] < 1e-5
    assert {MODEL, TOOL_MODEL} <= set(seen["models"])
    assert seen["mistake"] == {"kind": "NotFoundError", "status": 404, "code": "model_unknown"}


def test_the_vercel_ai_sdk_talks_streams_calls_tools_and_embeds(running: Product, node: Path) -> None:
    seen = saw(running, node, "ai.mjs")
    assert seen["plain"]["text"].strip()
    assert 0 < seen["plain"]["tokens"] <= 8
    assert seen["stream"]["text"].strip()
    assert seen["stream"]["pieces"] > 1
    assert 0 < seen["stream"]["tokens"] <= 8
    assert called(seen["tool"]["name"], seen["tool"]["arguments"])
    assert seen["embeddings"] == [WIDTH, WIDTH]
    assert (seen["mistake"]["status"], seen["mistake"]["retryable"]) == (404, False)
    assert "GET /v1/models" in seen["mistake"]["text"]


# --- an editor's habits ----------------------------------------------------------------------------------------------
NULLS = (
    *(
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stop",
        "seed",
        "temperature",
        "top_p",
    ),
    *("n", "user", "metadata", "response_format", "logit_bias", "logprobs", "top_logprobs", "frequency_penalty"),
    *("presence_penalty", "reasoning_effort", "max_completion_tokens"),
)


@pytest.mark.parametrize(
    "habit",
    [
        dict.fromkeys(NULLS),
        {"stream": False, "stream_options": None, "store": False, "editor": {"version": [1, None]}, "n_keep": 0},
        {"max_tokens": None, "max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 3},
        {"tools": [], "stop": [], "metadata": {}},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi."}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]},
    ],
    ids=["nulls", "unknown fields", "one bound null", "both bounds", "empty lists", "system message", "parts"],
)
def test_what_editors_send_is_taken(running: Product, habit: dict[str, Any]) -> None:
    answer = running.chat(**{"max_tokens": 3, **habit})
    assert answer.status_code == 200, answer.text
    assert 0 < answer.json()["usage"]["completion_tokens"] <= 3


def test_an_answer_goes_back_as_it_came(running: Product) -> None:
    with running.openai() as client:
        first = client.chat.completions.create(model=MODEL, messages=GREETING, max_tokens=4).choices[0].message
        said = first.model_dump()
    assert None in said.values(), "an SDK's message is full of nulls"
    talk = [*GREETING, said, {"role": "user", "content": "And again."}]
    answer = running.chat(max_tokens=3, messages=talk)
    assert answer.status_code == 200, answer.text


def test_usage_comes_in_a_stream_only_when_asked_for(running: Product) -> None:
    for options, count in ((None, 0), ({}, 0), ({"include_usage": None}, 0), ({"include_usage": True}, 1)):
        answer = running.chat(max_tokens=3, stream=True, stream_options=options)
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.text.count('"usage":{') == count, options


@pytest.mark.parametrize("stream", ["true", 1, []])
def test_a_stream_that_is_no_boolean_is_refused_with_the_field(running: Product, stream: object) -> None:
    answer = running.chat(stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_json_is_json_whatever_its_headers_call_it(running: Product, kind: str | None) -> None:
    body = json.dumps({"model": MODEL, "messages": GREETING, "max_tokens": 2}).encode()
    for name in ("Authorization", "x-api-key", "api-key"):
        headers = {name: f"Bearer {running.key}" if name == "Authorization" else running.key}
        headers |= {} if kind is None else {"Content-Type": kind}
        answer = httpx.post(f"{running.base_url}/v1/chat/completions", content=body, headers=headers, timeout=180)
        assert answer.status_code == 200, answer.text
