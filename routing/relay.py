"""The way back: an engine's answer to the client, byte for byte as it comes, with backpressure both ways.

A JSON answer that is not streamed is held until it is whole (up to HOLD_BYTES), so that half of one can still be tried
elsewhere. After the first byte a break is made visible: a stream gets one `error` event, anything else is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec

from routing import accounting, answers, openai
from routing.client import ClientLeft, Headers
from routing.direct import DirectClient
from routing.failures import Broken, Silent, UpstreamError
from routing.now import monotonic
from routing.openai import Refusal
from routing.shapes import Tokens
from routing.sse import EVENT_LIMIT_BYTES, Stream
from routing.upstream import Connection

if TYPE_CHECKING:
    from routing.exchange import Exchange

HOLD_BYTES: Final = 256 * 1024
NO_CONTENT: Final = 204
_NO_STREAM: Final = "The engine answered with something else than a stream. Ask again without x-llmgw-progress."
_json: Final = msgspec.json.Decoder()


def relay(exchange: Exchange, connection: Connection) -> Coroutine[Any, Any, None]:
    """Pass the answer on and record it. Raises UpstreamError with `exchange.answering` telling what is left to do."""
    content_type = connection.answer.content_type
    if content_type.startswith(b"application/json") or connection.status >= 400 or connection.status == NO_CONTENT:
        return _whole(exchange, connection)
    if content_type.startswith(b"text/event-stream"):
        return _stream(exchange, connection, answer_headers(exchange, connection))
    return _pass(exchange, connection, b"")


def answer_headers(exchange: Exchange, connection: Connection) -> Headers:
    target = exchange.target
    assert target is not None
    headers: Headers = [
        (b"x-request-id", exchange.request_id.encode()),
        (b"x-llmgw-queue-ms", b"%d" % exchange.queue_ms),
        *target.answer_headers,
        *connection.answer.kept,
    ]
    if exchange.account is not None:
        headers += exchange.account.headers(monotonic())
    if exchange.plane.cors:
        headers += answers.cors(exchange.plane.cors, exchange.headers.get(b"origin"))
    return headers


def _lines(exchange: Exchange, connection: Connection) -> bytes:
    """What `answer_headers` gives, as lines."""
    target = exchange.target
    assert target is not None
    waited = b"\r\nx-llmgw-queue-ms: " + str(int(exchange.queue_ms)).encode() + b"\r\n"
    lines = b"x-request-id: " + exchange.request_id.encode() + waited
    lines += target.answer_lines + connection.answer.kept_lines
    if exchange.account is not None:
        lines += exchange.account.lines(monotonic())
    if exchange.plane.cors:
        cors = answers.cors(exchange.plane.cors, exchange.headers.get(b"origin"))
        lines += b"".join(b"%b: %b\r\n" % pair for pair in cors)
    return lines


async def _whole(exchange: Exchange, connection: Connection) -> None:
    body = connection.take()
    while not connection.ended and len(body) <= HOLD_BYTES:
        if body:
            exchange.deadline = monotonic() + exchange.plane.bounds.idle_timeout_s
        if await connection.more():
            body += connection.take()
    if exchange.first_byte_at is None:
        exchange.first_byte_at = monotonic()
    if not connection.ended:
        await _pass(exchange, connection, body)
        return
    body += connection.take()
    status, code, tokens = connection.status, "", None
    if status < 400 and status != NO_CONTENT and _cut_off(connection, body):
        raise Broken("its answer ends in the middle")
    if status < 400:
        tokens = usage(exchange, accounting.of_answer(body), len(body), 0, streamed=False)
        client = exchange.client
        if status == 200 and isinstance(client, DirectClient) and not exchange.committed:
            lines = _lines(exchange, connection)
            exchange.record(status, code, tokens)
            exchange.answering = True
            client.answer_at_once(lines, body)
            return
    headers = answer_headers(exchange, connection)
    if status >= 400:
        body, headers = as_error(body, status, headers)
        code = "engine_refused"
    exchange.record(status, code, tokens)
    exchange.answering = True
    if exchange.committed:
        line = body.replace(b"\r", b"").replace(b"\n", b" ").strip()  # which stand between a JSON text's tokens only
        await exchange.client.end((b"event: error\n" if code else b"") + b"data: " + line + b"\n\n")
    else:
        await exchange.client.answer(status, headers, body)


def _cut_off(connection: Connection, body: bytes) -> bool:
    """Whether this is the beginning of a JSON text. Where no length was said, a lost connection ends an answer too."""
    if connection.answer.framed or any(name == b"content-encoding" for name, _ in connection.answer.kept):
        return False
    try:
        _json.decode(body)
    except msgspec.DecodeError:
        return True
    except RecursionError:
        return False
    return False


async def _pass(exchange: Exchange, connection: Connection, first: bytes) -> None:
    """An answer too long to hold, or of another kind: on its way as it comes."""
    headers, length = answer_headers(exchange, connection), connection.answer.length
    if not first and await connection.more():
        first = connection.take()
    if exchange.first_byte_at is None:
        exchange.first_byte_at = monotonic()
    if length is not None:
        headers.append((b"content-length", length))
    exchange.answering = True
    if exchange.committed:  # to a stream of events, among which this would be lost
        refusal = Refusal("engine_failed", _NO_STREAM)
        used = usage(exchange, None, len(first), 0, streamed=False)
        exchange.record(refusal.kind.status, refusal.code, used)
        await exchange.client.end(openai.error_event(refusal, mid_event=False))
        return
    tail, size = first, len(first)
    try:
        await exchange.client.start(connection.status, headers)
        await _write(exchange, first)
        while await _next(exchange, connection):
            data = connection.take()
            tail = (tail + data)[-accounting.TAIL_BYTES :]
            size += len(data)
            await _write(exchange, data)
    except (UpstreamError, ClientLeft, asyncio.CancelledError) as error:
        refusal = broken(exchange, error)
        exchange.record(refusal.kind.status, refusal.code, usage(exchange, None, size, 0, streamed=False))
        raise
    exchange.record(connection.status, "", usage(exchange, accounting.of_tail(tail), size, 0, streamed=False))
    await exchange.client.end()


async def _stream(exchange: Exchange, connection: Connection, headers: Headers) -> None:
    stream = Stream(removing=exchange.add_usage)
    await connection.more()  # still within the limit for the first byte: a head often comes before the prompt is read
    exchange.first_byte_at = monotonic()
    exchange.answering = True
    headers += answers.NO_BUFFER
    client, status = exchange.client, connection.status
    try:
        if not exchange.committed:
            await client.start(status, headers)
        if isinstance(client, DirectClient):
            await _pipe(exchange, connection, stream, client)
        else:
            while await _next(exchange, connection):
                data = stream.feed(connection.take())
                if stream.done:  # before the client can see the end
                    record_stream(exchange, status, "", stream)
                if stream.cut:
                    raise cut()
                await _write(exchange, data)
        if _unfinished(exchange, connection, stream):
            raise Broken("its stream ends in the middle")
    except (UpstreamError, ClientLeft, asyncio.CancelledError) as error:
        refusal = broken(exchange, error)
        record_stream(exchange, refusal.kind.status, refusal.code, stream)
        if refusal.code != "client_left":
            await client.end(openai.error_event(refusal, mid_event=stream.mid_event))
        raise
    rest = stream.flush()
    record_stream(exchange, status, "", stream)
    await client.end(rest)


def _unfinished(exchange: Exchange, connection: Connection, stream: Stream) -> bool:
    """Whether a stream that ended with its connection was cut: within an event, or before it said its end."""
    if connection.answer.framed or stream.tail[-32:].rstrip().endswith(b"[DONE]"):
        return False
    return exchange.path in openai.USAGE_ROUTES or stream.holding or stream.mid_event


async def _pipe(exchange: Exchange, connection: Connection, stream: Stream, client: DirectClient) -> None:
    """From the engine's connection straight to the client's, without a task waking up for each chunk."""
    idle_s = exchange.plane.bounds.idle_timeout_s

    def pass_on(data: bytes, framed: bytes | None) -> None:
        exchange.deadline = monotonic() + idle_s
        passed = stream.feed(data)
        if stream.done and not exchange.recorded:  # before the client can see the end
            record_stream(exchange, connection.status, "", stream)
        if stream.cut:
            connection.fail(cut())
        elif not client.push(passed, framed if passed is data else None):
            exchange.sending = True
            connection.pause()

    def go_on() -> None:
        exchange.deadline = monotonic() + idle_s
        exchange.sending = False
        connection.resume()

    client.on_drained = go_on
    exchange.deadline = monotonic() + idle_s
    await connection.pipe(pass_on)


def cut() -> Broken:
    return Broken(f"an event of its stream is longer than {EVENT_LIMIT_BYTES:,} bytes")


async def _next(exchange: Exchange, connection: Connection) -> bool:
    exchange.deadline = monotonic() + exchange.plane.bounds.idle_timeout_s
    return await connection.more()


async def _write(exchange: Exchange, data: bytes) -> None:
    """Waits while the client does not take what it was sent, as long as engines may be silent."""
    if data:
        exchange.sending = True
        await exchange.client.write(data)
        exchange.sending = False


def record_stream(exchange: Exchange, status: int, code: str, stream: Stream) -> None:
    if exchange.recorded:
        return
    known = accounting.of_tail(stream.tail)
    if exchange.path == "/v1/messages":
        known = accounting.merge(accounting.of_tail(stream.head), known)
    tokens = usage(exchange, known, 0, stream.events, streamed=True) if status < 400 or stream.events else None
    exchange.record(status, code, tokens, streamed=True)


def usage(exchange: Exchange, known: Tokens | None, size: int, events: int, *, streamed: bool) -> Tokens:
    return accounting.completed(
        known, prompt_bytes=len(exchange.body), events=events, answer_bytes=size, streamed=streamed
    )


def broken(exchange: Exchange, error: BaseException) -> Refusal:
    if isinstance(error, asyncio.CancelledError) and not exchange.sending:
        return openai.stopping()
    if isinstance(error, ClientLeft | asyncio.CancelledError):
        return Refusal("client_left", "The client left.")
    if isinstance(error, Silent):
        return Refusal("engine_silent", "The engine fell silent in the middle of its answer. Try again.")
    return Refusal("engine_failed", f"The engine broke off in the middle of its answer: {error}. Try again.")


def as_error(body: bytes, status: int, headers: Headers) -> tuple[bytes, Headers]:
    """An engine's own refusal passes as it is when it has OpenAI's shape, and in that shape when it has not."""
    if openai.is_error(body):
        return body, headers
    wrapped = openai.engine_refusal(body, status)
    return wrapped, [pair for pair in headers if pair[0] not in (b"content-type", b"content-encoding")] + [answers.JSON]
