"""Request bodies that clients compressed, undone piece by piece and never past the limit. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from routing.openai import BUSY_RETRY_S, Refusal

SLICE = 256 * 1024
MAX_LAYERS = 2
MAX_MEMBERS = 1000
_GZIP, _DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS


def too_large(limit: int) -> Refusal:
    return Refusal(
        "body_too_large",
        f"The body is larger than {limit:,} bytes, the limit here after decompression; send less.",
    )


def too_many(most: int) -> Refusal:
    text = (
        f"The bodies of requests that come in or wait here take {most:,} bytes, as many as may. Try again in a moment."
    )
    return Refusal("engine_busy", text, retry_after_s=BUSY_RETRY_S)


def decode(body: bytes, encodings: Sequence[str], limit: int) -> bytes:
    """Undo `encodings` (as in Content-Encoding: the last was applied last). Raises Refusal (400, 413, 415)."""
    layers = [name for name in (each.strip().lower() for each in encodings) if name not in ("", "identity")]
    if len(layers) > MAX_LAYERS:
        raise Refusal("encoding_unsupported", "The body is compressed more than twice; send it compressed once.")
    for layer in reversed(layers):
        if layer in ("gzip", "x-gzip"):
            body = _gunzip(body, limit)
        elif layer == "deflate":
            body = _inflate(body, limit)
        else:
            raise Refusal(
                "encoding_unsupported",
                f"Content-Encoding {layer[:40]} is not understood here; send gzip, deflate or none.",
            )
    return body


def _gunzip(body: bytes, limit: int) -> bytes:
    """One or several gzip members, as the format allows."""
    parts: list[bytes] = []
    size, rest = 0, body
    while rest or not parts:
        if len(parts) == MAX_MEMBERS:
            raise Refusal("body_invalid", f"The gzip body has more than {MAX_MEMBERS} members; send it as one.")
        member, rest = _expand(rest, _GZIP, limit - size, "gzip", limit)
        parts.append(member)
        size += len(member)
    return b"".join(parts)


def _inflate(body: bytes, limit: int) -> bytes:
    # RFC 9110 means zlib's format; some clients send the bare stream.
    window = _DEFLATE if body[:1] and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0 else -_DEFLATE
    return _expand(body, window, limit, "deflate", limit)[0]


def _expand(body: bytes, window: int, room: int, name: str, limit: int) -> tuple[bytes, bytes]:
    engine = zlib.decompressobj(window)
    parts: list[bytes] = []
    rest = body
    try:
        while not engine.eof:
            part = engine.decompress(rest, min(SLICE, room + 1))
            rest = engine.unconsumed_tail
            room -= len(part)
            if room < 0:
                raise too_large(limit)
            parts.append(part)
            if not part and not rest and not engine.eof:
                raise Refusal("body_invalid", f"The {name} body is cut short; send it whole.")
    except zlib.error:
        raise Refusal("body_invalid", f"The body is not {name}, though Content-Encoding says so.") from None
    return b"".join(parts), engine.unused_data
