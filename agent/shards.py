"""What becomes of one shard: a state machine that is fed events and answers with effects (AG-23, AG-24). Pure.

1. An ended shard stays as it is.
2. While stopping: gone -> the outcome; grace over -> SIGKILL, repeated until nothing of it is left.
3. A stop asked for: nothing runs yet -> stopped; something runs -> SIGTERM and stopping.
4. Whatever breaks, exits, hangs or is late fails: what is left of it is killed first, then "failed" is said.
5. Preparing goes fetching -> installing, where something has to be -> starting; answers lead to loading and ready.
6. A rank that serves nothing is ready once it runs, and is judged by staying alive (ND-43). Told to stop, it first
   leaves the leader half of the grace to end in order (AG-36).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from agent.protocol import ENDED, Progress, ShardSpec, ShardState, State

STARTING_PROBE_S = 0.25
READY_PROBE_S = 5.0
STRANGER_PROBES = 2
"""Probes in a row that must find a stranger on the port: an engine that just ended looks like one, and its exit, seen
in between, is the truer reason."""
HUNG_PROBES = 5
"""Silent probes in a row, while idle, after which an engine counts as hung."""
KILL_AGAIN_S = 5.0


class Answer(Enum):
    """What an engine said to a probe."""

    REFUSED = "refused"  # nothing listens
    LOADING = "loading"  # listens, and is not ready
    SERVING = "serving"  # healthy, and lists the served name
    UNNAMED = "unnamed"  # healthy, and does not list the served name
    STRANGER = "stranger"  # another process has the port
    SILENT = "silent"  # connected, and no answer in time


# --- events ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Asked:
    """The control plane wants this shard."""


@dataclass(frozen=True, slots=True)
class Progressed:
    progress: Progress


@dataclass(frozen=True, slots=True)
class Fetched:
    installed: bool = False
    """The build is here already."""


@dataclass(frozen=True, slots=True)
class Installed:
    pass


@dataclass(frozen=True, slots=True)
class Launched:
    """`awaits`: the port where a leader is to await the other ranks."""

    pid: int
    port: int
    awaits: int | None = None


@dataclass(frozen=True, slots=True)
class Listening:
    """The leader listens for the other ranks."""


@dataclass(frozen=True, slots=True)
class Broke:
    """Fetching, installing or launching did not work."""

    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    answer: Answer
    busy: bool = False
    """The engine used CPU since the last probe."""


@dataclass(frozen=True, slots=True)
class Exited:
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of the shard is left."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    grace_s: float
    reason: str = ""
    """Why, unless the control plane asks, which knows."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Asked | Progressed | Fetched | Installed | Launched | Listening | Broke | Probed | Exited | Gone | StopAsked | Tick
)


class Effect(Enum):
    FETCH = "fetch"
    INSTALL = "install"
    LAUNCH = "launch"
    PROBE = "probe"
    TERMINATE = "terminate"  # SIGTERM to the group
    KILL = "kill"  # SIGKILL to all that is left; preparations are cancelled
    PUBLISH = "publish"
    RELEASE = "release"  # forget the record and give the port back


@dataclass(frozen=True, slots=True)
class Shard:
    """`now` and all times are seconds of one monotonic clock."""

    spec: ShardSpec
    state: State = "fetching"
    serves: bool = True
    """Whether it has an HTTP server of its own that can be asked."""
    reason: str = ""
    pid: int | None = None
    port: int | None = None
    awaits: int | None = None
    """Where it awaits the other ranks, and whether it listens there yet."""
    listens: bool = False
    progress: Progress | None = None
    adopted: bool = False
    outcome: Literal["stopped", "failed"] = "stopped"
    deadline: float | None = None
    """When starting is late, or when stopping turns to SIGKILL."""
    patient_until: float | None = None
    """Until when a stopping rank waits for the leader's end before it is told itself."""
    silent: int = 0
    strange: int = 0
    probing: bool = False
    probe_at: float = 0.0
    changed_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def status(self) -> ShardState:
        return ShardState(
            replica=self.spec.replica,
            rank=self.spec.rank,
            state=self.state,
            port=self.port if self.serves else None,
            pid=self.pid,
            reason=self.reason,
            progress=self.progress,
            adopted=self.adopted,
            rendezvous=self.awaits if self.listens else None,
        )


Step = tuple[Shard, tuple[Effect, ...]]


def adopt(
    spec: ShardSpec,
    state: State,
    *,
    pid: int,
    port: int,
    now: float,
    serves: bool = True,
    awaits: int | None = None,
    listens: bool = False,
) -> Shard:
    """A shard that an earlier agent left running, in the state that it had reached."""
    if state in ("starting", "loading") and not serves:
        state = "ready"
    late = now + spec.startup_timeout_s if state in ("starting", "loading") else None
    late = now if state == "stopping" else late
    shard = Shard(spec, state, serves, pid=pid, port=port, awaits=awaits, listens=listens)
    return replace(shard, adopted=True, deadline=late, changed_at=now)


