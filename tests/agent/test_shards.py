"""The supervision state machine, by its numbered rules and by properties over arbitrary events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import shards
from agent.protocol import ENDED, STATES, Progress, State
from agent.shards import (
    Answer,
    Asked,
    Broke,
    Effect,
    Event,
    Exited,
    Fetched,
    Gone,
    Installed,
    Launched,
    Listening,
    Probed,
    Progressed,
    Shard,
    StopAsked,
    Tick,
    step,
)
from tests.agent.conftest import spec

SPEC = spec("/m.gguf", startup_timeout_s=10)


def after(*events: Event, at: float = 0.0) -> tuple[Shard, tuple[Effect, ...]]:
    """A fresh shard after these events, with the last one's effects."""
    shard = Shard(SPEC)
    effects: tuple[Effect, ...] = ()
    for event in events:
        shard, effects = step(shard, event, at)
    return shard, effects


STARTED = (Asked(), Fetched(), Installed(), Launched(7, 21000))
READY = (*STARTED, Probed(Answer.LOADING), Probed(Answer.SERVING))


@pytest.mark.parametrize(
    ("events", "state", "effects"),
    [
        ((Asked(),), "fetching", (Effect.PUBLISH, Effect.FETCH)),
        ((Asked(), Fetched()), "installing", (Effect.PUBLISH, Effect.INSTALL)),
        ((Asked(), Fetched(installed=True)), "starting", (Effect.PUBLISH, Effect.LAUNCH)),
        ((Asked(), Fetched(), Installed()), "starting", (Effect.PUBLISH, Effect.LAUNCH)),
        (STARTED, "starting", (Effect.PUBLISH,)),
        ((*STARTED, Probed(Answer.REFUSED)), "starting", ()),
        ((*STARTED, Probed(Answer.LOADING)), "loading", (Effect.PUBLISH,)),
        ((*STARTED, Probed(Answer.LOADING), Probed(Answer.LOADING)), "loading", ()),
        (READY, "ready", (Effect.PUBLISH,)),
        ((*STARTED, Probed(Answer.STRANGER)), "starting", ()),
        ((*STARTED, *[Probed(Answer.STRANGER)] * 2), "stopping", (Effect.PUBLISH, Effect.KILL)),
        ((*STARTED, Probed(Answer.UNNAMED)), "stopping", (Effect.PUBLISH, Effect.KILL)),
        ((*READY, Exited("killed by signal 9")), "stopping", (Effect.PUBLISH, Effect.KILL)),
        ((*READY, Exited("killed by signal 9"), Gone()), "failed", (Effect.PUBLISH, Effect.RELEASE)),
        ((*READY, Gone()), "stopping", (Effect.PUBLISH, Effect.KILL)),
        ((*READY, StopAsked(5)), "stopping", (Effect.PUBLISH, Effect.TERMINATE)),
        ((*READY, StopAsked(5), Gone()), "stopped", (Effect.PUBLISH, Effect.RELEASE)),
        ((Asked(), Broke("no network")), "failed", (Effect.KILL, Effect.PUBLISH, Effect.RELEASE)),
        ((Asked(), StopAsked(5)), "stopped", (Effect.KILL, Effect.PUBLISH, Effect.RELEASE)),
        ((Asked(), StopAsked(5), Fetched()), "stopped", ()),
        ((Asked(), Fetched(), Fetched()), "installing", ()),
        ((*READY, Installed()), "ready", ()),
        ((*READY, Launched(8, 1)), "ready", ()),
    ],
)
def test_events_lead_from_state_to_state(events: tuple[Event, ...], state: State, effects: tuple[Effect, ...]) -> None:
    shard, got = after(*events)
    assert (shard.state, got) == (state, effects)


def test_a_failure_keeps_its_reason_and_a_stop_has_that_which_was_given() -> None:
    failed, _ = after(*READY, Exited("exited with status 3"), StopAsked(0), Gone())
    assert (failed.state, failed.reason, failed.pid, failed.port) == ("failed", "exited with status 3", None, None)
    stopped, _ = after(*READY, StopAsked(5), Exited("exited with status 0"), Gone())
    assert (stopped.state, stopped.reason) == ("stopped", "")
    with_its_agent, _ = after(*READY, StopAsked(5, "its agent stops"), StopAsked(1), Gone())
    assert (with_its_agent.state, with_its_agent.reason) == ("stopped", "its agent stops")


def test_an_engine_that_ended_is_not_taken_for_a_stranger_that_holds_its_port() -> None:
    ended, _ = after(*STARTED, Probed(Answer.STRANGER), Exited("killed by signal 9"), Probed(Answer.STRANGER), Gone())
    assert (ended.state, ended.reason) == ("failed", "killed by signal 9")
    passing, _ = after(*STARTED, *[Probed(Answer.STRANGER), Probed(Answer.LOADING)] * 3)
    assert passing.state == "loading"
    alive, _ = after(*STARTED, Probed(Answer.LOADING), *[Probed(Answer.STRANGER)] * 2)
    assert alive.reason == "port 21000 is held by a process that is not this engine"


