"""Whether a request asks an engine to fetch something, and from where. Pure.

Engines load whatever image, audio, video or file a request names, from any host that they can reach and some of them
from their own disk. What carries its content (a data: URL, or bare base64) is no address and passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

from routing.openai import Refusal

Policy = frozenset[str] | None
"""The hosts that may be named; None: any address may."""
MAX_DEPTH: Final = 64
MAX_VALUES: Final = 200_000
"""Objects, lists and media in a body: to look through more would hold everybody else up."""
_ESCAPE: Final = re.compile(rb"\\u00[2-7]")
"""How JSON can hide a letter of ASCII, and so of a field's name."""
_NAMED: Final = re.compile(rb'"(?:(?<=url")|image|audio|video|file|input_)')
"""What begins or ends the names in `_MEDIA`, and `url`. It begins with a quote, which is found much faster than any of
them, and a long prompt has few."""
_MEDIA: Final = frozenset(
    f"{before}{kind}{after}"
    for before in ("", "input_")
    for kind in ("image", "audio", "video", "file")
    for after in ("", "s", "_url", "_data")
)
_LABELS: Final = frozenset(
    {
        "type",
        "format",
        "detail",
        "filename",
        "name",
        "title",
        "text",
        "id",
        "file_id",
        "media_type",
        "mime_type",
        "uuid",
    }
)
"""Members of a content part that say something about it and are never fetched."""
_UNSEEN: Final = frozenset({"tools", "functions", "response_format", "metadata"})
"""Members of a body that hold people's own JSON, where such a name means nothing."""
_ADDRESS: Final = re.compile(r"https?://([A-Za-z0-9.-]+)(?::[0-9]{1,5})?(?:/[!-\[\]-~]*)?\Z")
_LOOKED_AT: Final = 1024
_SHORTEST_BASE64: Final = 64
_decode: Final = msgspec.json.Decoder().decode
Where = tuple[Any, str | int] | None
"""The way to a value: its parent's, and its name or number there."""


def policy(setting: Literal["off", "any"] | Iterable[str]) -> Policy:
    """What `gateway.media_urls` means."""
    if setting == "any":
        return None
    return frozenset() if setting == "off" else frozenset(host.lower() for host in setting)


def forbidden(body: bytes, allowed: Policy) -> str | None:
    """The first field of a JSON body that names something an engine may not fetch; None when there is none."""
    if allowed is None or not _may_name_media(body):
        return None
    if body.count(b"{") + body.count(b"[") > MAX_VALUES:
        raise _too_many()
    try:
        value = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        try:
            value = json.loads(body)  # what engines read with: it takes half a surrogate pair
        except (ValueError, RecursionError):
            return "body"
    return _look_through(value, allowed)


def refusal(field: str) -> Refusal:
    return Refusal(
        "body_invalid",
        f"`{field}` names something to fetch, which engines here may not. Send its content as a data: URL, or ask an "
        "operator to allow its host (gateway.media_urls).",
        param=field,
    )


def _too_many() -> Refusal:
    return Refusal("body_invalid", f"The body holds more than {MAX_VALUES:,} objects, lists and media; send less.")


def _may_name_media(body: bytes) -> bool:
    return _NAMED.search(body) is not None or _ESCAPE.search(body) is not None


def _look_through(body: Any, allowed: frozenset[str]) -> str | None:
    """Depth first in the order of the body, without recursion: what nests too deeply to be looked at is refused.

    Inside of media the nearest member's name goes along; outside it is None.
    """
    left: list[tuple[Any, Where, str | None, int]] = [(body, None, None, 0)]
    seen = 0
    while left:
        value, where, inside, depth = left.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise _too_many()
        if isinstance(value, str):
            if inside is not None and not _passes(value, inside, allowed):
                return _shown(where)
        elif depth > MAX_DEPTH:
            return _shown(where)
        elif isinstance(value, list):
            found = list | dict if inside is None else str | list | dict
            items = enumerate(value)
            left += [(each, (where, at), inside, depth + 1) for at, each in items if isinstance(each, found)][::-1]
        else:
            members = [
                (each, (where, name), name if inside is not None or _is_media(name, each) else None, depth + 1)
                for name, each in value.items()
                if (isinstance(each, list | dict) or (isinstance(each, str) and (inside is not None or name in _MEDIA)))
                and not (name in _UNSEEN if depth == 0 else name == "input" and value.get("type") == "tool_use")
            ]
            left += members[::-1]
    return None


def _is_media(name: str, value: Any) -> bool:
    """Anthropic's parts have a `source`, which is an address when it holds a `url`."""
    return name in _MEDIA or (name == "source" and isinstance(value, dict) and "url" in value)


def _passes(text: str, name: str, allowed: frozenset[str]) -> bool:
    if not text or name in _LABELS or text[:5].lower() == "data:":
        return True
    found = _ADDRESS.match(text)
    if found is not None and found[1].lower() in allowed:
        return True
    if name.endswith("url"):
        return False
    start = text[:_LOOKED_AT]
    if ":" in start or "." in start:
        return False
    return len(text) >= _SHORTEST_BASE64 or not text.startswith("/")


def _shown(where: Where) -> str:
    steps: list[str] = []
    while where is not None:
        where, step = where
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:40]}")
    return "".join(reversed(steps)).removeprefix(".")[:200] or "body"
