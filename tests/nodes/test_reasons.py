"""Reasons told of one node and of a thousand."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from nodes.reasons import SHOWN, told
from nodes.state import TurnedDown


def turned(*reasons: str, profile: str = "p") -> list[TurnedDown]:
    return [TurnedDown(f"n{number:04}", profile, reason) for number, reason in enumerate(reasons)]


def test_a_few_nodes_are_named() -> None:
    assert told(turned("is lost", "is cordoned", "is lost")) == ("n0000, n0002 (p): is lost", "n0001 (p): is cordoned")


def test_a_command_names_the_node_where_it_is_told_of_one_alone() -> None:
    cordoned = "is cordoned; to use it: llmgw ctl uncordon NODE"
    assert told(turned(cordoned, "is lost")) == (
        "n0000 (p): is cordoned; to use it: llmgw ctl uncordon n0000",
        "n0001 (p): is lost",
    )
    assert told(turned(cordoned, cordoned)) == (f"n0000, n0001 (p): {cordoned}",)


def test_a_thousand_nodes_that_say_the_same_are_one_line() -> None:
    assert told(turned(*["is full"] * 1000)) == ("all 1,000 nodes (p): is full",)
    most = told(turned(*["is full"] * 1000, "is lost"))
    assert most == (
        "n0000, n0001, n0002, n0003, n0004, n0005, n0006, n0007 and 992 more (p): is full",
        "n1000 (p): is lost",
    )


def test_a_thousand_nodes_that_differ_in_figures_and_names_are_one_line_too() -> None:
    full = [f"needs 4 h100-80g; {n % 4} free of 8: {8 - n % 4} held by chat-{n}; free some" for n in range(1000)]
    assert told(turned(*full)) == (
        "all 1,000 nodes (p): needs 4 h100-80g; 0 free of 8: 8 held by chat-0; free some "
        "(on n0000; alike on the others)",
    )


def test_a_reason_that_holds_anywhere_names_the_profile_and_no_nodes() -> None:
    everywhere = [TurnedDown(f"n{n}", "p", "no node has such cards", anywhere=True) for n in range(3)]
    assert told(everywhere) == ("p: no node has such cards",)


def test_up_to_some_reasons_are_told_word_for_word() -> None:
    few = [f"has {n}.5 GB of disk free; free some" for n in range(SHOWN)]
    assert told(turned(*few)) == tuple(f"n{n:04} (p): {reason}" for n, reason in enumerate(few))


def test_profiles_are_told_apart_and_without_a_node_there_is_no_name() -> None:
    both = (*turned("is lost", profile="a"), *turned("is lost", profile="b"), TurnedDown("", "c", "no node has joined"))
    assert told(both) == ("n0000 (a): is lost", "n0000 (b): is lost", "no node has joined")


@given(st.lists(st.sampled_from([f"has {n} of 8 cores left" for n in range(12)] + ["is lost", "is cordoned"])))
def test_every_node_is_counted_once_and_lines_stay_few(reasons: list[str]) -> None:
    lines = told(turned(*reasons))
    counted = 0
    for line in lines:
        names = line.split(" (p): ")[0]
        whole, more = re.search(r"all ([\d,]+) nodes", names), re.search(r"and ([\d,]+) more", names)
        counted += int(whole[1]) if whole else len(re.findall(r"n\d{4}", names)) + (int(more[1]) if more else 0)
    assert counted == len(reasons)
    assert len(lines) <= SHOWN
