"""What one gateway knows: keys, catalog and endpoints as one snapshot that is replaced as a whole.

Only load and health change in place, in `Target`, which outlives the snapshots that name it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import quote

import msgspec

from catalog import spec
from catalog.names import fold
from nodes.engine_keys import engine_key
from nodes.state import Endpoint
from routing import ejection, lora, mappings
from routing.admission import Admission, Band
from routing.now import epoch
from routing.openai import Refusal
from routing.outside import Outside, joined
from routing.scheduling import Candidate, Chooser
from tenants.keys import Grant
from tenants.money import Price

ON_THE_WAY: Final = ("fetching", "installing", "starting", "loading", "ready")
LOADING_RETRY_S: Final = 5
DOWN_RETRY_S: Final = 5
NOWHERE_RETRY_S: Final = 30
SHOWN_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class Failing:
    """A model whose last start failed: why, and when it is tried again (epoch seconds)."""

    model: str
    reason: str
    next_try_at: float


@dataclass(frozen=True, slots=True)
class Contents:
    """What the store says, read after `revision` was."""

    revision: int
    grants: tuple[Grant, ...]
    models: tuple[spec.Model, ...]
    endpoints: tuple[Endpoint, ...]
    engine_secret: bytes
    failing: tuple[Failing, ...] = ()
    prices: tuple[Price, ...] = ()
    """Sorted by when they begin."""
    outside: tuple[Outside, ...] = ()
    """Endpoints that llmgw does not run."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests wait for a model."""

    bands: tuple[Band, ...] = (Band("normal"),)
    queue_limit: int = 1000


class Standing:
    """What goes on with one model: who is in flight, who waits, what was sent where. Outlives the snapshots."""

    __slots__ = ("admission", "chooser")

    def __init__(self, rules: Rules, profile: str) -> None:
        self.admission = Admission(0, rules.queue_limit, rules.bands)
        self.chooser = Chooser(profile)


class Target(Candidate):
    """A place to send requests to: a ready replica's leader or one outside, with what is known of load and health."""

    __slots__ = (
        "_in_flight_asked",
        "answer_headers",
        "answer_lines",
        "asked_by_name",
        "attached",
        "engine",
        "health",
        "host",
        "known_as",
        "lacks",
        "metrics",
        "model",
        "node",
        "outside",
        "port",
        "request_head",
        "scraped_at",
    )

    def __init__(self, endpoint: Endpoint, key: str, outside: Outside | None = None) -> None:
        assert endpoint.port is not None, "only usable endpoints become targets"
        self.outside = outside
        self.replica, self.node, self.model = endpoint.replica, endpoint.node, endpoint.model
        self.engine, self.host, self.port = endpoint.engine, endpoint.host, endpoint.port
        self.known_as = "" if outside is None else outside.name_there
        """What it calls the model; empty where that is the catalog's name."""
        self.attached = lora.attach(
            endpoint.engine,
            endpoint.model,
            endpoint.adapters,
            endpoint.adapter_sources,
            endpoint.max_loaded_adapters,
        )
        """What it makes of adapters; None where it has none."""
        self.lacks: set[str] = set(lora.not_well(endpoint.engine))
        """Routes that it does not have, or not well; they are asked for as chat completions."""
        self.metrics: spec.Metrics | None = None
        """How the profile says that its load is called, where it says so."""
        self.asked_by_name = outside is None and endpoint.engine in mappings.GIVE_BY_NAME
        """Whether it is asked for some lines of its metrics only."""
        self.weight = endpoint.slots
        self.running = None
        self.waiting = None
        self.kv_used = None
        self.scraped_at: float | None = None
        self.in_flight = self.in_flight_then = self._in_flight_asked = 0
        self.health = ejection.WELL
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.request_head = f" HTTP/1.1\r\nHost: {host}:{self.port}\r\nAuthorization: Bearer {key}\r\n".encode()
        self.answer_headers: tuple[tuple[bytes, bytes], ...] = (
            (b"x-llmgw-model", header_text(self.model)),
            (b"x-llmgw-replica", header_text(self.replica)),
        )
        self.answer_lines = b"".join(b"%b: %b\r\n" % pair for pair in self.answer_headers)

    @property
    def address(self) -> tuple[str | Outside, str, int]:
        return self.outside or self.replica, self.host, self.port

    def begin(self) -> None:
        """A request is sent now."""
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1

    def scraping(self) -> None:
        self._in_flight_asked = self.in_flight

    def scraped(self, load: mappings.Load, now: float | None) -> None:
        """`now` None: the scrape failed, so the load is unknown."""
        self.running, self.waiting, self.kv_used = load.running, load.waiting, load.kv_used
        self.scraped_at = now
        # The engine counted at some time since it was asked: what began or ended since then is not taken for others'.
        self.in_flight_then = max(self._in_flight_asked, self.in_flight)


