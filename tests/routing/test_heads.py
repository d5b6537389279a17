"""Heads that are recognised instead of parsed, requests' and answers', and chunks that go past the parser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import heads
from routing.failures import Broken
from routing.pools import Pool
from routing.run import Run
from routing.upstream import Connection
from tests.routing.conftest import Start
from tests.routing.gateways import CHAT, EDGES, KEY, Running, contents, endpoint, raw_chat
from tests.stubs import mock_engine
from tests.stubs.mock_engine import ANSWER, STREAM_HEAD, MockEngine, chunk, plain

BODY = json.dumps(CHAT).encode()


# --- what a parser makes of it ---------------------------------------------------------------------------------------
class Parsed:
    """One message as httptools reads it. `ended` only when it was whole and nothing came after it."""

    def __init__(self, data: bytes, *, request: bool = True) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = self.body = b""
        self.messages = 0
        self.ended = self.failed = self.keeps_alive = False
        self._parser = httptools.HttpRequestParser(self) if request else httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.failed = True

    def on_message_begin(self) -> None:
        self.messages += 1
        self.ended = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ended = True
        self.keeps_alive = self._parser.should_keep_alive()

    @property
    def whole(self) -> bool:
        return not self.failed and self.ended and self.messages == 1

    def without_length(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        return self.url, [pair for pair in self.headers if pair[0] != b"content-length"]


LENGTH_NAMES = (b"content-length", b"Content-Length", b"CONTENT-LENGTH")
OTHERS = (
    b"Host: x",
    b"Authorization: Bearer sk-1",
    b"Authorization: Bearer sk-2",
    b"content-type: application/json",
    b"X-Note: content-length: 3",
    b"X-Content-Length: 3",
    b"Content-Length-Hint: 3",
    b"X: \xc3\xa9",
    b"Empty:",
    b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
length_lines = st.builds(
    lambda name, blanks, digits, after: name + b":" + blanks + digits + after,
    st.sampled_from(LENGTH_NAMES),
    st.sampled_from((b"", b" ", b"   ", b"\t")),
    st.one_of(
        st.integers(0, 12).map(lambda n: b"%d" % n),
        st.integers(0, 12).map(lambda n: b"%05d" % n),
        st.sampled_from(
            (b"", b"-1", b"+1", b"0x3", b"1_0", b"3,3", b"3 3", b"\xb2", b"99999999999", b"18446744073709551617")
        ),
    ),
    st.sampled_from((b"", b"", b"", b" ")),
)
head_lines = st.lists(st.one_of(st.sampled_from(OTHERS), length_lines), max_size=5)
bodies = st.binary(max_size=14)


def request(lines: Iterable[bytes], body: bytes, url: bytes = b"/v1/x") -> bytes:
    return b"\r\n".join((b"POST %b HTTP/1.1" % url, *lines, b"", b"")) + body


@given(head_lines, bodies, st.data())
def test_what_is_recognised_is_what_a_parser_reads_and_nothing_else_is(
    lines: list[bytes], body: bytes, data: st.DataObject
) -> None:
    first = request(lines, body)
    known = heads.learn(first, b"POST /v1/x HTTP/1.1\r\n")
    learned_from = Parsed(first)
    if known is None:
        return
    # As the gateway does: only heads that a parser has accepted are learned.
    if learned_from.failed or any(name == b"transfer-encoding" for name, _ in learned_from.headers):
        return
    position = next(at for at, line in enumerate(lines) if line.lower().startswith(b"content-length:"))
    again = list(lines)
    again[position] = data.draw(st.one_of(length_lines, st.just(lines[position])))
    if data.draw(st.booleans()):
        again[data.draw(st.integers(0, len(lines) - 1))] = data.draw(st.sampled_from(OTHERS))
    if data.draw(st.booleans()):
        again.insert(data.draw(st.integers(0, len(again))), data.draw(st.one_of(st.sampled_from(OTHERS), length_lines)))
    sent = request(again, data.draw(bodies), data.draw(st.sampled_from((b"/v1/x", b"/v1/y"))))
    found = known.body_of(sent)
    if found is not None:
        parsed = Parsed(sent)
        assert parsed.whole
        assert parsed.body == found
        assert parsed.without_length() == learned_from.without_length()


@given(st.lists(st.sampled_from(OTHERS), max_size=4), st.sampled_from(LENGTH_NAMES), bodies, bodies, st.integers(0, 4))
def test_the_same_head_with_another_length_is_recognised(
    lines: list[bytes], name: bytes, body: bytes, other: bytes, zeros: int
) -> None:
    if any(b"content-length" in line.lower()[:14] for line in lines):
        lines = [line for line in lines if not line.lower().startswith(b"content-length")]
    known = heads.learn(request([*lines, name + b": %d" % len(body)], body), b"POST /v1/x HTTP/1.1\r\n")
    assert known is not None
    digits = b"%0*d" % (zeros, len(other))
    plain = digits == b"%d" % len(other)  # zeros before it, which nobody sends, are left to the parser
    assert known.body_of(request([*lines, name + b": " + digits], other)) == (other if plain else None)
    assert known.body_of(request([*lines, name + b": " + digits], other + b"x")) is None
    assert known.body_of(request([*lines, name + b": " + digits], other)[:-1]) is None


@pytest.mark.parametrize(
    "lines",
    [
        (b"Host: x",),
        (b"Content-Length: 2", b"Content-Length: 2"),
        (b"Content-Length: 2", b"content-length-x: 2"),
        (b"Content-Length: 2,2",),
        (b"Content-Length: 12345678901",),
        (b"Content-Length : 2",),
        (b"X: a\r\n Content-Length: 2",),
        (b"X: %b" % (b"x" * heads.LONGEST), b"Content-Length: 2"),
    ],
    ids=["none", "two", "one alike", "a list", "huge", "a blank before the colon", "folded", "too long"],
)
def test_a_head_whose_length_is_not_plain_is_never_learned(lines: tuple[bytes, ...]) -> None:
    assert heads.learn(request(lines, b"ab"), b"POST /v1/x HTTP/1.1\r\n") is None


def test_half_a_head_and_one_that_begins_otherwise_are_never_learned() -> None:
    whole = request((b"Content-Length: 2",), b"ab")
    assert heads.learn(whole[:-4], b"POST /v1/x HTTP/1.1\r\n") is None
    assert heads.learn(b"\r\n" + whole, b"POST /v1/x HTTP/1.1\r\n") is None
    assert heads.learn(whole, b"POST /v1/y HTTP/1.1\r\n") is None


# --- requests over a connection --------------------------------------------------------------------------------------
@pytest.fixture
async def kept(gateway: Running) -> AsyncIterator[Any]:
    """A connection on which one request was answered, so that its head is known."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_chat(BODY))
    assert (await answer(reader))[0] == 200
    yield reader, writer
    writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next answer of a connection: its status and body."""
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


def told(user: str) -> bytes:
    return json.dumps({**CHAT, "user": user}).encode()


async def test_after_a_known_head_requests_may_come_in_any_pieces(kept: Any, engine: MockEngine) -> None:
    reader, writer = kept
    sent = raw_chat(told("pieces"))
    for at in (1, 5, 40, len(sent) - len(told("pieces")), len(sent) - 3):
        writer.write(sent[:at])
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(sent[at:])
        assert (await answer(reader))[0] == 200
        assert engine.requests[-1].json["user"] == "pieces"


async def test_after_a_known_head_requests_may_come_together(kept: Any, engine: MockEngine) -> None:
    reader, writer = kept
    users = [f"user {number}" for number in range(5)]
    writer.write(b"".join(map(raw_chat, map(told, users))))
    assert [(await answer(reader))[0] for _ in users] == [200] * 5
    assert [seen.json["user"] for seen in engine.requests[1:]] == users


async def test_a_known_head_with_another_key_is_another_key(kept: Any, engine: MockEngine) -> None:
    reader, writer = kept
    other = KEY[:-1] + "x"
    writer.write(raw_chat(BODY, key=other))
    status, said = await answer(reader)
    assert (status, json.loads(said)["error"]["code"]) == (401, "key_unknown")
    writer.write(raw_chat(BODY))
    assert (await answer(reader))[0] == 200
    assert len(engine.requests) == 2


async def test_a_known_head_with_more_or_other_headers_means_what_it_says(kept: Any, engine: MockEngine) -> None:
    reader, writer = kept
    writer.write(raw_chat(BODY, extra=b"OpenAI-Beta: one\r\n"))
    assert (await answer(reader))[0] == 200
    writer.write(raw_chat(BODY, extra=b"OpenAI-Beta: two\r\n"))
    assert (await answer(reader))[0] == 200
    writer.write(raw_chat(told("later"), extra=b"OpenAI-Beta: two\r\n"))
    assert (await answer(reader))[0] == 200
    assert [seen.header(b"openai-beta") for seen in engine.requests] == [None, b"one", b"two", b"two"]
    assert engine.requests[-1].json["user"] == "later"
    writer.write(raw_chat(BODY, path=b"/v1/nothing/here/../x"))
    assert (await answer(reader))[0] == 404


async def test_a_known_head_may_be_followed_by_chunks(kept: Any, engine: MockEngine) -> None:
    reader, writer = kept
    start = raw_chat(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    writer.write(start + chunk(told("in chunks")[:20]))
    await asyncio.sleep(0.02)
    writer.write(chunk(told("in chunks")[20:]) + mock_engine.LAST)
    assert (await answer(reader))[0] == 200
    assert engine.requests[-1].json["user"] == "in chunks"
    writer.write(raw_chat(told("plain again")))
    assert (await answer(reader))[0] == 200
    assert engine.requests[-1].json["user"] == "plain again"


async def test_a_body_that_looks_like_the_known_head_is_a_body(gateway: Running, engine: MockEngine) -> None:
    """A request that was answered before its body had come: the rest of the body is no request of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(raw_chat(BODY))
    assert (await answer(reader))[0] == 200
    smuggled = raw_chat(told("smuggled"))
    refused = raw_chat(b"", key="sk-nobody" + "x" * 40).replace(
        b"Content-Length: 0", b"Content-Length: %d" % len(smuggled)
    )
    writer.write(refused)
    assert (await answer(reader))[0] == 401
    writer.write(smuggled)
    await writer.drain()
    async with asyncio.timeout(20):
        assert await reader.read(1) == b""  # or the connection would have carried an answer to it
    assert len(engine.requests) == 1
    writer.close()


