"""Where each engine's Prometheus text says how busy it is. Pure.

A mapping that names its own `running` is complete as it stands: what it leaves empty stays unknown. One that does not
means vLLM's names.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from urllib.parse import urlencode

from catalog.spec import Metrics

Names = tuple[str, ...]
MAX_BYTES = 4 * 1024 * 1024


VLLM = Metrics(
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
)
SGLANG = Metrics(
    running=("sglang:num_running_reqs",), waiting=("sglang:num_queue_reqs",), kv_used=("sglang:token_usage",)
)
LLAMACPP = Metrics(
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    kv_used=("llamacpp:kv_cache_usage_ratio",),  # gone from newer builds, then unknown
)
ENGINES = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP}
GIVE_BY_NAME = frozenset(("vllm",))
"""Engines that make only the lines that are asked for. vLLM's API server takes milliseconds over a whole page."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine says of itself; None is unknown."""

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None


UNKNOWN = Load()


def mapping_for(engine: str, own: Metrics | None = None) -> Metrics:
    if own is not None and own.running:
        return own
    return ENGINES.get(engine, VLLM)


@functools.lru_cache(maxsize=256)
def by_name(mapping: Metrics) -> bytes:
    """Where Prometheus' client for Python gives those figures alone. Without the slash, vLLM gives the whole page."""
    names = mapping.running + mapping.waiting + mapping.kv_used
    return b"/metrics/?" + urlencode([("name[]", name) for name in names]).encode()


def read(text: str, mapping: Metrics) -> Load:
    """The load in an exposition. Ranks of one engine repeat a figure; data-parallel engines add up."""
    running, waiting = _total(text, mapping.running), _total(text, mapping.waiting)
    kv = _samples(text, mapping.kv_used)
    return Load(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_used=min(1.0, max(kv)) if kv else None,
    )


_RANK = re.compile(r'(?:tp|pp)_rank="[^"]*",?')
_REST = re.compile(r"(?:\{(.*)\})?[ \t]+(\S+)")
"""What follows a sample's name in its line."""


def _total(text: str, names: Names) -> float | None:
    samples = _samples(text, names)
    return sum(samples) if samples else None


def _samples(text: str, names: Names) -> list[float]:
    """One value per label set, not counting the rank inside a tensor or pipeline group.

    Looks for the name instead of at every line, and no further than the samples of one name, which the format keeps
    together: vLLM's page has 60 kB, and hundreds of engines are read each second.
    """
    for name in names:
        found: dict[str, float] = {}
        at = text.find(name)
        while at >= 0:
            end = at + len(name)
            sample = _REST.match(text, end) if at == 0 or text[at - 1] == "\n" else None
            if sample is not None:
                _note(found, sample)
                if found and not text.startswith(name, text.find("\n", end) + 1):
                    break
            at = text.find(name, end)
        if found:
            return list(found.values())
    return []


def _note(found: dict[str, float], sample: re.Match[str]) -> None:
    labels, value = sample.groups("")
    try:
        number = float(value)
    except ValueError:
        return
    if math.isfinite(number) and number >= 0:
        key = _RANK.sub("", labels).rstrip(",")
        found[key] = max(number, found.get(key, 0.0))
