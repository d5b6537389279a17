"""Which build of an engine a node uses: chosen, told until it is so, never lost, shown alike (AG-32, ND-3). Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.protocol import AUTO, NONE, Build
from catalog.spec import ENGINES
from nodes import builds
from nodes.builds import BuildLine
from tests.factories import inventory

CHOICES = st.dictionaries(st.sampled_from(ENGINES), st.sampled_from([AUTO, NONE, "cu13", "cu129"]))
TOLD = st.none() | st.dictionaries(
    st.sampled_from([*ENGINES, "magic"]), st.sampled_from([AUTO, NONE, "cu13", "a b", "x" * 99])
)
TWO = (
    Build(engine="llamacpp", name="cuda13", version="1"),
    Build(engine="llamacpp", name="cpu", version="2", usable=False, reason="No."),
)


@given(CHOICES, TOLD)
def test_what_was_chosen_wins_and_what_only_the_node_knows_is_kept(
    chosen: dict[str, str], told: dict[str, str] | None
) -> None:
    kept = {**chosen, **builds.found(chosen, told)}
    assert {engine: kept[engine] for engine in chosen} == chosen
    tell = builds.to_tell(kept, told)
    if told is None:
        assert (tell, kept) == ({}, chosen)
        return
    after = {**told, **tell}
    assert all(after.get(engine, AUTO) == build for engine, build in kept.items())
    assert set(tell) <= set(chosen)
    assert builds.to_tell(kept, after) == {}
    assert builds.found(kept, told) == {}
    assert "magic" not in kept
    assert not {"a b", "x" * 99} & set(kept.values())


@given(CHOICES, TOLD)
def test_every_engine_has_a_line_whose_choice_can_be_made_again(
    chosen: dict[str, str], told: dict[str, str] | None
) -> None:
    for line in builds.lines(chosen, inventory(engine_builds=told, builds=TWO)):
        assert line.chosen in line.options
        assert (line.options[0], line.options[-1]) == (AUTO, NONE)
        goes_by_it = line.at_node == line.chosen or (line.at_node is None and line.chosen == AUTO)
        assert goes_by_it == (line.note == "")
    assert [line.engine for line in builds.lines(chosen, None)] == list(ENGINES)


@pytest.mark.parametrize(
    ("at_node", "states"),
    [
        (None, ["ready", "cannot run"]),
        ({}, ["ready", "cannot run"]),
        ({"llamacpp": "cuda13"}, ["ready", "not chosen"]),
        ({"llamacpp": "cpu"}, ["not chosen", "cannot run"]),
        ({"llamacpp": NONE}, ["off", "off"]),
    ],
)
def test_a_build_that_is_there_and_not_used_is_told_apart_from_one_that_cannot_run(
    at_node: dict[str, str] | None, states: list[str]
) -> None:
    *_, line = builds.lines({}, inventory(engine_builds=at_node, builds=TWO))
    assert [each.state for each in line.builds] == states
    assert line.builds[1] == BuildLine("cpu", "2", states[1], "No.")
    assert line.options == (AUTO, "cuda13", "cpu", NONE)


@pytest.mark.parametrize(
    ("chosen", "at_node", "note"),
    [
        ("cu13", {"llamacpp": "cu13"}, ""),
        (AUTO, None, ""),
        (AUTO, {}, ""),
        ("cu13", None, "its agent takes no choice; upgrade llmgw on the node and restart its agent"),
        (
            NONE,
            {},
            "the node still goes by auto; it is told while it is connected, and its timeline says if it refuses",
        ),
    ],
)
def test_a_choice_that_the_node_does_not_go_by_says_why(chosen: str, at_node: dict[str, str] | None, note: str) -> None:
    *_, line = builds.lines({"llamacpp": chosen}, inventory(engine_builds=at_node))
    assert line.note == note
    *_, joining = builds.lines({"llamacpp": NONE}, None)
    assert (joining.note, joining.builds, joining.at_node) == ("it is told when it joins", (), None)


@pytest.mark.parametrize(
    ("engine", "build", "says"),
    [
        ("llamacpp", AUTO, ""),
        ("vllm", NONE, ""),
        ("llamacpp", "cpu", ""),
        ("magic", AUTO, "There is no engine 'magic'; known: vllm, sglang, llamacpp."),
        ("llamacpp", "cu13", "The node reports no build 'cu13' of llamacpp; choose auto, cuda13, cpu or none."),
        ("vllm", "", "The node reports no build '' of vllm; choose auto or none."),
    ],
)
def test_a_build_that_is_not_there_is_refused_with_those_that_are(engine: str, build: str, says: str) -> None:
    assert builds.objection(engine, build, inventory(builds=TWO)) == says


def test_a_node_that_has_not_joined_may_be_meant_for_any_build_that_could_be_one() -> None:
    assert builds.objection("vllm", "cu13", None) == ""
    for build in ("", "a b", "../x", "x" * 81):
        assert "is no name of a build; choose auto, none, or a name." in builds.objection("vllm", build, None)


def test_what_a_choice_means_is_said_in_words() -> None:
    assert [builds.in_words("vllm", build) for build in (AUTO, NONE, "cu13")] == [
        "uses the best build of vllm that runs there from the next start on",
        "starts no vllm any more; what runs goes on",
        "uses build cu13 of vllm from the next start on",
    ]
