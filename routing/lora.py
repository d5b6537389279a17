"""How a request reaches the LoRA adapter that it asks for, and no other (CAT-40, GW-44). Pure.

llama.cpp  holds all from its start: every request says a scale for each, the base 0 for all
vLLM       an adapter is a model of a name of its own
SGLang     the model's name is BASE:ADAPTER
The latter two hold what they were started with, or load what is asked for: `Holdings` says what to load and unload.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

import msgspec

from agent import protocol
from routing import openai
from routing.openai import Refusal
from routing.shapes import Peek

LLAMACPP, SGLANG = "llamacpp", "sglang"
CHOOSING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Where llama.cpp hears of `lora`."""
MESSAGES = "/v1/messages"
"""Where it drops the field, and may go on from what another adapter left in its cache. Its streams there lack their
first event when the first token is no whole character, which clients take for no answer at all."""
CACHELESS = frozenset({"/v1/embeddings", "/v1/rerank", "/v1/messages/count_tokens"})
"""Where it needs not to hear of it, as long as the base is asked for."""
OWN_FIELDS = ("lora", "lora_path")
"""By which clients could choose adapters past their permissions."""
COOL_S, COOLEST_S = 10.0, 300.0
"""How long an adapter that failed to load is left alone, first and at most; doubled by each failure in a row."""
REMEMBERED = 256
ROLLING_RETRY_S = 5
_OURS = re.compile(r".+@[0-9a-f]{8}\Z", re.DOTALL)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Adapter:
    """One as the catalog has it now. `engine_name` names this version of it where it is loaded: the same weights never
    go by two names for long, other weights never by one, and no adapter by the name of a model."""

    name: str
    source: str
    engine_name: str


def adapter(name: str, source: str) -> Adapter:
    return Adapter(name, source, protocol.engine_name(name, source))


def not_well(engine: str) -> frozenset[str]:
    """Routes at which an engine is asked for chat completions, as if it did not have them."""
    return frozenset((MESSAGES,)) if engine == LLAMACPP else frozenset()


# --- one endpoint ----------------------------------------------------------------------------------------------------
class Attached:
    """What one endpoint makes of adapters. `holdings`: of an engine that loads them as it runs."""

    __slots__ = ("_base", "_choices", "_names", "engine", "holdings", "model")

    def __init__(self, engine: str, model: str, started: Sequence[Adapter], holdings: Holdings | None) -> None:
        self.engine, self.model, self.holdings = engine, model, holdings
        self._names = {each.name: self._engine_name(each) for each in started}
        self._choices = {each.name: _scales(number, len(started)) for number, each in enumerate(started)}
        self._base = _scales(None, len(started))

    def takes(self, path: str, wanted: Adapter | None) -> bool:
        """Whether a request to `path` can be answered with `wanted`, or with the base, and nothing else."""
        if self.engine == LLAMACPP and path not in CHOOSING and path not in not_well(LLAMACPP):
            return wanted is None and path in CACHELESS
        return wanted is None or self.knows(wanted)

    def knows(self, wanted: Adapter) -> bool:
        """Whether it would, at some path."""
        return self.holdings is not None or wanted.name in self._names

    def fitted(self, body: bytes, seen: Peek, wanted: Adapter | None, *, add_usage: bool) -> bytes:
        """What this endpoint gets of the client's `body`. Raises Refusal (400) when that chooses by itself."""
        at, name, member = seen.insert_at, self.model, b""
        if at:  # not a form, where nothing is quoted, nor can be said
            clean = without_choice(body)
            if clean is not body:
                body, seen = clean, openai.peek(clean)
                at = seen.insert_at
        if self.engine == LLAMACPP:
            member = self._base if wanted is None else self._choices[wanted.name]
        elif wanted is not None:
            name = self._names.get(wanted.name) or self._engine_name(wanted)
        text = None if name == seen.model else msgspec.json.encode(name) if at else name.encode()
        body = openai.rewrite(body, seen, model=text, add_usage=add_usage)
        return body[:at] + member + body[at:] if member and at else body

    def _engine_name(self, wanted: Adapter) -> str:
        return f"{self.model}:{wanted.engine_name}" if self.engine == SGLANG else wanted.engine_name


def attach(
    engine: str, model: str, names: Sequence[str], sources: Sequence[str], max_loaded: int | None
) -> Attached | None:
    """For an endpoint that was started with adapters `names` from `sources`; None when it knows nothing of adapters."""
    if max_loaded is not None and engine != LLAMACPP:
        return Attached(engine, model, (), Holdings(max_loaded))
    started = [adapter(name, source) for name, source in zip(names, sources, strict=True)]
    return Attached(engine, model, started, None) if started else None


def _scales(chosen: int | None, count: int) -> bytes:
    """The member that llama.cpp wants first in the body. What is not named would be 0, and an empty list is as none."""
    scales = b",".join(b'{"id":%d,"scale":%d}' % (number, number == chosen) for number in range(count))
    return b'"lora":[%b],' % scales


# --- what a client may not say, and what it is told -------------------------------------------------------------------
def without_choice(body: bytes) -> bytes:
    """`body` without an empty choice of the client's own; the same object when there is none. Raises Refusal (400)."""
    if b"lora" not in body and b"\\u00" not in body:
        return body
    members = _members.decode(body)
    named = [name for name in OWN_FIELDS if name in members]
    for name in named:
        if bytes(members.pop(name)).translate(None, b" \t\n\r") not in (b"null", b"[]", b'""'):
            text = f"`{name}` is not taken here. Name an adapter as `model`; GET /v1/models lists those of this key."
            raise Refusal("body_invalid", text, param=name)
    return msgspec.json.encode(members) if named else body