def step(shard: Shard, event: Event, now: float) -> Step:
    """The shard after `event`, and what the edge has to do."""
    if shard.ended:  # 1
        return shard, ()
    if shard.state == "stopping":
        return _stopping(shard, event, now)  # 2
    match event:
        case StopAsked(grace_s, reason):  # 3
            return _stop(shard, grace_s, reason, now)
        case Broke(reason) | Exited(reason):  # 4
            return _fail(shard, reason, now)
        case Gone():
            return _fail(shard, "its processes are gone", now)
        case Tick():
            return _tick(shard, now)
        case Probed(answer, busy):
            return _probed(replace(shard, probing=False), answer, busy, now)
        case Asked():  # 5
            return _move(shard, "fetching", now, Effect.FETCH)
        case Progressed(progress):
            return replace(shard, progress=progress), ()
        case Fetched(installed=True) if shard.state == "fetching":
            return _start(shard, now)
        case Fetched() if shard.state == "fetching":
            return _move(replace(shard, progress=None), "installing", now, Effect.INSTALL)
        case Installed() if shard.state == "installing":
            return _start(shard, now)
        case Launched(pid, port, awaits) if shard.state == "starting":
            shard = replace(shard, pid=pid, port=port, awaits=awaits, probe_at=now)
            if shard.serves:
                return shard, (Effect.PUBLISH,)
            return _move(replace(shard, deadline=None), "ready", now)  # 6
        case Listening() if shard.awaits is not None and not shard.listens:
            return replace(shard, listens=True), (Effect.PUBLISH,)
        case _:  # late news of a step that is over
            return shard, ()


def _move(shard: Shard, state: State, now: float, *effects: Effect) -> Step:
    return replace(shard, state=state, changed_at=now), (Effect.PUBLISH, *effects)


def _start(shard: Shard, now: float) -> Step:
    late = now + shard.spec.startup_timeout_s
    return _move(replace(shard, progress=None, deadline=late), "starting", now, Effect.LAUNCH)


def _stopping(shard: Shard, event: Event, now: float) -> Step:
    match event:
        case Gone():
            ended = replace(shard, pid=None, port=None, progress=None, deadline=None)
            ended = replace(ended, awaits=None, listens=False, patient_until=None)
            ended, effects = _move(ended, shard.outcome, now)
            return ended, (*effects, Effect.RELEASE)
        case StopAsked(grace_s) if shard.deadline is not None:  # asked again: the nearer end counts
            patient = shard.patient_until
            patient = None if patient is None else min(patient, now + grace_s / 2)
            return replace(shard, deadline=min(shard.deadline, now + grace_s), patient_until=patient), ()
        case Tick() if shard.deadline is not None and now >= shard.deadline:
            return replace(shard, deadline=now + KILL_AGAIN_S, patient_until=None), (Effect.KILL,)
        case Tick() if shard.patient_until is not None and now >= shard.patient_until:
            return replace(shard, patient_until=None), (Effect.TERMINATE,)
        case _:
            return shard, ()


def _stop(shard: Shard, grace_s: float, reason: str, now: float) -> Step:
    stopping = replace(shard, outcome="stopped", deadline=now + grace_s, reason=reason)
    if shard.state in ("fetching", "installing"):
        ended, effects = _move(replace(stopping, deadline=None, progress=None), "stopped", now)
        return ended, (Effect.KILL, *effects, Effect.RELEASE)
    if shard.spec.rank and shard.pid is not None:  # 6
        return _move(replace(stopping, patient_until=now + grace_s / 2), "stopping", now)
    return _move(stopping, "stopping", now, Effect.TERMINATE)


def _fail(shard: Shard, reason: str, now: float) -> Step:
    failing = replace(shard, outcome="failed", reason=reason, deadline=now + KILL_AGAIN_S)
    if shard.state in ("fetching", "installing"):
        ended, effects = _move(replace(failing, deadline=None, progress=None), "failed", now)
        return ended, (Effect.KILL, *effects, Effect.RELEASE)
    return _move(failing, "stopping", now, Effect.KILL)


def _tick(shard: Shard, now: float) -> Step:
    if shard.state in ("starting", "loading") and shard.deadline is not None and now >= shard.deadline:
        limit = f"{shard.spec.startup_timeout_s:g}"
        return _fail(shard, f"did not serve within {limit} s of its start (startup_timeout of the profile)", now)
    if shard.pid is None or not shard.serves or shard.probing or now < shard.probe_at:
        return shard, ()
    period = READY_PROBE_S if shard.state in ("ready", "draining") else STARTING_PROBE_S
    return replace(shard, probing=True, probe_at=now + period), (Effect.PROBE,)


def _probed(shard: Shard, answer: Answer, busy: bool, now: float) -> Step:
    shard = replace(shard, strange=shard.strange + 1 if answer is Answer.STRANGER else 0)
    if shard.strange >= STRANGER_PROBES:
        return _fail(shard, f"port {shard.port} is held by a process that is not this engine", now)
    if answer is Answer.UNNAMED:
        return _fail(shard, f"does not list {shard.spec.model!r} among its models", now)
    if shard.state in ("ready", "draining"):
        silent = 0 if busy or answer is Answer.SERVING else shard.silent + 1
        if silent >= HUNG_PROBES:
            return _fail(shard, f"hung: {silent} health checks in a row without an answer, while idle", now)
        return replace(shard, silent=silent), ()
    if answer is Answer.SERVING:
        return _move(replace(shard, deadline=None, silent=0), "ready", now)
    if answer is Answer.LOADING and shard.state == "starting":
        return _move(shard, "loading", now)
    return shard, ()