async def test_a_known_head_whose_body_comes_later_is_not_answered_before(kept: Any, engine: MockEngine) -> None:
    reader, writer = kept
    sent = raw_chat(told("late body"))
    head = sent[: sent.index(b"\r\n\r\n") + 4]
    writer.write(head)
    await asyncio.sleep(0.05)
    assert len(engine.requests) == 1
    writer.write(sent[len(head) :] + raw_chat(told("next")))
    assert [(await answer(reader))[0], (await answer(reader))[0]] == [200, 200]
    assert [seen.json["user"] for seen in engine.requests[1:]] == ["late body", "next"]


# --- answers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("edge", EDGES[:1])
async def test_answers_with_a_known_head_and_other_lengths_pass_byte_for_byte(start: Start, engine: MockEngine) -> None:
    async with start(contents(endpoint(engine.port))) as gateway:
        for size in (0, 1, 9, 10, 99, 100, 4000, 70_000, 300_000, 3, 0):
            body = json.dumps({"data": "x" * size}).encode()
            engine.script.append(mock_engine.says(plain(body)))
            assert (await gateway.chat(path="/v1/embeddings")).content == body
        cut = plain(b'{"data":"' + b"x" * 40)[:-5]
        engine.script.append(mock_engine.says(cut, then_close=True))
        assert (await gateway.chat(path="/v1/embeddings")).status_code == 502
        engine.script.append(mock_engine.says(plain(b'{"error":"no"}', status=b"400 Bad Request")))
        assert (await gateway.chat(path="/v1/embeddings")).status_code == 400
        assert (await gateway.chat()).content == ANSWER.partition(b"\r\n\r\n")[2]


