"""Which replica has seen the beginning of a prompt before, so that its cache still knows it (GW-40). Pure.

A prompt is known by keys, one for each of its leading blocks; each key stands for everything up to its block's end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

FIRST_BLOCK = 256
MAX_KEYS = 32
EQUAL_BLOCKS = 4
"""After so many blocks they double in size: 32 keys reach through 255 KiB, and no more is read."""
MAX_ENTRIES = 32_768
"""A few thousand conversations; about 8 MiB."""
HOLDERS = 4
"""Replicas remembered for one key: a prefix that outgrows its first replica has others."""
MAX_REPLICAS = 1024


def _ends() -> tuple[int, ...]:
    ends, at = [], 0
    for index in range(MAX_KEYS):
        at += FIRST_BLOCK << index // EQUAL_BLOCKS
        ends.append(at)
    return tuple(ends)


ENDS = _ends()
"""Where each key's block ends, in bytes from the beginning of the prompt."""
_BLOCKS = tuple(zip((0, *ENDS), ENDS, strict=False))


def _shortest(count: int) -> int:
    """Of `count` keys the first that stands for at least half of what the last one does."""
    return next(index for index in range(count) if 2 * ENDS[index] >= ENDS[count - 1])


_SHORTEST = (0, *(_shortest(count) for count in range(1, MAX_KEYS + 1)))


def prefix_keys(body: bytes, start: int, end: int, scope: str = "") -> tuple[int, ...]:
    """Keys of the prompt at body[start:end], shortest prefix first; only whole blocks have one. `scope`: what else a
    cached prefix depends on, such as the adapter. Keys mean nothing in another process."""
    keys = []
    key = hash(scope)
    length = end - start
    for block, after in _BLOCKS:
        if after > length:
            break
        key = hash((key, body[start + block : start + after]))
        keys.append(key)
    return tuple(keys)


class Index:
    """What was sent where, the least recently sent forgotten beyond `max_entries` keys."""

    __slots__ = ("_held", "_ids", "_max_entries", "_names", "_next_id")

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._held: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._held)

    def find(self, keys: Sequence[int], replicas: Collection[str]) -> str | None:
        """Of `replicas` the one that saw the longest part of the prompt; of several the first that saw it. Less than
        half of the prompt is not enough: how everybody's prompts begin says nothing about where to send one."""
        held, names = self._held, self._names
        for index in range(len(keys) - 1, _SHORTEST[len(keys)] - 1, -1):
            for holder in held.get(keys[index], ()):
                name = names.get(holder)
                if name is not None and name in replicas:
                    return name
        return None

    def note(self, keys: Sequence[int], replica: str) -> None:
        """The prompt goes to `replica`."""
        holder = self._ids.get(replica)
        if holder is None:
            holder = self._meet(replica)
        alone = (holder,)
        held = self._held
        for key in keys:
            known = held.get(key)
            if known is None:
                held[key] = alone
                continue
            if holder not in known:
                known = tuple(each for each in known if each in self._names)
                held[key] = (*known[1 - HOLDERS :], holder)
            held.move_to_end(key)
        while len(held) > self._max_entries:
            held.popitem(last=False)

    def _meet(self, replica: str) -> int:
        if len(self._ids) >= MAX_REPLICAS:
            del self._names[self._ids.pop(next(iter(self._ids)))]
        holder = self._ids[replica] = self._next_id
        self._names[holder] = replica
        self._next_id += 1
        return holder

    def keep(self, replicas: Collection[str]) -> None:
        """Forget every other replica; one that comes back under the same name has seen nothing."""
        self._ids = {name: holder for name, holder in self._ids.items() if name in replicas}
        self._names = {holder: name for name, holder in self._ids.items()}