def header_text(name: str) -> bytes:
    """A name as it can stand in a header: anything but plain ASCII percent-encoded."""
    return quote(name, safe="/:@+,;=()[]{}<>!#$&'*?^`|~ ").encode()


@dataclass(frozen=True, slots=True)
class Served:
    """A model, where it is served now, and what is on its way; or an adapter of it, which shares all that."""

    name: str
    name_json: bytes
    standing: Standing
    targets: tuple[Target, ...] = ()
    states: tuple[str, ...] = ()
    """Of replicas that are wanted and not usable yet."""
    failing: Failing | None = None
    on_demand: bool = False
    """Whether a replica is started once somebody asks."""
    fallbacks: tuple[str, ...] = ()
    """Other models, by name, in the order in which they are tried."""
    band: str = ""
    prices: tuple[Price, ...] = ()
    adapter: str = ""
    wanted: lora.Adapter | None = None
    """The adapter, as endpoints are asked for it."""
    sorted_out: bool = False
    """Whether not every endpoint takes every request: some have adapters, or one is asked for."""

    @property
    def allowed_as(self) -> str:
        """The name that a key's allowlist must hold."""
        return self.adapter or self.name

    def price(self, now: float) -> Price | None:
        """What its tokens cost now (epoch seconds)."""
        found = None
        for price in self.prices:
            if price.valid_from > now:
                break
            found = price
        return found


@dataclass(frozen=True, slots=True)
class Table:
    revision: int
    grants: Mapping[str, Grant] = field(default_factory=dict)
    """By SHA-256 of the key."""
    names: Mapping[str, Served] = field(default_factory=dict)
    """Models by name and by alias, adapters by name."""
    standings: Mapping[str, Standing] = field(default_factory=dict)
    """By model."""
    targets: tuple[Target, ...] = ()
    leaving: tuple[Target, ...] = ()
    """Of replicas that are drained: they get nothing new, and it is told how much they still work on."""

    def visible(self, grant: Grant) -> Iterable[str]:
        return (name for name, served in self.names.items() if grant.allows(served.allowed_as))


EMPTY: Final = Table(revision=-1)


def build(contents: Contents, previous: Table, rules: Rules = Rules()) -> Table:
    """The next snapshot. Endpoints that stay where they are keep their load and health, models who waits for them."""
    known = {target.address: target for target in (*previous.targets, *previous.leaving)}
    targets: dict[str, list[Target]] = {}
    states: dict[str, list[str]] = {}
    every: list[Target] = []
    leaving: list[Target] = []
    metrics = {(model.name, each.name): each.metrics for model in contents.models for each in model.profiles}
    for endpoint in contents.endpoints:
        if endpoint.host and endpoint.port is not None and (endpoint.usable or endpoint.draining):
            target = known.get((endpoint.replica, endpoint.host, endpoint.port))
            if target is None or target.engine != endpoint.engine or target.model != endpoint.model:
                target = Target(endpoint, engine_key(contents.engine_secret, endpoint.replica))
            target.weight, target.metrics = endpoint.slots, metrics.get((endpoint.model, endpoint.profile))
            if endpoint.usable:
                targets.setdefault(endpoint.model, []).append(target)
                every.append(target)
            else:
                leaving.append(target)
        elif not endpoint.draining and not endpoint.lost:
            states.setdefault(endpoint.model, []).append(endpoint.state)
    places = joined(contents.outside, contents.models)
    for place in places:
        target = known.get((place, place.address.host, place.address.port)) or Target(place.endpoint(), "", place)
        targets.setdefault(place.model, []).append(target)
        every.append(target)
    models = (*contents.models, *_unlisted(places, contents.models))
    failing = {each.model: each for each in sorted(contents.failing, key=lambda each: -each.next_try_at)}
    prices: dict[str, list[Price]] = {}
    for price in contents.prices:
        prices.setdefault(price.model, []).append(price)
    canonical = _canonical(models)
    standings = {model.name: _standing(model, previous, rules) for model in models}
    names: dict[str, Served] = {}
    for model in models:
        served = Served(
            name=model.name,
            name_json=msgspec.json.encode(model.name),
            standing=standings[model.name],
            targets=tuple(targets.get(model.name, ())),
            states=tuple(states.get(model.name, ())),
            failing=failing.get(model.name),
            on_demand=model.scaling.min == 0 < model.scaling.max,
            fallbacks=_chain(model, canonical),
            band=model.band,
            prices=tuple(prices.get(model.name, ())),
            sorted_out=any(target.attached is not None for target in targets.get(model.name, ())),
        )
        names[model.name] = served
        for alias in model.aliases:
            names.setdefault(alias, served)
        for adapter in model.adapters:
            wanted = lora.adapter(adapter.name, adapter.source)
            names.setdefault(adapter.name, replace(served, adapter=adapter.name, wanted=wanted, sorted_out=True))
    return Table(
        revision=contents.revision,
        grants={grant.digest: grant for grant in contents.grants},
        names=names,
        standings=standings,
        targets=tuple(every),
        leaving=tuple(leaving),
    )


