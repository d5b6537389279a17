"""The middle of a request: try endpoints until one answers, before the first byte, and tell each one's health.

idle connection -- lost before a byte --> fresh connection, same endpoint, once
failed before the first byte          --> another endpoint, at most `gateway.attempts` in all
4xx of the engine                     --> passed on, never tried again, says nothing against the engine
failed after the first byte           --> the relay makes the break visible; nothing is tried again
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from catalog.spec import PREFIX_AFFINITY
from routing import affinity, ejection, lora, measures, openai, outside, translated
from routing.adapters import Lost, NoRoom, NotLoaded
from routing.client import ClientLeft
from routing.explain import Attempt, Considered
from routing.failures import Broken, ConnectFailed, Failed, Full, Silent, UpstreamError
from routing.now import epoch, monotonic
from routing.openai import Refusal
from routing.relay import answer_headers, relay
from routing.scheduling import load
from routing.table import Served, Target, candidates, nowhere
from routing.upstream import Connection

if TYPE_CHECKING:
    from routing.exchange import Exchange

CHAT: Final = b"/v1/chat/completions"
SHOWN_BYTES: Final = 300
CONSIDERED_SHOWN: Final = 16


async def serve(exchange: Exchange, served: Served) -> None:
    """Raises Refusal when no endpoint answered, UpstreamError when one broke off after the first byte."""
    bounds = exchange.plane.bounds
    tried: list[Target] = []
    lost: list[Target] = []
    failure: UpstreamError | None = None
    if served.sorted_out and served.targets:
        served = _able(exchange, served)
    while True:
        if exchange.left:
            raise ClientLeft
        now = monotonic()
        over = len(tried) >= bounds.attempts or now - exchange.started > bounds.first_byte_timeout_s
        target = None if over and tried else _choose(exchange, served, candidates(served, tried, now))
        if target is None:
            raise _refusal(exchange, served, failure) if failure is not None else nowhere(served, now)
        if tried:
            measures.RETRIES.of(served.name).value += 1
        try:
            await _attempt(exchange, served, target)
        except UpstreamError as error:
            exchange.say(logging.WARNING, f"Replica {target.replica} failed a request of {served.name}: {error}")
            since = round((now - exchange.started) * 1e3, 1)
            exchange.failures += (Attempt(target.replica, since, str(error)[:SHOWN_BYTES]),)
            if exchange.answering:
                raise
            # It is loaded there once more before another endpoint is tried.
            (tried if target in lost or not isinstance(error, Lost) else lost).append(target)
            failure = error
        else:
            return


def _able(exchange: Exchange, served: Served) -> Served:
    """With those endpoints alone that keep adapters apart on this request. Raises Refusal when there is none."""
    able = lora.able(served.targets, exchange.path, served.wanted)
    if not able:
        attached = (target.attached for target in served.targets)
        raise lora.unable(served.name, exchange.path, served.wanted, attached)
    return replace(served, targets=tuple(able))


def _choose(exchange: Exchange, served: Served, left: list[Target]) -> Target | None:
    if len(left) <= 1:
        return left[0] if left else None
    chooser = served.standing.chooser
    prompt = None
    if chooser.profile == PREFIX_AFFINITY and exchange.peek is not None and exchange.peek.prompt_span is not None:
        prompt = affinity.prefix_keys(exchange.raw_body, *exchange.peek.prompt_span, scope=served.adapter)
    if not exchange.considered:
        exchange.considered = tuple([Considered(each.replica, load(each)) for each in left[:CONSIDERED_SHOWN]])
    prefer = None if served.wanted is None else lora.holders(left, served.wanted)
    target = chooser.choose(left, prompt, prefer)
    exchange.affinity = chooser.last_affinity
    return target


async def _attempt(exchange: Exchange, served: Served, target: Target) -> None:
    exchange.target = target
    exchange.prepare(served, target)
    if target.health.until is not None:
        target.health = ejection.tried(target.health)
    target.begin()
    use = None
    try:
        if served.wanted is not None and lora.comes_and_goes(target.attached):
            exchange.deadline = None  # it has limits of its own
            use = await exchange.plane.adapters.take(target, served.wanted)
            if exchange.left:
                raise ClientLeft
        connection = await _open(exchange, target)
        if connection.status >= 300:
            if use is not None and connection.status == 404:
                await _check_adapter(exchange, served, target)
            if translated.lacks(exchange, connection.status):
                connection = await _ask_for_chat(exchange, served, target)
            await _check_status(connection, target)
        if exchange.translated:
            assert exchange.translation is not None
            await translated.relay(exchange, connection, answer_headers(exchange, connection), exchange.translation)
        else:
            await relay(exchange, connection)
        if target.health is not ejection.WELL:
            target.health = ejection.WELL
    except UpstreamError as error:
        if error.counts:
            _note_failure(exchange, target, soft=error.soft)
        raise
    finally:
        exchange.deadline = None
        target.end()
        if use is not None:
            exchange.plane.adapters.give_back(target, use)
        if target.health.probing:
            target.health = ejection.abandoned(target.health)
        if exchange.connection is not None:
            exchange.connection.release()
            exchange.connection = None


async def _check_adapter(exchange: Exchange, served: Served, target: Target) -> None:
    """The engine knows no such model, or no such route. Raises Lost."""
    assert served.wanted is not None, "it is in use"
    if not await exchange.plane.adapters.still_there(target, served.wanted):
        raise Lost(f"it has lost adapter {served.adapter}")


async def _ask_for_chat(exchange: Exchange, served: Served, target: Target) -> Connection:
    """The endpoint does not know the route; whether it serves the model at all shows now."""
    assert exchange.connection is not None
    exchange.connection.release()
    target.lacks.add(exchange.path)
    exchange.prepare(served, target)
    connection = await _open(exchange, target)
    if connection.status in translated.LACKED:
        target.lacks.discard(exchange.path)
    return connection


def _note_failure(exchange: Exchange, target: Target, *, soft: bool) -> None:
    before = target.health
    target.health = ejection.failed(before, monotonic(), soft=soft)
    if target.health.ejections > before.ejections:
        measures.EJECTIONS.of(target.replica).value += 1
        exchange.say(logging.WARNING, f"Replica {target.replica} keeps failing and is left alone for a while")


async def _open(exchange: Exchange, target: Target) -> Connection:
    """Send the request; returns with the answer's head. A kept-alive connection that the engine had closed is replaced
    by a fresh one, once."""
    bounds = exchange.plane.bounds
    pool = exchange.plane.pools.of(target)
    head = _head(exchange, target)
    connection = pool.idle()
    if connection is not None:
        exchange.connection = connection
        exchange.deadline = monotonic() + bounds.first_byte_timeout_s
        connection.send(head, exchange.body)
        try:
            await connection.head()
        except Broken:
            if connection.fed:
                raise
            measures.REOPENED.of().value += 1
            connection.release()
        else:
            return connection
    connection = exchange.connection = pool.open()
    exchange.deadline = monotonic() + bounds.connect_timeout_s
    try:
        await connection.connected()
    except Silent:
        raise ConnectFailed(f"no connection within {bounds.connect_timeout_s:g} s") from None
    exchange.deadline = monotonic() + bounds.first_byte_timeout_s
    connection.send(head, exchange.body)
    await connection.head()
    return connection


def _head(exchange: Exchange, target: Target) -> bytes:
    head, place = exchange.head, target.outside
    if place is not None:
        return place.head(
            method=head.method,
            path=CHAT.decode() if exchange.translated else exchange.path,
            query=head.query,
            passed=head.engine_part,
            request_id=exchange.request_id,
            length=len(exchange.body),
        )
    path = CHAT if exchange.translated else head.raw_path
    line = head.method.encode() + b" " + path + (b"?" + head.query if head.query else b"")
    named = b"x-request-id: " + exchange.request_id.encode()
    length = str(len(exchange.body)).encode()
    return line + target.request_head + head.engine_part + named + b"\r\ncontent-length: " + length + b"\r\n\r\n"


async def _check_status(connection: Connection, target: Target) -> None:
    status = connection.status
    if target.outside is not None and not target.outside.own:
        outside.check_status(status, connection.answer.retry_after, epoch())
        return
    if status in (401, 403):
        # Not this replica's key: most likely another process has its port.
        raise Failed(status, "it does not know the key of this replica")
    if 300 <= status < 400:
        raise Refusal("route_unknown", "The model's engine has no such address.")
    if status >= 500 and status != 501:  # 501: this engine was not started for such requests
        said = b""
        while len(said) < SHOWN_BYTES and await connection.more():
            said += connection.take()
        raise Failed(status, " ".join(openai.error_text(said).split())[:SHOWN_BYTES])


def _refusal(exchange: Exchange, served: Served, failure: UpstreamError) -> Refusal:
    """What a client is told when the last endpoint failed before the first byte (GW-3)."""
    told = outside.refusal(served.name, failure)
    if told is not None:
        return told
    placed = exchange.target is not None and exchange.target.outside is None
    mended = " and is being restarted" if placed else ""
    engine, again = f"The engine of model {served.name}", "Try again in a moment."
    match failure:
        case ConnectFailed():
            return Refusal("engine_down", f"{engine} does not answer{mended}. {again}", retry_after_s=5)
        case Failed(status=503):
            return Refusal("engine_down", f"{engine} is not ready: {failure}. {again}", retry_after_s=5)
        case NotLoaded():
            text = f"Adapter {served.adapter} cannot be used now: {failure}. Ask an operator to look at its source."
            return Refusal("engine_failed", text)
        case NoRoom():
            text = f"Adapter {served.adapter} found no room: {failure}. {again}"
            return Refusal("engine_busy", text, retry_after_s=5)
        case Full():
            return Refusal("engine_busy", f"{engine} has no room for one more request. {again}", retry_after_s=1)
        case Silent():
            return Refusal("engine_silent", f"{engine} did not answer in time. Ask for less at once, or try again.")
        case _:
            return Refusal("engine_failed", f"{engine} failed: {failure}. {again}")
