"""The edge that carries out what agent.shards decides: one loop, so there are no locks (AG-12, AG-20 to AG-24).

agent.preparing brings what a shard needs, agent.starting starts it; the rest is here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic
from typing import Any

from agent import adopt, files, launching, output, preparing, probe, process, runs, shards, tellable, validate
from agent.config import AgentSettings
from agent.engines import ENGINES
from agent.host import Host
from agent.installer import Installer, InstallError
from agent.protocol import Progress, Running, ShardSpec, ShardState, ShardStatus, StartShard, StopShard
from agent.runs import Key, Run
from agent.shards import Effect, Shard
from agent.starting import Starter
from agent.weights import FetchError, Weights

log = logging.getLogger(__name__)

BUSY_TICK_S = 0.1
QUIET_TICK_S = 1.0
KEEP_ENDED = 64
BUSY_SHARE = 0.05
"""CPU use between two probes, as a share of one core, above which an engine counts as busy."""
Publish = Callable[[ShardStatus], None]


class Supervisor:
    """Owns every shard of this node. `publish` is told of each transition."""

    def __init__(
        self, settings: AgentSettings, host: Host, *, weights: Weights, installer: Installer, publish: Publish
    ) -> None:
        self.host = host
        self._settings = settings
        self._weights = weights
        self._installer = installer
        self._publish = publish
        self._logs = settings.work_dir / "logs"
        self._agent_mark = f"{settings.node}|{settings.work_dir}"
        self._runs: dict[Key, Run] = {}
        self._starter = Starter(settings, agent_mark=self._agent_mark, runs=self._runs.values)
        self._events: deque[tuple[Key, shards.Event]] = deque()
        self._http = probe.client()
        self._woken = asyncio.Event()
        self._tick = 0

    # --- what others ask -------------------------------------------------------------------------------------------
    def running(self) -> tuple[Running, ...]:
        """Every shard, with those that ended lately: what a register carries."""
        return tuple(Running(spec=run.shard.spec, status=run.shard.status()) for run in self._runs.values())

    def states(self) -> tuple[ShardState, ...]:
        """Every shard that has not ended: what a heartbeat carries."""
        return tuple(run.shard.status() for run in self._runs.values() if not run.shard.ended)

    def cards(self) -> frozenset[str]:
        """UUIDs of those that shards were given and have not yet given back."""
        return frozenset(card for run in self._runs.values() if not run.shard.ended for card in run.shard.spec.gpus)

    def pids(self) -> set[int]:
        """Every process of every engine of this agent, remains included."""
        found = set(process.marked(self._agent_mark))
        leaders = [identity for run in list(self._runs.values()) for identity in run.processes]
        return found | set(process.in_sessions(leaders))

    def failures(self) -> tuple[ShardStatus, ...]:
        """The last words of shards that failed, for a control plane that was not there to hear them."""
        return tuple(
            ShardStatus(status=run.shard.status(), tail=run.tail)
            for run in self._runs.values()
            if run.shard.state == "failed"
        )

    def start_shard(self, command: StartShard) -> str:
        """Begin a shard; the answer is empty, or why not. One that runs already is left as it is."""
        spec = command.spec
        running = (run.shard.spec for run in self._runs.values() if not run.shard.ended)
        objection = tellable.objection(spec, running, command.engine_key)
        if objection:  # nothing of it is kept, as no register could tell it
            log.warning("A shard is not started: %s", objection)
            return objection
        key = (spec.replica, spec.rank)
        known = self._runs.get(key)
        if known and not known.shard.ended:
            if known.shard.spec.profile_digest != spec.profile_digest:
                return f"shard {spec.replica}/{spec.rank} runs under another profile; stop it first."
            return ""
        shard = Shard(spec, serves=_serves(spec))
        run = Run(shard, self._logs / f"{adopt.shard_name(*key)}.log", self.host.address, key=command.engine_key)
        self._runs.pop(key, None)
        self._runs[key] = run
        reason = validate.refusal(spec, self.host, has_binary=spec.engine in self._settings.programs)
        reason = reason or self._installer.refusal(spec.engine)
        self._feed(key, shards.Broke(reason) if reason else shards.Asked())
        return reason or ""

    def stop_shard(self, command: StopShard) -> str:
        """Stop a shard; one that this node does not know is as stopped as can be, and said so."""
        key = (command.replica, command.rank)
        run = self._runs.get(key)
        if run is None or run.shard.ended:
            self._forget(key)
            return ""
        run.told_to_stop = True
        self._feed(key, shards.StopAsked(max(0.0, command.grace_s)))
        return ""

    # --- life ------------------------------------------------------------------------------------------------------
    def adopt(self) -> None:
        """Take over what an earlier agent left running; end what nothing describes, and say so."""
        now = monotonic()
        found = self._starter.found()
        for record in (*found.running, *found.ended):
            run = _adopted(record, now)
            key = (record.spec.replica, record.spec.rank)
            self._runs[key] = run
            if record in found.running:
                pid = run.shard.pid or 0
                log.info("Adopted %s: process %d on port %d, %s", runs.name(run), pid, record.port, record.state)
            else:
                why = "ended while no agent watched it" if record.whole else "its start was cut off by its agent's end"
                self._feed(key, shards.Exited(why))
        described = {self._starter.mark(run) for run in self._runs.values()}
        for pid, mark in process.marked(self._agent_mark).items():
            if mark not in described:
                name = mark.rpartition("|")[2]
                log.warning("Killed process %d: an engine of this agent (shard %s) that no record describes", pid, name)
                process.send(pid, signal.SIGKILL)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                self.watch()
            except Exception:  # the agent's boundary: one bad look must not end the watch
                log.exception("Watching the shards failed; trying again")
            settled = all(run.shard.ended or run.shard.state == "ready" for run in self._runs.values())
            self._woken.clear()
            try:
                async with asyncio.timeout(QUIET_TICK_S if settled else BUSY_TICK_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def watch(self) -> None:
        """One look at every shard."""
        self._tick += 1
        for key, run in list(self._runs.items()):
            if run.shard.ended:
                continue
            if run.shard.state == "stopping":
                self._look_for_remains(key, run)
            else:
                self._look_for_exit(key, run)
            self._feed(key, shards.Tick())
            if self._tick % 16 == 0 and output.bound(run.output):
                log.info("Cut the output of %s, which had grown to %d MiB", runs.name(run), output.MAX_BYTES // 2**20)

    async def close(self, *, stop_engines: bool, limit_s: float = 15.0) -> None:
        """End this agent's own work; engines go on, unless they are to stop too."""
        if stop_engines:
            for key in list(self._runs):
                self._feed(key, shards.StopAsked(min(5.0, limit_s / 2), "the agent of its node was stopped"))
            try:
                async with asyncio.timeout(limit_s):
                    while any(not run.shard.ended for run in self._runs.values()):
                        self.watch()
                        await asyncio.sleep(BUSY_TICK_S)
            except TimeoutError:
                for run in self._runs.values():
                    self._kill(run)
        tasks = [task for run in self._runs.values() for task in run.tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)
        await self._http.aclose()

    # --- the loop: events in, effects out --------------------------------------------------------------------------
    def _feed(self, key: Key, event: shards.Event) -> None:
        self._events.append((key, event))
        if len(self._events) > 1:  # an effect fed it: the outer call goes on
            return
        while self._events:
            try:
                self._advance(*self._events[0])
            finally:
                self._events.popleft()

    def _advance(self, key: Key, event: shards.Event) -> None:
        run = self._runs.get(key)
        if run is None:
            return
        before = run.shard.state
        run.shard, effects = shards.step(run.shard, event, monotonic())
        if before != run.shard.state:
            log.log(logging.WARNING if run.shard.state == "failed" else logging.INFO, "%s", runs.transition(run))
            self._woken.set()
        for effect in effects:
            self._carry_out(key, run, effect)

    def _carry_out(self, key: Key, run: Run, effect: Effect) -> None:
        match effect:
            case Effect.FETCH:
                self._spawn(key, run, self._fetch(key, run))
            case Effect.INSTALL:
                self._spawn(key, run, self._install(key, run))
            case Effect.LAUNCH:
                self._spawn(key, run, self._launch(key, run))
            case Effect.PROBE:
                self._spawn(key, run, self._probe(key, run))
            case Effect.TERMINATE:
                self._cancel(run)
                for identity in reversed(run.processes):
                    process.send_group(identity, signal.SIGTERM)
            case Effect.KILL:
                self._cancel(run)
                self._kill(run)
            case Effect.PUBLISH:
                self._say(run)
            case Effect.RELEASE:
                self._release(run)
                if run.shard.state == "failed" and run.told_to_stop:  # and nobody asks again
                    self._forget(key)

    def _say(self, run: Run) -> None:
        if run.shard.state == "failed":
            run.tail = output.tail(run.output, secret=run.key) if run.port is not None else ""
        if run.processes and not run.shard.ended:
            self._starter.record(run)
        self._publish(ShardStatus(status=run.shard.status(), tail=run.tail))

    def _forget(self, key: Key) -> None:
        self._runs.pop(key, None)
        self._publish(ShardStatus(status=ShardState(replica=key[0], rank=key[1], state="stopped")))

    def _release(self, run: Run) -> None:
        self._starter.release(run)
        ended = [key for key, one in self._runs.items() if one.shard.ended]
        for key in ended[: max(0, len(ended) - KEEP_ENDED)]:
            del self._runs[key]

    def _spawn(self, key: Key, run: Run, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # the agent's boundary: a fault of ours fails one shard only
                log.exception("A fault of the agent's fails %s", runs.name(run))
                self._feed(key, shards.Broke(f"the agent itself failed: {type(error).__name__}: {error}"))

        task = asyncio.get_running_loop().create_task(guarded())
        run.tasks.add(task)
        task.add_done_callback(run.tasks.discard)

    def _cancel(self, run: Run) -> None:
        for task in run.tasks - {asyncio.current_task()}:
            task.cancel()

    # --- preparing -------------------------------------------------------------------------------------------------
    async def _fetch(self, key: Key, run: Run) -> None:
        def told(progress: Progress) -> None:
            self._feed(key, shards.Progressed(progress))

        try:
            reason = await preparing.fetch(run, self._weights, self.host, told)
        except FetchError as error:
            reason = str(error)
        if reason:
            self._feed(key, shards.Broke(reason))
            return
        run.build = self._installer.held(run.shard.spec.engine, self.host)
        self._feed(key, shards.Fetched(installed=run.build is not None))

    async def _install(self, key: Key, run: Run) -> None:
        try:
            run.build = await self._installer.ensure(run.shard.spec.engine, self.host)
        except InstallError as error:
            self._feed(key, shards.Broke(str(error)))
        else:
            self._feed(key, shards.Installed())

    async def _launch(self, key: Key, run: Run) -> None:
        try:
            await self._starter.start(run, self.host)
        except launching.NotStarted as error:
            self._feed(key, shards.Broke(str(error)))
        except OSError as error:
            self._feed(key, shards.Broke(files.sentence(error, "the engine cannot be started")))
        else:
            assert run.port is not None
            self._feed(key, shards.Launched(run.processes[-1].pid, run.port, run.awaits))

    # --- watching --------------------------------------------------------------------------------------------------
    def _look_for_exit(self, key: Key, run: Run) -> None:
        for index, identity in enumerate(run.processes):
            code = process.reap(identity.pid)
            if code is None:
                if process.still_runs(identity):
                    continue
                code = process.reap(identity.pid)  # it may have ended between the two looks
                if code is None and process.is_child(identity.pid):
                    continue  # it is ending: its command line is gone already, its status is still to come
            sidecar = index < run.expected - 1
            ended = process.ending(code)
            self._feed(key, shards.Exited(f"its sidecar {index + 1} {ended}" if sidecar else ended))
            return

    def _look_for_remains(self, key: Key, run: Run) -> None:
        for identity in run.processes:
            process.reap(identity.pid)
        if not process.members(run.processes, self._starter.mark(run)):
            self._feed(key, shards.Gone())

    def _kill(self, run: Run) -> None:
        for pid in process.members(run.processes, self._starter.mark(run)) if run.processes else ():
            process.send(pid, signal.SIGKILL)
        for identity in run.processes:
            process.reap(identity.pid)

    def _listens(self, run: Run, port: int) -> bool:
        """Asked of the kernel: engines take whoever connects there for one of their ranks."""
        members = process.members(run.processes, self._starter.mark(run))
        return process.listens(run.address, port, members) is True

    async def _probe(self, key: Key, run: Run) -> None:
        shard, port = run.shard, run.port
        assert port is not None
        if shard.awaits is not None and not shard.listens and self._listens(run, shard.awaits):
            self._feed(key, shards.Listening())
        thorough = shard.state in ("starting", "loading")
        if thorough or not run.pids:
            run.pids = process.in_sessions(run.processes)
        answer = await probe.ask(
            self._http,
            ENGINES[shard.spec.engine],
            address=run.address,
            port=port,
            served_name=shard.spec.model,
            key=run.key,
            ours=run.pids,
            thorough=thorough,
        )
        now = monotonic()
        used = process.cpu_s(run.pids)
        before, run.cpu = run.cpu, (now, used)
        busy = before is not None and used - before[1] > BUSY_SHARE * (now - before[0])
        # Who ended while it was asked has said its last; what else listens there by now is not why.
        self._look_for_exit(key, run)
        self._feed(key, shards.Probed(answer, busy))


def _serves(spec: ShardSpec) -> bool:
    engine = ENGINES.get(spec.engine)
    return engine is None or engine.serves_http(spec.rank)


def _adopted(record: adopt.Record, now: float) -> Run:
    shard = shards.adopt(
        record.spec,
        record.state,
        pid=record.processes[-1].pid if record.processes else 0,
        port=record.port,
        now=now,
        serves=_serves(record.spec),
        awaits=record.awaits,
        listens=record.listens,
    )
    return Run(
        shard,
        Path(record.output),
        record.address,
        key=record.key,
        processes=list(record.processes),
        expected=max(len(record.processes), record.expected),
        port=record.port,
        awaits=record.awaits,
    )
