"""How a request reaches its adapter and no other, and what an engine holds of them (GW-44, CAT-40)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from routing import forms, lora
from routing.lora import COOL_S, COOLEST_S, Adapter, Attached, Cooling, Holdings, Room, Use, adapter, attach
from routing.openai import Refusal, peek
from routing.table import Target
from tests.routing.gateways import endpoint

CHAT = "/v1/chat/completions"
RED, BLUE = adapter("red", "/a/red"), adapter("blue", "/a/blue")
NEWER = adapter("red", "/a/red-2")
NOBODY: frozenset[str] = frozenset()


def attached(engine: str, *names: str, limit: int | None = None) -> Attached:
    found = attach(engine, "m", names, tuple(f"/a/{name}" for name in names), limit)
    assert found is not None
    return found


def fitted(place: Attached, body: dict[str, Any], wanted: Adapter | None = None, *, usage: bool = False) -> bytes:
    text = json.dumps(body).encode()
    return place.fitted(text, peek(text), wanted, add_usage=usage)


# --- bodies ----------------------------------------------------------------------------------------------------------
def test_llamacpp_hears_of_every_adapter_in_every_request_and_the_rest_stays_as_it_was() -> None:
    place = attached("llamacpp", "red", "blue")
    rest = b' "model": "m", "messages": [], "stop": null}'
    none, red = b'{"lora":[{"id":0,"scale":0},{"id":1,"scale":0}],', b'{"lora":[{"id":0,"scale":1},{"id":1,"scale":0}],'
    assert place.fitted(b"{" + rest, peek(b"{" + rest), None, add_usage=False) == none + rest
    asked = b"{" + rest.replace(b'"m"', b'"red"')
    assert place.fitted(asked, peek(asked), RED, add_usage=False) == red + rest
    assert json.loads(fitted(place, {"model": "blue"}, BLUE))["lora"] == [{"id": 0, "scale": 0}, {"id": 1, "scale": 1}]


def test_usage_is_asked_for_beside_the_adapter() -> None:
    body = {"model": "red", "stream": True, "messages": []}
    for place in (attached("llamacpp", "red"), attached("vllm", limit=1)):
        assert json.loads(fitted(place, body, RED, usage=True))["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("place", "wanted", "name"),
    [
        (attached("vllm", limit=2), RED, RED.engine_name),
        (attached("vllm", limit=2), NEWER, NEWER.engine_name),
        (attached("vllm", "red"), RED, RED.engine_name),
        (attached("vllm", "red"), NEWER, RED.engine_name),  # what it was started with, until it is replaced
        (attached("sglang", limit=2), RED, f"m:{RED.engine_name}"),
        (attached("vllm", "red"), None, "m"),
        (attached("sglang", limit=2), None, "m"),
        (attached("llamacpp", "red"), RED, "m"),
    ],
)
def test_each_engine_gets_the_name_that_it_knows(place: Attached, wanted: Adapter | None, name: str) -> None:
    asked = "chat" if wanted is None else wanted.name
    found = json.loads(fitted(place, {"model": asked, "messages": []}, wanted))
    assert found["model"] == name
    assert ("lora" in found) == (place.engine == "llamacpp")


def test_versions_of_an_adapter_go_by_names_of_their_own() -> None:
    assert RED.engine_name != NEWER.engine_name
    assert RED.engine_name.startswith("red@")
    assert adapter("red", "/a/red") == RED


def test_a_form_gets_the_name_unquoted() -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n'
    body = form % b"red"
    place = attached("vllm", limit=1)
    found = place.fitted(body, forms.peek(body, b"b"), RED, add_usage=False)
    assert found == form % RED.engine_name.encode()


@pytest.mark.parametrize(
    "own",
    [
        b'"lora":[{"id":0,"scale":1}]',
        b'"l\\u006fra":[{"id":0,"scale":1}]',
        b'"lora_path":"red"',
        b'"lora": 1',
        b'"lora":[{"id":0,"scale":0}]',
    ],
)
@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "sglang"])
def test_a_client_chooses_adapters_by_the_models_name_alone(own: bytes, engine: str) -> None:
    body = b'{"model":"m",' + own + b"}"
    with pytest.raises(Refusal, match="is not taken here") as refused:
        attached(engine, "red").fitted(body, peek(body), None, add_usage=False)
    assert (refused.value.kind.status, refused.value.param) == (400, "lora_path" if b"_path" in own else "lora")


@pytest.mark.parametrize("own", [b'"lora":[]', b'"lora":null', b'"lora_path":""', b'"lora_path":null,"lora":[]'])
def test_an_empty_choice_of_the_clients_is_dropped(own: bytes) -> None:
    body = b'{ "model":"m",' + own + b',"seed":1.50}'
    found = attached("llamacpp", "red").fitted(body, peek(body), None, add_usage=False)
    assert found == b'{"lora":[{"id":0,"scale":0}],"model":"m","seed":1.50}'


def test_what_only_looks_like_a_choice_is_left_alone() -> None:
    for body in (b'{"model":"m","user":"lora"}', b'{"model":"m","x":{"lora":[1]}}', b'{"model":"m","t":"\\u00e9"}'):
        assert lora.without_choice(body) is body
        assert attached("vllm", "red").fitted(body, peek(body), None, add_usage=False) == body


@given(st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=5), max_size=4), st.booleans())
def test_whatever_stands_in_a_body_stays_in_it(extra: dict[str, Any], usage: bool) -> None:
    extra = {name: value for name, value in extra.items() if name not in ("lora", "lora_path", "stream_options")}
    body = {**extra, "model": "red"}
    expected = {**body, "model": "m", "lora": [{"id": 0, "scale": 1}]}
    expected |= {"stream_options": {"include_usage": True}} if usage else {}
    text = json.dumps(body).encode()
    try:
        seen = peek(text)
    except Refusal:
        return
    assert json.loads(attached("llamacpp", "red").fitted(text, seen, RED, add_usage=usage)) == expected


# --- who takes what --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Spot:
    replica: str
    attached: Attached | None


NONE = Spot("none", None)
LLAMA = Spot("llama", attached("llamacpp", "red"))
FIXED = Spot("fixed", attached("vllm", "red"))
FREE = Spot("free", attached("vllm", limit=2))
SPOTS = [NONE, LLAMA, FIXED, FREE]


@pytest.mark.parametrize(
    ("path", "wanted", "names"),
    [
        (CHAT, None, ["none", "llama", "fixed", "free"]),
        (CHAT, RED, ["llama", "fixed", "free"]),
        (CHAT, BLUE, ["free"]),
        ("/v1/responses", RED, ["llama", "fixed", "free"]),
        ("/v1/messages", None, ["none", "llama", "fixed", "free"]),
        ("/v1/messages", RED, ["llama", "fixed", "free"]),
        ("/v1/embeddings", None, ["none", "llama", "fixed", "free"]),
        ("/v1/embeddings", RED, ["fixed", "free"]),
        ("/v1/whatever", None, ["none", "fixed", "free"]),
    ],
)
def test_only_endpoints_that_keep_adapters_apart_take_a_request(
    path: str, wanted: Adapter | None, names: list[str]
) -> None:
    assert [each.replica for each in lora.able(SPOTS, path, wanted)] == names


@pytest.mark.parametrize("adapters", [(), ("red",)])
def test_llamacpp_is_asked_for_chat_where_it_mixes_adapters_up_or_loses_events(
    adapters: tuple[str, ...],
) -> None:
    def lacking(engine: str) -> set[str]:
        place = endpoint(9, engine=engine, adapters=adapters, adapter_sources=adapters)
        return Target(place, "k").lacks

    assert [lacking(engine) for engine in ("llamacpp", "vllm", "sglang")] == [{"/v1/messages"}, set(), set()]


def test_only_where_adapters_come_and_go_must_one_be_taken_into_use() -> None:
    assert [lora.comes_and_goes(each.attached) for each in SPOTS] == [False, False, False, True]


def test_an_endpoint_that_was_started_without_adapters_has_none() -> None:
    assert attach("llamacpp", "m", (), (), None) is None
    assert attach("vllm", "m", (), (), None) is None


@pytest.mark.parametrize(
    ("path", "wanted", "spots", "code", "says"),
    [
        (
            "/v1/new",
            None,
            [LLAMA],
            "route_unknown",
            "Model m has adapters, which its engine cannot keep apart at /v1/n",
        ),
        ("/v1/rerank", RED, [LLAMA], "route_unknown", "The engine of adapter red takes it at /v1/chat/completions,"),
        (CHAT, BLUE, [NONE, LLAMA], "model_loading", "Adapter blue is not on any replica of model m yet. Try again"),
        (CHAT, BLUE, [], "model_loading", "Adapter blue is not on any replica of model m yet. Try again"),
    ],
)
def test_what_nobody_takes_is_refused_with_what_to_do(
    path: str, wanted: Adapter | None, spots: list[Spot], code: str, says: str
) -> None:
    refusal = lora.unable("m", path, wanted, [each.attached for each in spots])
    assert refusal.code == code
    assert refusal.message.startswith(says)


def test_replicas_that_hold_an_adapter_or_are_getting_it_are_preferred() -> None:
    first, second = Spot("a", attached("vllm", limit=2)), Spot("b", attached("vllm", limit=2))
    assert lora.holders([first, second, LLAMA, NONE], RED) == frozenset()
    assert first.attached is not None
    assert first.attached.holdings is not None
    first.attached.holdings.begin(RED.engine_name, 0)
    assert lora.holders([first, second], RED) == {"a"}
    first.attached.holdings.loaded(RED.engine_name)
    assert lora.holders([first, second], RED) == {"a"}
    assert lora.holders([first, second], NEWER) == frozenset()


# --- holdings --------------------------------------------------------------------------------------------------------
A, B, C, D = (adapter(name, "/a").engine_name for name in "abcd")


def holding(limit: int, *names: str) -> Holdings:
    made = Holdings(limit)
    for name in names:
        assert made.begin(name, 0) is None
        made.loaded(name)
    return made


def used(held: Holdings, name: str) -> Use:
    found = held.use(name)
    assert found is not None
    return found


def test_the_idle_one_that_was_used_longest_ago_makes_room() -> None:
    held = holding(3, A, B, C)
    first, second = used(held, A), used(held, B)
    held.release(first)
    held.release(second)
    used(held, C)
    assert held.full
    assert [held.room(NOBODY), held.room(NOBODY)] == [A, Room.FREE]
    assert held.use(A) is None


def test_one_in_use_is_never_unloaded_whoever_uses_it() -> None:
    held = holding(2, A, B)
    used(held, A)
    assert held.room(frozenset({B})) is Room.NONE
    assert held.room(frozenset({A})) == B
    held = holding(1, A)
    first, second = used(held, A), used(held, A)
    held.release(first)
    assert held.room(NOBODY) is Room.NONE
    held.release(second)
    assert held.room(NOBODY) == A


def test_what_the_engine_says_counts_and_what_others_put_there_is_left_alone() -> None:
    held = holding(2, A, B)
    before = used(held, B)
    held.found([B, C, "operators-own", "own@elsewhere"])
    assert [name for name in (A, B, C) if held.has(name)] == [B, C]
    assert held.room(NOBODY) == C
    held.found([])  # it was started anew
    assert not held.has(B)
    held.begin(B, 0)
    held.found([B])
    held.loaded(B)
    after = used(held, B)
    held.release(before)  # which ended only now, and says nothing of what came after it
    held.limit = 1
    assert held.room(NOBODY) is Room.NONE
    held.release(after)
    assert held.room(NOBODY) == B


def test_a_failed_load_is_left_alone_for_longer_each_time_and_a_success_ends_that() -> None:
    held, now, waits = Holdings(1), 0.0, []
    for _ in range(8):
        assert held.begin(A, now) is None
        held.failed(A, "no such file", now)
        cooling = held.begin(A, now)
        assert isinstance(cooling, Cooling)
        assert cooling.reason == "no such file"
        waits.append(cooling.wait_s)
        now += cooling.wait_s
    assert waits[:3] == [COOL_S, 2 * COOL_S, 4 * COOL_S]
    assert waits[-1] == COOLEST_S
    assert held.begin(A, now) is None
    held.loaded(A)
    held.found([])
    assert held.begin(A, now) is None
    held.failed(A, "gone", now)
    assert held.begin(A, now) == Cooling("gone", COOL_S)
    assert held.begin(B, now) is None
    held.failed(B, None, now)
    assert held.begin(B, now) is None


def test_what_is_remembered_of_failures_is_bounded() -> None:
    held = Holdings(1)
    for number in range(lora.REMEMBERED + 1):
        held.begin(f"n{number}@00000000", 0)
        held.failed(f"n{number}@00000000", "no", 0)
    assert held.begin("n0@00000000", 0) is None
    assert isinstance(held.begin("n1@00000000", 0), Cooling)


class Engines(RuleBasedStateMachine):
    """One gateway's holdings beside the engine itself, whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Holdings(2)
        self.engine: set[str] = set()
        self.users: list[tuple[str, Use]] = []
        self.cut: list[Use] = []
        """Of requests that ended with the engine, and have not been told of yet."""
        self.coming: set[str] = set()

    @rule(name=st.sampled_from([A, B, C, D]))
    def ask(self, name: str) -> None:
        use = self.held.use(name)
        if use is not None:
            self.users.append((name, use))
        elif not self.held.has(name) and self.held.begin(name, 0) is None:
            self.coming.add(name)

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), works=st.booleans())
    def bring(self, data: st.DataObject, works: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.coming)))
        self.held.found(self.engine)
        while (first := self.held.room(NOBODY)) is not Room.FREE:
            if first is Room.NONE:
                return
            assert first not in [name for name, _ in self.users], "one in use was unloaded"
            self.engine.discard(first)
        self.coming.discard(name)
        if works:
            self.engine.add(name)
            self.held.loaded(name)
        else:
            self.held.failed(name, None, 0)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, use = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.held.release(use)

    @precondition(lambda self: self.cut)
    @rule()
    def end_late(self) -> None:
        self.held.release(self.cut.pop())

    @rule()
    def restart(self) -> None:
        self.engine.clear()
        self.held.found(())
        self.cut += [use for _, use in self.users]
        self.users.clear()

    @invariant()
    def never_more_than_it_may(self) -> None:
        assert len(self.engine) <= 2

    @invariant()
    def what_is_in_use_is_there(self) -> None:
        assert {name for name, _ in self.users} <= self.engine


TestEngines = Engines.TestCase


# --- what engines say ------------------------------------------------------------------------------------------------
def test_adapters_are_told_from_models_by_their_parent() -> None:
    cards = [{"id": "m", "parent": None}, {"id": A, "parent": "m"}, {"id": "x", "object": "model"}]
    assert lora.listed(json.dumps({"object": "list", "data": cards}).encode()) == {A}
    assert lora.listed(b'{"object":"list"}') == frozenset()


def test_the_newest_series_says_what_runs() -> None:
    line = 'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{}",waiting_lora_adapters=""}} {}\n'
    page = line.format("a@1,b@2", "1.7953e+09") + line.format("c@3", "1.7954e+09") + line.format("", "1.7952e+09")
    assert lora.running(page) == {"c@3"}
    assert lora.running("vllm:num_requests_running 1\n") == frozenset()
