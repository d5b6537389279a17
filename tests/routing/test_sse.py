from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import sse
from routing.accounting import TAIL_BYTES, of_tail
from routing.shapes import Tokens
from routing.sse import Stream

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def data(value: Any, end: str = "\n", space: str = " ") -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data:{space}{text}{end}{end}".encode()


def token(text: str = "hé", **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}], **more}


def usage_chunk(**more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [], "usage": USAGE, **more}


def split(whole: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({cut % (len(whole) + 1) for cut in cuts} | {0, len(whole)})
    return [whole[a:b] for a, b in pairwise(marks)]


ends = st.sampled_from(["\n", "\r\n"])
events = st.lists(
    st.one_of(
        st.builds(data, st.text(max_size=6).map(token), ends, st.sampled_from(["", " "])),
        st.just(b": keep-alive\n\n"),
        st.just(b"event: x\ndata: {}\n\n"),
        st.builds(data, st.just(token(usage=None)), ends),
        st.builds(data, st.just(token("a", usage=USAGE)), ends),
        st.binary(max_size=12).map(lambda raw: b"data: " + raw.replace(b"\n", b"").replace(b"\r", b"") + b"\n\n"),
    ),
    max_size=6,
)
cuts = st.lists(st.integers(0, 2000), max_size=12)


@given(events, cuts)
def test_bytes_out_equal_bytes_in_over_every_split(parts: list[bytes], where: list[int]) -> None:
    stream, whole = Stream(removing=False), b"".join(parts)
    pieces = split(whole, where)
    assert [stream.feed(piece) for piece in pieces] == pieces
    assert stream.flush() == b""
    assert stream.mid_event is False


@given(events, events, ends, cuts)
def test_only_the_usage_chunk_is_taken_out_over_every_split(
    before: list[bytes], after: list[bytes], end: str, where: list[int]
) -> None:
    extra = data(usage_chunk(), end)
    stream, rest = Stream(removing=True), b"".join([*before, *after])
    whole = b"".join([*before, extra, *after])
    out = b"".join(stream.feed(piece) for piece in split(whole, where)) + stream.flush()
    assert out == rest


@given(events, cuts, st.booleans())
def test_whole_events_are_never_held_back(parts: list[bytes], where: list[int], removing: bool) -> None:
    stream = Stream(removing=removing)
    fed = out = b""
    for piece in split(b"".join(parts), where):
        fed += piece
        out += stream.feed(piece)
        ended = max(fed.rfind(b"\n\n") + 2, fed.rfind(b"\r\n\r\n") + 4 if b"\r\n\r\n" in fed else 0)
        assert len(out) >= (ended if ended >= 2 and (b"\n\n" in fed or b"\r\n\r\n" in fed) else 0)


@given(st.lists(st.text(max_size=5), max_size=20), ends, cuts, st.booleans())
def test_the_end_and_the_usage_are_seen_over_every_split(
    texts: list[str], end: str, where: list[int], removing: bool
) -> None:
    stream = Stream(removing=removing)
    whole = b"".join([*(data(token(text), end) for text in texts), data(usage_chunk(), end), data("[DONE]", end)])
    for piece in split(whole, where):
        stream.feed(piece)
    assert stream.done
    assert of_tail(stream.tail) == Tokens(3, None, 4)


@pytest.mark.parametrize(
    "chunk",
    [
        usage_chunk(),
        {"usage": USAGE},
        {"usage": USAGE, "choices": None},
        usage_chunk(timings={"prompt_n": 1}),
    ],
)
def test_a_usage_chunk_is_known_with_and_without_choices(chunk: dict[str, Any]) -> None:
    stream = Stream(removing=True)
    assert stream.feed(data(chunk)) == b""
    assert stream.feed(data(token())) == data(token())


@pytest.mark.parametrize(
    "event",
    [
        data(token("x", usage=USAGE)),
        data({"choices": [], "usage": None}),
        data('{"usage": broken'),
        data({"choices": []}),
    ],
)
def test_what_only_looks_like_a_usage_chunk_passes(event: bytes) -> None:
    assert Stream(removing=True).feed(event) == event


def test_a_usage_chunk_that_the_engine_never_ended_does_not_slip_out() -> None:
    stream = Stream(removing=True)
    assert stream.feed(data(usage_chunk()).rstrip()) == b""
    assert stream.flush() == b""


def test_half_an_event_comes_out_at_the_end() -> None:
    stream = Stream(removing=True)
    assert stream.feed(b"data: {") == b""
    assert stream.flush() == b"data: {"
    assert stream.mid_event


def test_an_event_too_long_to_be_usage_is_passed_as_it_comes() -> None:
    stream = Stream(removing=True)
    long = b"data: " + b"a" * sse.HOLD_BYTES
    assert stream.feed(long) == long
    assert stream.mid_event
    assert stream.feed(b"b\r") == b"b\r"
    assert stream.feed(b"\n\r\n" + data(usage_chunk()) + b"data: 1\n\n") == b"\n\r\ndata: 1\n\n"
    assert not stream.mid_event
    assert stream.feed(long + b"\r\r") == long + b"\r\r"
    assert stream.feed(b"data: 2\n\n") == b"data: 2\n\n"
    assert stream.feed(long + b"\n") == long + b"\n"
    assert stream.feed(b"\n") == b"\n"
    assert stream.feed(data(usage_chunk())) == b""


@pytest.mark.parametrize("removing", [True, False])
def test_an_endless_line_is_cut_with_little_kept(removing: bool) -> None:
    stream, piece = Stream(removing=removing), b"a" * (1 << 20)
    stream.feed(b"data: ")
    fed = 0
    while not stream.cut:
        stream.feed(piece)
        fed += len(piece)
        assert fed <= sse.EVENT_LIMIT_BYTES + 2 * len(piece)
    assert len(stream.tail) <= TAIL_BYTES
    assert len(stream.head) <= sse.HEAD_BYTES


def test_events_are_counted_for_streams_whose_engine_says_nothing() -> None:
    stream = Stream(removing=False)
    stream.feed(data(token()) * 3 + data(token())[:9])
    assert stream.events == 4
    assert stream.mid_event


def test_it_tells_whether_the_beginning_of_an_event_waits() -> None:
    stream = Stream(removing=True)
    stream.feed(b"data: 1\n\ndata:")
    assert stream.holding
    stream.feed(b" 2\n\n")
    assert not stream.holding
