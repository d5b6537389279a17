"""The head of a GGUF file: its keys and the shapes of its tensors, without its weights. Pure.

Versions 2 and 3, as ggml describes them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

MAGIC = b"GGUF"
MAX_HEAD_BYTES = 128 * 1024 * 1024
"""The largest vocabularies take about 20 MB."""
MAX_ENTRIES = 100_000
MAX_NAME_BYTES = 65_536
MAX_DIMENSIONS = 8
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9

Scalar = str | int | float | bool
Shape = tuple[int, ...]


class NotGguf(ValueError):
    """What is read is no head of a GGUF file; `str()` says why, as the end of a sentence about the file."""


class Bytes(Protocol):
    """A file, or what stands for one: `read` gives fewer bytes than asked for only at its end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Head:
    keys: Mapping[str, Scalar]
    """Without the lists, which are vocabularies."""
    tensors: Mapping[str, Shape]
    """Lengths, the fastest one first."""

    def text(self, key: str) -> str:
        found = self.keys.get(key, "")
        return found if isinstance(found, str) else ""

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def whole(self) -> bool:
        """Whether this file holds all tensors of its model, not the first part of them."""
        count = self.keys.get("split.count", 1)
        return not isinstance(count, int) or count < 2


def read_head(file: Bytes) -> Head:
    """Raises NotGguf, and whatever `file.read` raises. Reads no more than MAX_HEAD_BYTES."""
    reader = _Reader(file)
    if reader.take(4) != MAGIC:
        raise NotGguf("does not begin with GGUF")
    version = reader.number("I")
    if version not in (2, 3):
        raise NotGguf(f"is GGUF of version {version}, which is not known; 2 and 3 are")
    tensors, keys = reader.number("Q"), reader.number("Q")
    if max(tensors, keys) > MAX_ENTRIES:
        raise NotGguf(f"claims {tensors} tensors and {keys} keys, more than any model has")
    found: dict[str, Scalar] = {}
    for _ in range(keys):
        name, value = reader.text(), reader.value()
        if value is not None:
            found[name] = value
    return Head(found, dict(reader.tensor() for _ in range(tensors)))


class _Reader:
    def __init__(self, file: Bytes) -> None:
        self.file, self.left = file, MAX_HEAD_BYTES

    def take(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise NotGguf(f"has a head of more than {MAX_HEAD_BYTES // 2**20} MiB")
        found = self.file.read(size)
        if len(found) < size:
            raise NotGguf("ends within its head; it was not copied whole")
        return found

    def number(self, kind: str) -> int:
        value: int = struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]
        return value

    def text(self) -> str:
        size = self.number("Q")
        if size > MAX_NAME_BYTES:
            raise NotGguf("holds a name that is too long for one")
        return self.take(size).decode("utf-8", "replace")

    def value(self) -> Scalar | None:
        kind = self.number("I")
        if kind == _TEXT:
            return self.take(self.number("Q")).decode("utf-8", "replace")
        if kind == _LIST:
            self.pass_over()
            return None
        if kind not in _NUMBERS:
            raise NotGguf(f"holds a value of kind {kind}, which is not known")
        return self.number(_NUMBERS[kind])

    def pass_over(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind == _TEXT:
            if count * 8 > self.left:
                raise NotGguf("holds a list that is longer than its head")
            for _ in range(count):
                self.take(self.number("Q"))
        elif kind in _NUMBERS:
            self.take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        else:
            raise NotGguf(f"holds a list of kind {kind}, which is not known")

    def tensor(self) -> tuple[str, Shape]:
        name, dimensions = self.text(), self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise NotGguf(f"holds a tensor of {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        self.take(12)  # how its numbers are written, and where
        return name, shape
