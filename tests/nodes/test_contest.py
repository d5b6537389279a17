"""Copies of a machine are told apart from one that comes again, whatever a network does to it (ND-4)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from nodes.contest import KEPT, RETURNS, WITHIN, Contested, Taken, Turn, judge
from tests.nodes.fleets import NOW


def turn(instance: str, at: datetime = NOW) -> Turn:
    return Turn(instance=instance, whence=f"box at {instance}", at=at)


def played(instances: Sequence[str], *, every: timedelta = timedelta(seconds=2)) -> list[Taken | Contested]:
    """What becomes of agents that come one after the other while the one before still seems to be there."""
    judged: list[Taken | Contested] = []
    for number, instance in enumerate(instances):
        past = judged[-1].turns if judged else ()
        judged.append(judge(past, turn(instance, NOW + number * every), spoken_for=True))
    return judged


def test_two_that_take_turns_are_noticed_and_the_one_that_is_there_is_kept() -> None:
    judged = played("abababab")
    assert [isinstance(each, Contested) for each in judged] == [False] * 4 + [True, False, True, False]
    [first, *_] = [each for each in judged if isinstance(each, Contested)]
    assert first.kept.instance == "b"
    assert first.kept.whence == "box at b"


def test_the_one_that_is_kept_may_come_again_and_the_other_may_not_for_as_long_as_it_asks() -> None:
    judged = played("abab" + "ab" * 20 + "a" * 20, every=timedelta(minutes=1))
    assert {isinstance(each, Taken) for each in judged[5::2][:20]} == {True}
    assert isinstance(judged[-1], Contested)
    assert all(len(each.turns) <= KEPT for each in judged)


def test_whoever_asks_once_the_other_is_gone_gets_the_node() -> None:
    contested = played("ababa")[-1]
    assert isinstance(contested, Contested)
    assert isinstance(judge(contested.turns, turn("a"), spoken_for=False), Taken)


def test_what_was_long_ago_counts_no_more() -> None:
    contested = played("ababa")[-1]
    later = turn("a", NOW + 2 * WITHIN)
    assert judge(contested.turns, later, spoken_for=True) == Taken((later,))


@given(st.lists(st.integers(1, 4), max_size=40))
def test_one_machine_is_never_refused_however_often_it_connects_and_its_agent_is_started_anew(
    streams: list[int],
) -> None:
    """Each process of its agent opens some streams, one after the other; the old ones still seem to be there."""
    instances = [str(process) for process, count in enumerate(streams) for _ in range(count)]
    assert all(isinstance(each, Taken) for each in played(instances))


@given(st.lists(st.booleans(), max_size=40))
def test_one_machine_is_not_refused_either_when_an_old_registration_arrives_after_a_new_one(late: list[bool]) -> None:
    """What a process sent last before it ended may be read after its successor's first; that one then comes again."""
    instances: list[str] = []
    for process, is_late in enumerate(late):
        me = str(process)
        instances += [me, str(process - 1), me] if is_late and process and not late[process - 1] else [me]
    judged = played(instances, every=timedelta(minutes=2))
    assert sum(isinstance(each, Contested) for each in judged) == 0
    assert RETURNS > 2
