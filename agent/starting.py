"""The edge that starts a shard's commands in their order, and keeps the record that finds them again (AG-12, AG-22)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic

from agent import adopt, files, launching, output, ports, process, runs, validate
from agent.config import AgentSettings
from agent.engines import ENGINES
from agent.engines.base import Command, Launch
from agent.host import Host
from agent.runs import Run

log = logging.getLogger(__name__)

QUARANTINE_S = 120.0
"""How long a released port stays unused, so that nobody who still knows it reaches another model."""


class Starter:
    """`runs` are all of this node's: no two get one port."""

    def __init__(self, settings: AgentSettings, *, agent_mark: str, runs: Callable[[], Iterable[Run]]) -> None:
        self._settings = settings
        self._agent_mark = agent_mark
        self._runs = runs
        self._records = adopt.Records(settings.work_dir / "shards")
        self._port_file = settings.work_dir / "last-port"
        self._released_at: dict[int, float] = {}

    def found(self) -> adopt.Found:
        """What an earlier agent left."""
        return adopt.look(self._records, self._agent_mark)

    def mark(self, run: Run) -> str:
        return adopt.shard_mark(self._agent_mark, run.shard.spec)

    async def start(self, run: Run, host: Host) -> None:
        """Start all of the run's commands. Raises NotStarted and OSError."""
        spec, build = run.shard.spec, run.build
        assert build
        # Looked at again: what it needs may have gone while its weights came.
        reason = validate.refusal(spec, host, has_binary=True)
        if reason:
            raise launching.NotStarted(reason)
        run.port = self._choose_port(run)
        run.awaits = self._choose_port(run) if spec.nodes > 1 and spec.rank == 0 else None
        rank = await asyncio.to_thread(launching.adapter_rank, _adapter_places(run))
        launch = Launch(
            build=build,
            weights=str(run.weights),
            port=run.port,
            rendezvous=run.awaits,
            adapters=tuple(map(str, run.adapters)),
            adapter_rank=rank,
            private=str(self._records.private(spec)),
            key=run.key,
        )
        commands = ENGINES[spec.engine].commands(spec, host, launch)
        run.expected = len(commands)
        output.begin(run.output)
        for command in commands:
            await self._start_one(run, command)

    async def _start_one(self, run: Run, command: Command) -> None:
        if command.wait_for is not None:
            await launching.wait_for_listener(*command.wait_for, limit_s=command.wait_s)
        if command.private is not None:
            path, content = command.private
            files.write_private(Path(path), content.encode())
        marks = {process.AGENT_MARK: self._agent_mark, process.SHARD_MARK: self.mark(run)}
        try:
            pid = process.spawn(command.argv, launching.environment(command, marks), run.output)
        except FileNotFoundError:
            raise launching.NotStarted(f"{command.argv[0]} is not there. Install it, or correct agent.yaml.") from None
        identity = process.identify(pid)
        if identity is None:
            raise launching.NotStarted(f"{Path(command.argv[0]).name} {process.ending(process.reap(pid))} at once")
        run.processes.append(identity)
        # Written at once: an agent killed now must find the process again.
        self.record(run)

    def record(self, run: Run) -> None:
        # A wrapper replaces its command after the start, so the command is read again each time.
        current = [process.identify(identity.pid) or identity for identity in run.processes]
        run.processes = [
            new if (new.started, new.boot) == (old.started, old.boot) else old
            for new, old in zip(current, run.processes, strict=True)
        ]
        record = adopt.Record(
            spec=run.shard.spec,
            processes=tuple(run.processes),
            port=run.port or 0,
            state=run.shard.state,
            output=str(run.output),
            address=run.address,
            key=run.key,
            expected=run.expected,
            awaits=run.awaits,
            listens=run.shard.listens,
        )
        try:
            self._records.write(record)
        except OSError as error:
            log.error("%s", files.sentence(error, f"The record of {runs.name(run)} cannot be written"))

    def release(self, run: Run) -> None:
        """Forget an ended shard and give its ports back, after a while."""
        self._records.forget(run.shard.spec)
        self._released_at |= dict.fromkeys(run.ports, monotonic())

    def _choose_port(self, run: Run) -> int:
        """Raises NotStarted."""
        try:
            last = int(self._port_file.read_text())
        except (OSError, ValueError):
            last = None
        span = self._settings.ports
        port = ports.choose(
            span.first,
            span.last,
            after=last,
            used={port for one in self._runs() if not one.shard.ended for port in one.ports},
            released_at=self._released_at,
            quarantine_s=QUARANTINE_S,
            now=monotonic(),
            is_free=lambda port: launching.is_free(run.address, port),
        )
        if port is None:
            raise launching.NotStarted(
                f"no port between {span.first} and {span.last} is free. Widen `ports` in agent.yaml."
            )
        files.write_private(self._port_file, str(port).encode())
        return port


def _adapter_places(run: Run) -> list[Path]:
    """Where adapters may say their rank, those included that are loaded only when asked for."""
    spec = run.shard.spec
    if spec.engine == "llamacpp":
        return []
    return run.adapters or [Path(each.source) for each in spec.adapters if each.source.startswith("/")]
