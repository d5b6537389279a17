"""Whether a shard is one that registers can tell of: with one that they cannot, no control plane takes this node. Pure.

The bounds are those of a control plane's own intake and catalog, so that only a broken one goes beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from agent.protocol import MAX_GPUS, MAX_MESSAGE_BYTES, MAX_SHARDS, ShardSpec

MAX_SOURCE = 1000
MAX_ARGUMENT = 4096
MAX_KEY = 256
MAX_NUMBER = 2**31 - 1
MAX_SPEC_BYTES = 32 * 1024
MAX_TOLD_BYTES = MAX_MESSAGE_BYTES // 4
"""Of all specs in a register, which has an inventory and the ends of other shards in it too."""
MAX_RUNNING = MAX_SHARDS // 2
NAMES = {"replica": 120, "model": 200, "profile": 80, "profile_digest": 64, "engine": 20}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")
_YEARS = range(2000, 9000)


def objection(spec: ShardSpec, running: Iterable[ShardSpec], key: str | None = None) -> str | None:
    """Why `spec` cannot be started beside those that run, naming the field; None when it can. `key`: the engine's."""
    if key and not _is_line(key, MAX_KEY):
        return f"engine_key: it is not one line of at most {MAX_KEY} characters."
    return next(_objections(spec), None) or _too_much(spec, running)


def _objections(spec: ShardSpec) -> Iterator[str]:
    for field, limit in NAMES.items():
        if not _is_line(getattr(spec, field), limit):
            yield f"{field}: it is not one line of 1 to {limit} characters."
    for field, source in (("source", spec.source), *(("adapters", each.source) for each in spec.adapters)):
        if not _is_line(source, MAX_SOURCE):
            yield f"{field}: a source is not one line of 1 to {MAX_SOURCE} characters."
    if not all(_is_line(each.name, NAMES["model"]) for each in spec.adapters):
        yield f"adapters: a name is not one line of 1 to {NAMES['model']} characters."
    if not all(len(text) <= NAMES["replica"] for text in (spec.fabric, *spec.gpus)) or len(spec.gpus) > MAX_GPUS:
        yield "gpus: the name of a card or of the fabric is too long, or there are too many."
    numbers = {"rank": spec.rank, "slots": spec.slots, "tp": spec.tp, "pp": spec.pp, "nodes": spec.nodes}
    numbers |= {"max_loaded_adapters": spec.max_loaded_adapters or 0}
    for name, number in (*numbers.items(), ("cores", spec.cores), ("startup_timeout_s", spec.startup_timeout_s)):
        if not 0 <= number <= MAX_NUMBER:
            yield f"{name}: it is not between 0 and {MAX_NUMBER}."
    if spec.made_at is not None and (spec.made_at.tzinfo is None or spec.made_at.year not in _YEARS):
        yield "made_at: it has no time zone, or is not of our time."
    for arg in spec.args:
        if len(arg) > MAX_ARGUMENT or "\0" in arg:
            yield f"args: one has more than {MAX_ARGUMENT} characters, or a NUL in it."
    for name, value in spec.env.items():
        if not _VARIABLE.match(name) or len(value) > MAX_ARGUMENT or "\0" in value:
            yield f"env: {name[:40]!r} is no variable's name, or its value is too long or has a NUL in it."


def _is_line(text: str, limit: int) -> bool:
    return 1 <= len(text) <= limit and text.isprintable()


def _too_much(spec: ShardSpec, running: Iterable[ShardSpec]) -> str | None:
    size = _size(spec)
    if size > MAX_SPEC_BYTES:
        return f"args: with all else that it says the shard takes {size} bytes; {MAX_SPEC_BYTES} is the most."
    others = [_size(each) for each in running if (each.replica, each.rank) != (spec.replica, spec.rank)]
    if len(others) >= MAX_RUNNING or sum(others) + size > MAX_TOLD_BYTES:
        return f"replica: {len(others)} shards run on this node, which is as many as it can tell of."
    return None


def _size(spec: ShardSpec) -> int:
    return len(msgspec.json.encode(spec))
