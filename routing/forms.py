"""Bodies that are forms, as audio comes: the model that they name, and where. Pure.

What is not written as every client writes it is refused: an engine may read it otherwise than the gateway, and find
another model in it.
"""

from __future__ import annotations

import re

from routing import openai
from routing.shapes import Peek, Span

FORM_PARTS = 64
PART_HEAD_BYTES = 4096
_PARAMETER = re.compile(rb'[ \t]*;[ \t]*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;,"]+))')
_DISPOSITION = re.compile(rb"content-disposition:[ \t]*form-data(?=[ \t]*;)", re.IGNORECASE)
_FORM = re.compile(rb"multipart/form-data(?=[ \t]*;)", re.IGNORECASE)
_CHARSETS = (b"utf-8", b"us-ascii")


def boundary(content_type: bytes) -> bytes | None:
    """What stands between the parts of a form; None: it is none. Raises Refusal (400)."""
    content_type = content_type.strip()
    start = _FORM.match(content_type)
    if start is None:
        return None
    found = _parameters(content_type, start.end())
    between = (found or {}).pop(b"boundary", b"")
    if not 0 < len(between) <= 70 or found is None or found.pop(b"charset", b"utf-8").lower() not in _CHARSETS or found:
        raise _unclear("its Content-Type must name one boundary and nothing else")
    return between


def peek(body: bytes, between: bytes) -> Peek:
    """The model that a multipart form names, and where; `between` is its boundary. Raises Refusal (400)."""
    mark = b"--" + between
    found: Span | None = None
    stream = False
    at = 2 if body.startswith(b"\r\n") else 0
    if not body.startswith(mark, at):
        raise _unclear("it does not begin with its boundary")
    for _ in range(FORM_PARTS + 1):
        at += len(mark)
        if body.startswith(b"--", at):
            break
        head_end = body.find(b"\r\n\r\n", at, at + PART_HEAD_BYTES)
        start = head_end + 4
        end = body.find(b"\r\n" + mark, start)
        if not body.startswith(b"\r\n", at) or head_end < 0 or end < 0 or body.startswith(mark, start):
            raise _unclear("one of its parts has no proper head or end")
        name = _name(body[at + 2 : head_end])
        if name == b"model":
            if found:
                raise openai.twice("model")
            found = (start, end)
        elif name == b"stream":
            stream = body[start:end].strip().lower() == b"true"
        at = end + 2
    else:
        raise _unclear(f"it has more than {FORM_PARTS} parts")
    model = body[slice(*found)].decode("utf-8", "replace").strip() if found else ""
    if not found or not model:
        raise openai.Refusal(
            "body_invalid", "The form has no field `model`; GET /v1/models lists the names.", param="model"
        )
    return Peek(model, found, stream, None, asks_usage=True, max_tokens=None, insert_at=0)


def _name(head: bytes) -> bytes:
    """Of a part, by its headers."""
    name: bytes | None = None
    for line in head.split(b"\r\n"):
        if line[:1] in b" \t" or b"\r" in line or b"\n" in line or line[:25].lower() == b"content-transfer-encoding":
            raise _unclear("the head of one of its parts cannot be understood")
        if line[:19].lower() == b"content-disposition":
            start = _DISPOSITION.match(line)
            found = None if start is None else _parameters(line, start.end())
            if name is not None or found is None or b"name" not in found or b"name*" in found:
                raise _unclear("one of its parts does not say what it is")
            name = found[b"name"]
    if name is None:
        raise _unclear("one of its parts has no name")
    return name


def _parameters(text: bytes, at: int) -> dict[bytes, bytes] | None:
    """From there to the end; None where something else stands there, or one twice."""
    found: dict[bytes, bytes] = {}
    while at < len(text):
        each = _PARAMETER.match(text, at)
        if each is None or each[1].lower() in found:
            return None
        found[each[1].lower()] = each[2] if each[2] is not None else each[3]
        at = each.end()
    return found


def _unclear(why: str) -> openai.Refusal:
    return openai.Refusal("body_invalid", f"The form cannot be read: {why}. Send it as multipart/form-data.")
