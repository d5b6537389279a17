"""The middle of a request, in order: (4) limits and budgets, (5) a place in the model's queue, (6) its endpoints, then
the same with each fallback.

A model without an endpoint is passed over at once while another can serve; without another, a request waits for one
that is loading. What was reserved is settled with the record (see routing.exchange), a place is given up here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from routing import attempts, bodies, measures, openai
from routing.admission import QueueFull, Ticket
from routing.client import ClientLeft
from routing.explain import Skipped
from routing.now import epoch, monotonic
from routing.openai import BUSY_RETRY_S, Refusal
from routing.over import Over
from routing.run import Signal
from routing.shapes import Stage
from routing.table import Served, coming, nowhere
from tenants import money

if TYPE_CHECKING:
    from routing.exchange import Exchange

MOVES_ON: Final = frozenset(
    {"no_endpoint", "model_loading", "engine_down", "engine_busy", "engine_failed", "rate_limited"}
)
"""Refusals after which a fallback is tried. `rate_limited` is a provider's here: the key's own limits come before."""
LOOK_S: Final = 1.0
"""How often a waiting request looks around, and says how it stands when it was asked to."""
BYTES_PER_TOKEN: Final = 4


async def serve(exchange: Exchange, served: Served) -> None:
    """Raises Refusal when nothing could answer, UpstreamError when an engine broke off after the first byte."""
    bounds = exchange.plane.bounds
    exchange.served = served
    chain = _chain(exchange, served) if served.fallbacks else (served,)
    if exchange.account is not None:
        await _reserve(exchange, chain)
        served = _now_served(exchange, served)
    if len(chain) == 1:
        await _serve_one(exchange, served, bounds.queue_wait_s, waits_to_load=True)
        return
    first: Refusal | None = None
    for index, each in enumerate(chain):
        last = index == len(chain) - 1
        wait_s = bounds.queue_wait_s if last else bounds.fallback_after_s
        try:
            await _serve_one(exchange, _now_served(exchange, each), wait_s, waits_to_load=False)
            return
        except Refusal as refusal:
            gone = index > 0 and refusal.code == "model_unknown"
            if exchange.answering or not (gone or refusal.code in MOVES_ON):
                raise
            first = first or refusal
            exchange.skipped += (Skipped(each.name, refusal.code),)
            measures.FALLBACKS.of(each.name).value += 1
    assert first is not None, "a chain has at least two models"
    if first.code != "model_loading":
        exchange.served = served
        raise first
    await _serve_one(exchange, _now_served(exchange, served), bounds.queue_wait_s, waits_to_load=True)


def _chain(exchange: Exchange, served: Served) -> tuple[Served, ...]:
    """The model asked for, then those fallbacks that the key may use."""
    grant, names = exchange.grant, exchange.plane.table.names
    assert grant is not None, "known since the first step"
    return (served, *(names[name] for name in served.fallbacks if name in names and grant.allows(name)))


# --- limits and budgets ----------------------------------------------------------------------------------------------
async def _reserve(exchange: Exchange, chain: tuple[Served, ...]) -> None:
    account, share = exchange.account, exchange.plane.share
    assert account is not None, "asked only where something limits the key"
    prompt, completion = _estimate(exchange)
    wall = epoch()
    cost = 0
    for served in chain:
        price = served.price(wall) if served.prices else None
        if price is not None:
            cost = max(cost, money.cost(price, prompt=prompt, cached=0, completion=completion))
    exchange.reserved_tokens = prompt + completion
    try:
        hold = account.try_reserve(prompt + completion, cost, monotonic())
        if hold is None:
            assert share is not None, "leases are used up only where there are some"
            hold = await asyncio.create_task(share.reserve(account, prompt + completion, cost))
    except Over as over:
        raise Refusal(over.code, over.message, retry_after_s=over.resets_s) from None
    exchange.hold = hold


def _estimate(exchange: Exchange) -> tuple[int, int]:
    """Tokens that the request may use: of its prompt, and of its answer."""
    prompt = len(exchange.raw_body) // BYTES_PER_TOKEN
    peek = exchange.peek
    if peek is None or exchange.path not in openai.GENERATING_ROUTES:
        return prompt, 0
    bound = peek.max_tokens
    if bound is None:
        bound = exchange.plane.bounds.assumed_output_tokens
    return prompt, bound * peek.choices


# --- a place ---------------------------------------------------------------------------------------------------------
async def _serve_one(exchange: Exchange, served: Served, wait_s: float, *, waits_to_load: bool) -> None:
    plane = exchange.plane
    exchange.served = served
    if served.on_demand:
        plane.wanted(served.name, cold=not served.targets)
    now = monotonic()
    if not served.targets and not (waits_to_load and coming(served)):
        raise nowhere(served, now)
    grant = exchange.grant
    assert grant is not None, "known since the first step"
    exchange.band = grant.band or served.band or plane.default_band
    admission = served.standing.admission
    try:
        ticket = admission.ask(grant.project_id or 0, plane.bands.get(exchange.band, plane.default_index), now)
    except QueueFull:
        raise nowhere(served, now) if not served.targets else _busy(served, admission.waiting) from None
    try:
        if not ticket.admitted:
            served = await _wait(exchange, served, ticket, wait_s, waits_to_load=waits_to_load)
        await attempts.serve(exchange, served)
    finally:
        admission.end(ticket, monotonic())


def _busy(served: Served, waiting: int) -> Refusal:
    text = f"Model {served.name} has no room: {waiting:,} requests wait for it already. Try again in a moment."
    return Refusal("engine_busy", text, retry_after_s=BUSY_RETRY_S)


async def _wait(exchange: Exchange, served: Served, ticket: Ticket, wait_s: float, *, waits_to_load: bool) -> Served:
    """Until the ticket is admitted; the model as it is served then. Raises Refusal when its time is up, or when the
    replica that was waited for will not come."""
    plane = exchange.plane
    news = exchange.news = Signal()
    admission, loop = served.standing.admission, asyncio.get_running_loop()
    # Not at once: whoever frees a place must be done with it before the next one sends anything.
    ticket.wake = lambda: loop.call_soon(news.set)  # type: ignore[assignment]
    began = monotonic()
    exchange.position = admission.position(ticket)
    size = len(exchange.raw_body)
    plane.waiting_bytes += size
    try:
        if plane.waiting_bytes > plane.bounds.waiting_bytes:
            raise bodies.too_many(plane.bounds.waiting_bytes)
        while True:
            if exchange.left:
                raise ClientLeft
            now = monotonic()
            served = _now_served(exchange, served)
            if ticket.admitted:
                return served
            loading = not served.targets
            exchange.loaded = exchange.loaded or loading
            if loading and not (waits_to_load and coming(served)):
                raise nowhere(served, now)
            limit_s = plane.bounds.on_demand_wait_s if loading else wait_s
            if now - began >= limit_s:
                raise nowhere(served, now) if loading else _no_room(served, limit_s)
            exchange.look_at = min(began + limit_s, now + LOOK_S)
            if exchange.wants_progress and await exchange.say_progress(_stage(served, ticket, now, began)):
                continue
            await news
    finally:
        plane.waiting_bytes -= size
        exchange.look_at = None
        exchange.queue_ms += round((monotonic() - began) * 1e3, 3)


def _now_served(exchange: Exchange, served: Served) -> Served:
    """After a wait, in which the table may have been replaced. Raises Refusal when the model is no more."""
    found = exchange.plane.table.names.get(served.adapter or served.name)
    if found is None or found.standing is not served.standing:
        raise Refusal(
            "model_unknown", f"Model {served.name} left the catalog while this request waited.", param="model"
        )
    return found


def _no_room(served: Served, waited_s: float) -> Refusal:
    text = f"Model {served.name} had no room for {waited_s:g} s: it is busy with other requests. Try again in a moment."
    return Refusal("engine_busy", text, retry_after_s=BUSY_RETRY_S)


def _stage(served: Served, ticket: Ticket, now: float, began: float) -> bytes:
    admission = served.standing.admission
    expected_s = admission.expected_s(ticket, now) if served.targets else None
    stage = "queued" if served.targets else next((each for each in served.states), "loading")
    return msgspec.json.encode(
        Stage(
            stage,
            admission.position(ticket),
            round(now - began, 1),
            None if expected_s is None else round(expected_s, 1),
        )
    )