class Transport:
    """As much of one as a connection needs."""

    aborted = False
    paused = False

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def write(self, data: bytes) -> None:
        pass


def connect(pool: Pool | None = None) -> Connection:
    connection = Connection(pool or Pool("127.0.0.1", 9))
    connection.connection_made(cast("asyncio.BaseTransport", Transport()))
    return connection


@given(
    st.sampled_from(
        (b"200 OK", b"400 Bad Request", b"204 No Content", b"304 Not Modified", b"101 Switching Protocols")
    ),
    st.lists(
        st.sampled_from(
            (b"Content-Type: application/json", b"Connection: close", b"Transfer-Encoding: chunked", b"Date: x")
        ),
        max_size=3,
        unique=True,
    ),
    bodies,
    bodies,
)
def test_an_answers_known_head_means_what_a_parser_makes_of_it(
    status: bytes, lines: list[bytes], body: bytes, other: bytes
) -> None:
    def written(body: bytes) -> bytes:
        return b"\r\n".join((b"HTTP/1.1 " + status, *lines, b"Content-Length: %d" % len(body), b"", b"")) + body

    pool = Pool("127.0.0.1", 9)
    first = connect(pool)
    first.data_received(written(body))
    if pool.known is None:
        return
    parsed = Parsed(written(other), request=False)
    again = connect(pool)
    again.data_received(written(other))
    if not parsed.whole:
        assert again.error is not None or not again.ended
        return
    assert again.ended
    assert again.take() == parsed.body
    again.release()
    assert (pool.idle() is again) == parsed.keeps_alive


