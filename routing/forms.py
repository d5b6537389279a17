"""Bodies that are forms, as audio comes: the model that they name, and where. Pure."""

from __future__ import annotations

import re

from routing import openai

_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*?boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition:[^\r\n]*;\s*name="?([^";\r\n]+)"?', re.IGNORECASE)
FORM_PARTS = 64


def boundary(content_type: bytes) -> bytes | None:
    found = _BOUNDARY.match(content_type.strip())
    return (found[1] or found[2]) if found else None


def peek(body: bytes, between: bytes) -> openai.Peek:
    """The model that a multipart form names, and where; `between` is its boundary. Raises Refusal (400)."""
    mark = b"--" + between
    at = body.find(mark)
    found: openai.Span | None = None
    stream = False
    for _ in range(FORM_PARTS):
        if at < 0:
            break
        head_end = body.find(b"\r\n\r\n", at)
        end = body.find(b"\r\n" + mark, at + len(mark))
        if head_end < 0 or end < head_end + 4:
            break
        name = _NAME.search(body, at, head_end)
        if name and name[1] == b"model":
            if found:
                raise openai.twice("model")
            found = (head_end + 4, end)
        elif name and name[1] == b"stream":
            stream = body[head_end + 4 : end].strip().lower() == b"true"
        at = end + 2
    model = body[slice(*found)].decode("utf-8", "replace").strip() if found else ""
    if not found or not model:
        raise openai.Refusal(
            "body_invalid", "The form has no field `model`; GET /v1/models lists the names.", param="model"
        )
    return openai.Peek(model, found, stream, None, asks_usage=True, max_tokens=None, insert_at=0)