def unable(model: str, path: str, wanted: Adapter | None, attached: Iterable[Attached | None]) -> Refusal:
    """Why none of a model's endpoints takes a request that some would, had it another path or adapter."""
    where = " and ".join((", ".join(CHOOSING[:-1]), CHOOSING[-1]))
    if wanted is None:
        text = f"Model {model} has adapters, which its engine cannot keep apart at {path[:100]}. Ask at {where}."
        return Refusal("route_unknown", text)
    if any(each is not None and each.knows(wanted) for each in attached):
        return Refusal("route_unknown", f"The engine of adapter {wanted.name} takes it at {where} only.")
    return Refusal(
        "model_loading",
        f"Adapter {wanted.name} is not on any replica of model {model} yet. Try again in {ROLLING_RETRY_S} s.",
        retry_after_s=ROLLING_RETRY_S,
    )


def comes_and_goes(attached: Attached | None) -> bool:
    """Whether an adapter must be taken into use there (routing.adapters) before a request is sent."""
    return attached is not None and attached.holdings is not None


class Place(Protocol):
    @property
    def replica(self) -> str: ...
    @property
    def attached(self) -> Attached | None: ...


P = TypeVar("P", bound=Place)


def able(places: Iterable[P], path: str, wanted: Adapter | None) -> list[P]:
    """Those that can answer a request to `path` with `wanted`, or with the base."""
    return [
        place for place in places if (wanted is None if place.attached is None else place.attached.takes(path, wanted))
    ]


def holders(places: Iterable[Place], wanted: Adapter) -> frozenset[str]:
    """Replicas that have the adapter, or are getting it; empty where all have it from their start."""
    return frozenset(
        place.replica
        for place in places
        if place.attached is not None
        and place.attached.holdings is not None
        and place.attached.holdings.has(wanted.engine_name)
    )


# --- what one engine holds --------------------------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class Use:
    """An adapter that an engine holds; `requests` use it. One that is forgotten and comes again is another."""

    requests: int = 0


@dataclass(slots=True)
class _Failure:
    until: float
    reason: str
    in_a_row: int


@dataclass(frozen=True, slots=True)
class Cooling:
    """It failed to load a moment ago, for `reason`, and is not tried again for `wait_s`."""

    reason: str
    wait_s: float


class Room(Enum):
    FREE = "free"
    NONE = "none"
    """Every one is in use: wait."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Holdings:
    """Adapters, by their engine names, of one engine that loads and unloads them. Events in, decisions out.

    Whoever gets a Use calls `release` with it, once. Whoever may `begin` ends with `loaded` or `failed`; between
    `found` and that, one at a time asks for `room` until there is.
    """

    limit: int
    _held: dict[str, Use] = field(default_factory=dict)
    """The least recently used first."""
    _coming: set[str] = field(default_factory=set)
    _failures: dict[str, _Failure] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self._held or name in self._coming

    def use(self, name: str) -> Use | None:
        """Take it into use, if it is there."""
        found = self._held.pop(name, None)
        if found is not None:
            found.requests += 1
            self._held[name] = found
        return found

    def release(self, use: Use) -> None:
        use.requests -= 1

    def begin(self, name: str, now: float) -> Cooling | None:
        """Load it: once, until `loaded` or `failed`. Cooling: not now."""
        assert not self.has(name), "it is there, or on its way"
        failure = self._failures.get(name)
        if failure is not None and now < failure.until:
            return Cooling(failure.reason, failure.until - now)
        self._coming.add(name)
        return None

    def found(self, names: Iterable[str]) -> None:
        """What the engine says that it holds. Names that are not of our making are somebody's own, and left alone."""
        there = {name for name in names if _OURS.match(name)} - self._coming
        others = {name: Use() for name in sorted(there - self._held.keys())}
        self._held = others | {name: use for name, use in self._held.items() if name in there}

    @property
    def full(self) -> bool:
        return len(self._held) >= self.limit

    def room(self, busy: frozenset[str]) -> Room | str:
        """Whether there is room for one more, or what to unload first: the idle one that was used longest ago.

        `busy`: what the engine works on, for whichever gateway.
        """
        if not self.full:
            return Room.FREE
        idle = next((name for name, use in self._held.items() if not use.requests and name not in busy), None)
        if idle is None:
            return Room.NONE
        del self._held[idle]
        return idle

    def loaded(self, name: str) -> None:
        """It is there, idle."""
        self._coming.discard(name)
        self._failures.pop(name, None)
        self._held[name] = Use()

    def failed(self, name: str, reason: str | None, now: float) -> None:
        """It is not there; None: for no fault of its own, so that it may be tried again at once."""
        self._coming.discard(name)
        if reason is None:
            return
        before = self._failures.pop(name, None)
        in_a_row = before.in_a_row + 1 if before else 1
        cool_s = min(COOLEST_S, COOL_S * 2 ** min(in_a_row - 1, 8))
        self._failures[name] = _Failure(now + cool_s, reason, in_a_row)
        if len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]


# --- what engines say -------------------------------------------------------------------------------------------------
class _Card(msgspec.Struct):
    id: str = ""
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


_cards = msgspec.json.Decoder(_Cards)
_RUNNING = re.compile(r'vllm:lora_requests_info\{[^}]*running_lora_adapters="([^"]*)"[^}]*\}[ \t]+([0-9.eE+]+)')


def listed(body: bytes) -> frozenset[str]:
    """Adapters in an engine's GET /v1/models. Raises msgspec.DecodeError."""
    return frozenset(card.id for card in _cards.decode(body).data if card.parent is not None)


def running(metrics: str) -> frozenset[str]:
    """Adapters that vLLM works on, from the newest of its series; empty when it does not say."""
    series = [(float(at), names) for names, at in _RUNNING.findall(metrics)]
    return frozenset(max(series)[1].split(",")) if series else frozenset()