def test_grace_that_is_over_turns_to_sigkill_and_again_until_it_is_gone() -> None:
    shard, _ = after(*READY, StopAsked(5))
    assert step(shard, Tick(), 4.9)[1] == ()
    shard, effects = step(shard, Tick(), 5.0)
    assert effects == (Effect.KILL,)
    assert step(shard, Tick(), 5.1)[1] == ()
    assert step(shard, Tick(), 5.0 + shards.KILL_AGAIN_S)[1] == (Effect.KILL,)


def test_a_stop_asked_for_again_can_only_shorten_the_grace() -> None:
    shard, _ = after(*READY, StopAsked(60))
    shard, _ = step(shard, StopAsked(1), 0.0)
    assert step(shard, Tick(), 1.0)[1] == (Effect.KILL,)
    shard, _ = step(shard, StopAsked(600), 0.5)
    assert shard.deadline == 1.0


def test_a_late_start_fails_and_names_the_setting() -> None:
    shard, effects = step(after(*STARTED)[0], Tick(), 10.0)
    assert effects == (Effect.PUBLISH, Effect.KILL)
    assert "startup_timeout" in shard.reason
    assert step(after(*READY)[0], Tick(), 1e6)[0].state == "ready"


def test_a_probe_is_outstanding_once_and_due_by_its_period() -> None:
    shard, effects = step(after(*STARTED)[0], Tick(), 0.0)
    assert effects == (Effect.PROBE,)
    assert step(shard, Tick(), 9.0)[1] == ()
    shard, _ = step(shard, Probed(Answer.REFUSED), 0.1)
    assert step(shard, Tick(), 0.2)[1] == ()
    assert step(shard, Tick(), shards.STARTING_PROBE_S)[1] == (Effect.PROBE,)
    ready, _ = step(after(*READY)[0], Tick(), 0.0)
    assert ready.probe_at == shards.READY_PROBE_S
    assert step(after(Asked())[0], Tick(), 0.0)[1] == ()


@pytest.mark.parametrize("silent", [Answer.SILENT, Answer.REFUSED, Answer.LOADING])
def test_a_silent_engine_hangs_only_while_it_is_idle(silent: Answer) -> None:
    shard, _ = after(*READY)
    for _ in range(shards.HUNG_PROBES - 1):
        shard, _ = step(shard, Probed(silent), 0.0)
    assert step(shard, Probed(silent, busy=True), 0.0)[0].silent == 0
    assert step(shard, Probed(Answer.SERVING), 0.0)[0].silent == 0
    hung, effects = step(shard, Probed(silent), 0.0)
    assert hung.reason.startswith("hung")
    assert effects == (Effect.PUBLISH, Effect.KILL)


def test_progress_is_kept_until_the_step_is_over() -> None:
    shard, effects = after(Asked(), Progressed(Progress(done_bytes=5)))
    assert shard.status().progress == Progress(done_bytes=5)
    assert effects == ()
    assert step(shard, Fetched(), 0.0)[0].progress is None


@pytest.mark.parametrize("state", ["starting", "loading", "ready", "stopping"])
def test_an_adopted_shard_goes_on_where_it_was(state: State) -> None:
    shard = shards.adopt(SPEC, state, pid=7, port=21000, now=100.0)
    assert (shard.state, shard.pid, shard.port, shard.status().adopted) == (state, 7, 21000, True)
    _, effects = step(shard, Tick(), 100.0)
    assert effects == ((Effect.KILL,) if state == "stopping" else (Effect.PROBE,))
    late, _ = step(replace(shard, probing=True), Tick(), 110.0)
    assert (late.state == "stopping") is (state != "ready")


# --- ranks on several nodes ------------------------------------------------------------------------------------------
LEADER = spec("/m.gguf", nodes=2, startup_timeout_s=10)
WORKER = spec("/m.gguf", nodes=2, rank=1, startup_timeout_s=10)


def begun(shard: Shard, awaits: int | None = None) -> tuple[Shard, tuple[Effect, ...]]:
    for event in (Asked(), Fetched(installed=True)):
        shard, _ = step(shard, event, 0.0)
    return step(shard, Launched(7, 21000, awaits), 0.0)


def test_a_leader_says_once_where_it_listens_for_the_others() -> None:
    leader, _ = begun(Shard(LEADER), awaits=21001)
    assert (leader.status().port, leader.status().rendezvous) == (21000, None)
    leader, effects = step(leader, Listening(), 0.0)
    assert effects == (Effect.PUBLISH,)
    assert (leader.state, leader.status().rendezvous) == ("starting", 21001)
    assert step(leader, Listening(), 0.0) == (leader, ())
    stopping, _ = step(leader, StopAsked(5), 0.0)
    assert step(stopping, Gone(), 0.0)[0].status().rendezvous is None


