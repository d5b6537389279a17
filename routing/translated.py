"""The way back of an answer that was asked for as chat completions, since its endpoint speaks nothing else (GW-1)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from routing import accounting, answers
from routing.client import ClientLeft, Headers
from routing.failures import Broken, UpstreamError
from routing.openai import Refusal
from routing.relay import as_error, broken, cut, record_stream, usage
from routing.sse import Stream
from routing.translate import Translation
from routing.upstream import Connection

if TYPE_CHECKING:
    from routing.exchange import Exchange

LACKED = frozenset({404, 405, 501})
"""How an endpoint says that it has no such route."""
HOLD_BYTES = 8 * 1024 * 1024


async def relay(exchange: Exchange, connection: Connection, headers: Headers, translation: Translation) -> None:
    """As routing.relay.relay, through `translation`."""
    headers = [pair for pair in headers if pair[0] not in (b"content-type", b"content-encoding")]
    if connection.answer.content_type.startswith(b"text/event-stream"):
        await _stream(exchange, connection, headers, translation)
    else:
        await _whole(exchange, connection, headers, translation)


async def _whole(exchange: Exchange, connection: Connection, headers: Headers, translation: Translation) -> None:
    body, status = connection.take(), connection.status
    while await connection.more():
        exchange.deadline = time.monotonic() + exchange.plane.bounds.idle_timeout_s
        body += connection.take()
        if len(body) > HOLD_BYTES:
            raise Broken(f"its answer is longer than {HOLD_BYTES:,} bytes and cannot be translated")
    exchange.first_byte_at = time.monotonic()
    tokens, code = None, ""
    if status >= 400:
        said, code = translation.error(as_error(body, status, [])[0], status), "engine_refused"
    else:
        try:
            said = translation.answer(body)
        except Refusal as refusal:
            raise Broken(refusal.message) from None
        tokens = usage(exchange, accounting.of_answer(body), len(body), 0, streamed=False)
    exchange.record(status, code, tokens)
    exchange.answering = True
    if exchange.committed:
        await exchange.client.end(b"data: " + said + b"\n\n")
    else:
        await exchange.client.answer(status, [*headers, answers.JSON], said)


async def _stream(exchange: Exchange, connection: Connection, headers: Headers, translation: Translation) -> None:
    counted, spoken = Stream(removing=False), translation.stream()
    client, idle_s = exchange.client, exchange.plane.bounds.idle_timeout_s
    await connection.more()
    exchange.first_byte_at = time.monotonic()
    exchange.answering = True
    headers += [(b"content-type", b"text/event-stream; charset=utf-8"), *answers.NO_BUFFER]
    try:
        if not exchange.committed:
            await client.start(connection.status, headers)
        while True:
            exchange.deadline = time.monotonic() + idle_s
            if not await connection.more():
                break
            data = connection.take()
            counted.feed(data)
            if counted.cut:
                raise cut()
            said = spoken.feed(data)
            if spoken.done:
                _settle(exchange, connection, counted, spoken.failure)
            if said:
                exchange.sending = True
                await client.write(said)
                exchange.sending = False
    except (UpstreamError, ClientLeft, asyncio.CancelledError) as error:
        refusal = broken(exchange, error)
        record_stream(exchange, refusal.kind.status, refusal.code, counted)
        if refusal.code != "client_left":
            await client.end(spoken.fail(refusal))
        raise
    said = spoken.end()
    _settle(exchange, connection, counted, spoken.failure)
    await client.end(said)


def _settle(exchange: Exchange, connection: Connection, counted: Stream, failure: Refusal | None) -> None:
    if failure is None:
        record_stream(exchange, connection.status, "", counted)
    else:
        record_stream(exchange, failure.kind.status, failure.code, counted)


def lacks(exchange: Exchange, status: int) -> bool:
    """Whether this answer says that the endpoint does not know the route, and the same can be asked otherwise."""
    return status in LACKED and exchange.translation is not None and not exchange.translated