# --- chunks ----------------------------------------------------------------------------------------------------------
def sized(data: bytes, spelled: int) -> bytes:
    size = (b"%x", b"%X", b"%04x", b"%x;a=b", b'%x;q="z"', b"%08X")[spelled] % len(data)
    return size + b"\r\n" + data + b"\r\n"


tricky = st.sampled_from(
    (b"5\r\nhello\r\n", b"\r\n", b"0\r\n\r\n", b"1\r\n", b"a\r\n1\r\n", b"data: x\n\n", b"\n", b"\r")
)
pieces = st.one_of(
    st.binary(min_size=1, max_size=40),
    tricky,
    st.lists(tricky, min_size=1, max_size=4).map(b"".join),
    st.just(b"y" * 600),
)
streams = st.lists(st.tuples(pieces, st.integers(0, 5)), max_size=8)
ends = st.sampled_from((b"0\r\n\r\n", b"000\r\n\r\n", b"0;last\r\n\r\n", b"0\r\nX-Trailer: 1\r\nY: 2\r\n\r\n"))


async def piped(head: bytes, parts: Sequence[bytes], *, before: int = 0) -> tuple[bytes, bool]:
    """What reaches the sink when the parts come one by one, and whether the stream ended well. `before`: so many of
    them are there when it begins."""
    got: list[bytes] = []
    ended: list[str] = []
    connection = connect()
    for part in (head, *parts[:before]):
        connection.data_received(part)

    def sink(data: bytes, framed: bytes | None) -> None:
        got.append(data)
        if framed is not None:
            size, _, rest = framed.partition(b"\r\n")
            assert (int(size, 16), rest) == (len(data), data + b"\r\n")

    async def pipe() -> None:
        try:
            await connection.pipe(sink)
            ended.append("well")
        except Broken:
            ended.append("broken")

    Run(pipe(), lambda _: None).start()
    for part in parts[before:]:
        if ended:
            break
        connection.data_received(part)
    connection.connection_lost(None)
    return b"".join(got), ended == ["well"]


