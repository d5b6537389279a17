"""The head of a safetensors file: the shapes of its tensors, without their numbers. Pure.

Eight bytes say how long a JSON object is that follows: {name: {dtype, shape, data_offsets}}.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from agent.gguf import Bytes, Shape

MAX_HEAD_BYTES = 32 * 1024 * 1024


class NotSafetensors(ValueError):
    """`str()` says why, as the end of a sentence about the file."""


def read_shapes(file: Bytes) -> Mapping[str, Shape]:
    """Raises NotSafetensors, and whatever `file.read` raises."""
    start = file.read(8)
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= size <= MAX_HEAD_BYTES:
        raise NotSafetensors("does not begin as a safetensors file does")
    head = file.read(size)
    if len(head) < size:
        raise NotSafetensors("ends within its head; it was not copied whole")
    try:
        held = json.loads(head)
        return {name: _shape(entry["shape"]) for name, entry in held.items() if name != "__metadata__"}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        raise NotSafetensors("does not say what tensors it holds, as a safetensors file does") from None


def _shape(lengths: object) -> Shape:
    if not isinstance(lengths, list) or not all(type(each) is int and each >= 0 for each in lengths):
        raise ValueError
    return tuple(lengths)
