"""What a restarted agent needs to find its engines again: one 0600 record a shard, beside its processes (AG-22)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from agent import files
from agent.process import Identity, alive
from agent.protocol import ShardSpec, State

log = logging.getLogger(__name__)


class Record(msgspec.Struct, frozen=True):
    """A running shard. The last process is the engine, once all are there; those before it are its sidecars."""

    spec: ShardSpec
    processes: tuple[Identity, ...]
    port: int
    state: State
    output: str
    address: str
    key: str | None = None
    expected: int = 0
    """How many processes it has when its start is over."""
    awaits: int | None = None
    listens: bool = False
    """Where a leader awaits the other ranks, and whether it does yet."""

    @property
    def whole(self) -> bool:
        return len(self.processes) >= max(1, self.expected)


def shard_name(replica: str, rank: int) -> str:
    """One shard as a file name."""
    return f"{quote(replica, safe='')}.{rank}"


def shard_mark(agent_mark: str, spec: ShardSpec) -> str:
    """What a shard's processes carry: never the same for two agents, not even for replicas of one name."""
    return f"{agent_mark}|{shard_name(spec.replica, spec.rank)}"


class Records:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: Record) -> None:
        files.write_private(self._path(record.spec), msgspec.json.encode(record))

    def forget(self, spec: ShardSpec) -> None:
        self._path(spec).unlink(missing_ok=True)
        self.private(spec).unlink(missing_ok=True)

    def read_all(self) -> list[Record]:
        """Every record that can be read; a broken one is set aside and said, and its processes count as undescribed."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Record))
            except (OSError, msgspec.DecodeError) as error:
                log.warning("%s is no record of a shard and is set aside: %s", path, error)
                path.replace(path.with_suffix(".broken"))
        return found

    def private(self, spec: ShardSpec) -> Path:
        """Where the shard may keep a file of its own. Engines take a file for YAML by its name."""
        return self._directory / f"{shard_name(spec.replica, spec.rank)}.yaml"

    def _path(self, spec: ShardSpec) -> Path:
        return self._directory / f"{shard_name(spec.replica, spec.rank)}.json"


@dataclass(frozen=True, slots=True)
class Found:
    """What the records of an earlier agent come to: shards that still run, and shards that ended meanwhile."""

    running: tuple[Record, ...]
    ended: tuple[Record, ...]


def look(records: Records, agent_mark: str) -> Found:
    running: list[Record] = []
    ended: list[Record] = []
    for record in records.read_all():
        mark = shard_mark(agent_mark, record.spec)
        lives = record.whole and all(alive(process, shard_mark=mark) for process in record.processes)
        (running if lives else ended).append(record)
    return Found(tuple(running), tuple(ended))