def split(data: bytes, places: Iterable[int]) -> list[bytes]:
    cuts = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[one:other] for one, other in pairwise(cuts) if one != other]


@given(streams, ends, st.lists(st.integers(0, 100_000), max_size=12), st.booleans(), st.integers(0, 3))
def test_any_split_of_a_chunked_stream_gives_the_same_bytes(
    chunks: list[tuple[bytes, int]], end: bytes, places: list[int], with_boundaries: bool, before: int
) -> None:
    frames = [sized(data, spelled) for data, spelled in chunks]
    if with_boundaries:  # most reads end where chunks do
        parts = [part for frame in (*frames, end) for part in split(frame, places[:1] if len(frame) % 3 == 0 else ())]
    else:
        parts = split(b"".join(frames) + end, places)
    found = asyncio.run(piped(STREAM_HEAD, parts, before=before))
    assert found == (b"".join(data for data, _ in chunks), True)


@given(streams, st.lists(st.integers(0, 100_000), max_size=6), st.integers(0, 100_000))
def test_a_stream_that_is_cut_anywhere_is_a_beginning_and_never_whole(
    chunks: list[tuple[bytes, int]], places: list[int], cut_at: int
) -> None:
    whole = b"".join(sized(data, spelled) for data, spelled in chunks) + b"0\r\n\r\n"
    got, ended = asyncio.run(piped(STREAM_HEAD, split(whole[: cut_at % len(whole)], places)))
    assert b"".join(data for data, _ in chunks).startswith(got)
    assert not ended


@pytest.mark.parametrize("spelled", [b"15", b"0015", b"0E;x=5"], ids=["plain", "zeros", "extension"])
def test_a_size_that_comes_in_two_reads_is_one_size(spelled: bytes) -> None:
    """The last digit and what follows it look like a whole chunk of 5 bytes."""
    data = b"hello\r\n" + b"z" * (int(spelled.partition(b";")[0], 16) - 7)
    rest = [b"5\r\nhello\r\n", data[7:] + b"\r\n", b"0\r\n\r\n"]
    for parts, before in (
        ([chunk(b"first"), spelled[:-1], *rest], 0),
        ([chunk(b"first"), spelled[:-1], *rest], 2),
        ([chunk(b"first") + spelled[:-1], *rest], 0),
        ([chunk(b"first") + spelled[:-1], *rest], 1),
    ):
        assert asyncio.run(piped(STREAM_HEAD, parts, before=before)) == (b"first" + data, True)


@pytest.mark.parametrize(
    "garbage", [b"zz\r\nhello\r\n", b"-5\r\nhello\r\n", b"5\r\nhello!!\r\n", b"5hello", b"\r\n5\r\nhello\r\n"]
)
def test_what_is_no_chunk_ends_the_stream_as_broken(garbage: bytes) -> None:
    got, ended = asyncio.run(piped(STREAM_HEAD, [chunk(b"first"), garbage, chunk(b"more"), b"0\r\n\r\n"]))
    assert got.startswith(b"first")
    assert not ended


def test_a_stream_of_a_plain_length_is_never_read_as_chunks() -> None:
    body = chunk(b"hello") * 3
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert asyncio.run(piped(head, [chunk(b"hello")] * 3)) == (body, True)


async def test_what_an_engine_sends_after_its_answers_end_breaks_the_connection_and_not_the_answer(
    start: Start, engine: MockEngine
) -> None:
    event = b"data: [DONE]\n\n"
    more = mock_engine.says(STREAM_HEAD, chunk(event), mock_engine.LAST + chunk(b"data: forged\n\n"))
    async with start(contents(endpoint(engine.port))) as gateway:
        for _ in range(3):
            engine.script.append(more)
            assert (await gateway.chat({"stream": True})).content == event
            assert (await gateway.chat()).content == ANSWER.partition(b"\r\n\r\n")[2]