def _unlisted(places: Iterable[Outside], models: Iterable[spec.Model]) -> list[spec.Model]:
    """Models that endpoints outside serve and the catalog does not have."""
    held = {name for model in models for name in model.names()}
    return [spec.Model(name=name) for name in dict.fromkeys(place.model for place in places) if name not in held]


def _canonical(models: Iterable[spec.Model]) -> dict[str, str]:
    """The model that each name and alias means, however it is written."""
    found: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            found.setdefault(fold(name), model.name)
    return found


def _chain(model: spec.Model, canonical: Mapping[str, str]) -> tuple[str, ...]:
    """Its fallbacks and no one else's: each model once, never itself, so that no circle is walked."""
    found = dict.fromkeys(canonical[key] for key in map(fold, model.fallbacks) if key in canonical)
    found.pop(model.name, None)
    return tuple(found)


def _standing(model: spec.Model, previous: Table, rules: Rules) -> Standing:
    standing = previous.standings.get(model.name)
    if standing is None:
        return Standing(rules, model.routing_profile)
    if standing.chooser.profile != model.routing_profile:
        standing.chooser = Chooser(model.routing_profile)
    return standing


def settle(table: Table, now: float) -> None:
    """Let the queues know how much room there is: who waited for a replica that is ready now goes on."""
    room = dict.fromkeys(table.standings, 0)
    for target in table.targets:
        if target.model in room:
            room[target.model] += target.weight
    for name, capacity in room.items():
        admission = table.standings[name].admission
        if admission.capacity != capacity:
            admission.resize(capacity, now)


def coming(served: Served) -> bool:
    """Whether it is worth waiting for a replica, though none is ready."""
    if any(state in ON_THE_WAY for state in served.states):
        return True
    return served.on_demand and served.failing is None


def candidates(served: Served, tried: Iterable[Target], now: float) -> list[Target]:
    """Targets that may get the request now, without those it failed on. Softly ejected ones only when none else can."""
    targets = served.targets
    left = [target for target in targets if target not in tried] if tried else list(targets)
    well = [target for target in left if target.health.until is None or ejection.may_try(target.health, now)]
    return well or [target for target in left if target.health.soft]


def nowhere(served: Served, now: float) -> Refusal:
    """Why a published model cannot be served now, and when to ask again."""
    name = served.name
    if served.targets:
        until = min(target.health.until or now for target in served.targets)
        return Refusal(
            "engine_down",
            f"The engine of model {name} does not answer and is left alone for a moment. Try again shortly.",
            retry_after_s=max(1.0, until - now),
        )
    if any(state in ON_THE_WAY for state in served.states):
        stage = next(state for state in served.states if state in ON_THE_WAY)
        return Refusal(
            "model_loading",
            f"Model {name} is loading ({stage}). Try again in {LOADING_RETRY_S} s.",
            retry_after_s=LOADING_RETRY_S,
        )
    if served.on_demand and served.failing is None:
        return Refusal(
            "model_loading",
            f"Model {name} is not loaded and is being started. Try again in {LOADING_RETRY_S} s.",
            retry_after_s=LOADING_RETRY_S,
        )
    if served.failing is not None:
        wait_s = max(float(DOWN_RETRY_S), served.failing.next_try_at - epoch())
        reason = f" ({served.failing.reason[:SHOWN_REASON]})" if served.failing.reason else ""
        return Refusal(
            "engine_down",
            f"Model {name} did not start{reason} and is being tried again. Try again in {wait_s:.0f} s.",
            retry_after_s=wait_s,
        )
    if served.states:
        return Refusal(
            "engine_down",
            f"The engine of model {name} failed and is being started again. Try again in {DOWN_RETRY_S} s.",
            retry_after_s=DOWN_RETRY_S,
        )
    why = f"llmgw why {shlex.quote(name)}"
    return Refusal(
        "no_endpoint",
        f"No replica serves model {name} and none is on its way. Ask an operator, who sees why with: {why}",
        retry_after_s=NOWHERE_RETRY_S,
    )