def test_a_shard_that_awaits_nobody_never_listens_for_anybody() -> None:
    alone, _ = after(*STARTED)
    assert step(alone, Listening(), 0.0) == (alone, ())


def test_a_worker_is_ready_when_it_runs_is_never_asked_and_is_no_endpoint() -> None:
    worker, effects = begun(Shard(WORKER, serves=False))
    assert (worker.state, effects) == ("ready", (Effect.PUBLISH,))
    assert (worker.status().port, worker.status().pid) == (None, 7)
    for at in (0.0, 1e6):
        assert step(worker, Tick(), at) == (worker, ())
    assert step(worker, Exited("killed by signal 9"), 1e6)[1] == (Effect.PUBLISH, Effect.KILL)


def test_a_worker_that_is_to_stop_gives_the_leader_half_of_the_time_first() -> None:
    worker, _ = begun(Shard(WORKER, serves=False))
    stopping, effects = step(worker, StopAsked(10), 0.0)
    assert (stopping.state, effects) == ("stopping", (Effect.PUBLISH,))
    assert step(stopping, Gone(), 1.0)[0].state == "stopped"  # it ended with the leader
    assert step(stopping, Tick(), 4.9)[1] == ()
    told, effects = step(stopping, Tick(), 5.0)
    assert effects == (Effect.TERMINATE,)
    assert step(told, Tick(), 5.1)[1] == ()
    assert step(told, Tick(), 10.0)[1] == (Effect.KILL,)


def test_a_worker_that_is_hurried_waits_less_and_one_killed_first_is_not_told_any_more() -> None:
    worker, _ = begun(Shard(WORKER, serves=False))
    stopping, _ = step(worker, StopAsked(60), 0.0)
    hurried, _ = step(stopping, StopAsked(2), 1.0)
    assert step(hurried, Tick(), 2.0)[1] == (Effect.TERMINATE,)
    killed, effects = step(hurried, Tick(), 3.0)
    assert effects == (Effect.KILL,)
    assert step(killed, Tick(), 3.1)[1] == ()


def test_a_worker_that_does_not_run_yet_is_stopped_at_once() -> None:
    worker, _ = step(step(Shard(WORKER, serves=False), Asked(), 0.0)[0], Fetched(installed=True), 0.0)
    assert step(worker, StopAsked(10), 0.0)[1] == (Effect.PUBLISH, Effect.TERMINATE)


def test_adopted_ranks_go_on_where_they_were() -> None:
    leader = shards.adopt(LEADER, "loading", pid=7, port=21000, now=0.0, awaits=21001, listens=True)
    assert leader.status().rendezvous == 21001
    worker = shards.adopt(WORKER, "starting", pid=7, port=21000, now=0.0, serves=False)
    assert (worker.state, worker.deadline, worker.status().port) == ("ready", None, None)


def events() -> st.SearchStrategy[Event]:
    times = st.floats(0, 100)
    return st.one_of(
        st.sampled_from([Asked(), Fetched(), Fetched(installed=True), Installed(), Launched(7, 21000), Gone(), Tick()]),
        st.sampled_from([Launched(7, 21000, awaits=21001), Listening()]),
        st.builds(Broke, st.just("broke")),
        st.builds(Exited, st.just("exited")),
        st.builds(StopAsked, times),
        st.builds(Progressed, st.just(Progress())),
        st.builds(Probed, st.sampled_from(Answer), st.booleans()),
    )


@given(
    st.sampled_from([Shard(SPEC), Shard(LEADER), Shard(WORKER, serves=False)]),
    st.lists(st.tuples(events(), st.floats(0, 20)), max_size=40),
)
def test_whatever_happens_a_shard_ends_once_and_gives_everything_back_once(
    shard: Shard, script: list[tuple[Event, float]]
) -> None:
    now, released, said = 0.0, 0, [("fetching", "")]
    for event, wait in [*script, (StopAsked(1), 0.0), (Gone(), 0.0), (StopAsked(1), 0.0), (Gone(), 0.0)]:
        now += wait
        before = shard
        shard, effects = step(shard, event, now)
        assert shard.state in STATES
        assert before.state not in ENDED or (shard is before and effects == ())
        assert effects.count(Effect.PUBLISH) <= 1
        # Every transition is said (ND-2).
        assert (before.state == shard.state) or Effect.PUBLISH in effects
        # Nothing is launched for a shard that is to end.
        begins = {Effect.LAUNCH, Effect.FETCH, Effect.INSTALL, Effect.PROBE} & set(effects)
        assert not (begins and before.state == "stopping")
        released += effects.count(Effect.RELEASE)
        said.append((shard.state, shard.reason))
    assert shard.state in ENDED
    assert released == 1
    assert (shard.reason != "") is (shard.state == "failed")
