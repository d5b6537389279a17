from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.bodies import MAX_MEMBERS, decode
from routing.openai import Refusal

LIMIT = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    engine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return engine.compress(data) + engine.flush()


@given(st.binary(max_size=4000))
def test_every_supported_encoding_gives_the_body_back(data: bytes) -> None:
    assert decode(gzip.compress(data), ["gzip"], LIMIT) == data
    assert decode(gzip.compress(data), ["X-GZIP"], LIMIT) == data
    assert decode(zlib.compress(data), ["deflate"], LIMIT) == data
    assert decode(gzip.compress(gzip.compress(data)), ["gzip", " gzip"], LIMIT) == data
    assert decode(data, ["identity", ""], LIMIT) == data


def test_bare_deflate_and_several_gzip_members_are_read() -> None:
    assert decode(raw_deflate(b"hello" * 50), ["deflate"], LIMIT) == b"hello" * 50
    assert decode(gzip.compress(b"a") + gzip.compress(b"b"), ["gzip"], LIMIT) == b"ab"


@pytest.mark.parametrize(
    ("body", "encoding", "code"),
    [
        (b"{}", "br", "encoding_unsupported"),
        (b"{}", "zstd", "encoding_unsupported"),
        (b"{}", "foo", "encoding_unsupported"),
        (b"{}", "gzip,gzip,gzip", "encoding_unsupported"),
        (b"{}", "gzip", "body_invalid"),
        (b"", "gzip", "body_invalid"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-9], "gzip", "body_invalid"),
        (b"\xff\xff\xff", "deflate", "body_invalid"),
        (gzip.compress(b"", mtime=0) * (MAX_MEMBERS + 1), "gzip", "body_invalid"),
        (gzip.compress(b"x" * (LIMIT + 1), mtime=0), "gzip", "body_too_large"),
        (gzip.compress(b"x" * LIMIT, mtime=0) * 2, "gzip", "body_too_large"),
    ],
)
def test_what_cannot_be_undone_is_refused_with_its_reason(body: bytes, encoding: str, code: str) -> None:
    with pytest.raises(Refusal) as caught:
        decode(body, encoding.split(","), LIMIT)
    assert caught.value.code == code


def test_a_body_of_exactly_the_limit_passes() -> None:
    assert len(decode(gzip.compress(b"x" * LIMIT), ["gzip"], LIMIT)) == LIMIT


def test_a_bomb_is_stopped_at_the_limit_with_little_memory() -> None:
    engine = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    bomb = b"".join(engine.compress(b"\0" * (1 << 20)) for _ in range(200)) + engine.flush()
    tracemalloc.start()
    try:
        with pytest.raises(Refusal, match="larger than"):
            decode(bomb, ["gzip"], LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()
