"""What is remembered of which replica saw which prompt."""

from __future__ import annotations

import random
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from routing.affinity import ENDS, HOLDERS, MAX_KEYS, MAX_REPLICAS, Index, prefix_keys

NAMES = ("a", "b", "c", "d", "e", "f")
lengths = st.integers(0, 20_000)


def prompt(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def keys(seed: int, length: int) -> tuple[int, ...]:
    return prefix_keys(prompt(seed, length), 0, length)


@given(lengths, lengths, lengths)
def test_two_prompts_share_as_many_keys_as_they_share_whole_blocks(shared: int, one: int, other: int) -> None:
    first, second = (prompt(0, shared) + prompt(seed, length) for seed, length in ((1, one), (2, other)))
    common = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    left, right = prefix_keys(first, 0, len(first)), prefix_keys(second, 0, len(second))
    same = sum(a == b for a, b in zip(left, right, strict=False))
    assert same == sum(end <= common for end in ENDS)
    assert left[:same] == right[:same]


@given(lengths, st.integers(0, 50), st.integers(0, 50))
def test_only_the_prompt_counts_and_not_what_stands_around_it(length: int, before: int, after: int) -> None:
    text = prompt(3, length)
    body = prompt(4, before) + text + prompt(5, after)
    assert prefix_keys(body, before, before + length) == prefix_keys(text, 0, length)


def test_the_keys_of_another_adapter_are_others() -> None:
    assert not set(keys(1, 4096)) & set(prefix_keys(prompt(1, 4096), 0, 4096, "adapter"))


def test_a_huge_prompt_has_few_keys_and_is_read_only_so_far() -> None:
    huge = prompt(1, ENDS[-1]) + bytes(1 << 20)
    assert len(prefix_keys(huge, 0, len(huge))) == MAX_KEYS
    assert prefix_keys(huge, 0, len(huge)) == keys(1, ENDS[-1])
    assert 128 * 1024 < ENDS[-1] < 1 << 20


sent = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.sampled_from(NAMES)), max_size=60)


@given(sent, st.integers(0, 5), st.integers(0, 12), st.sets(st.sampled_from(NAMES)), st.integers(0, 30))
def test_the_longest_match_wins_and_memory_is_bounded(
    notes: list[tuple[int, int, str]], seed: int, blocks: int, replicas: set[str], size: int
) -> None:
    """Against a plain model: for each key who was first to see it, of the last few that did."""
    index = Index(size)
    model: OrderedDict[int, list[str]] = OrderedDict()
    for each, count, replica in notes:
        noted = keys(each, ENDS[count])
        index.note(noted, replica)
        for key in noted:
            seen = model.setdefault(key, [])
            if replica not in seen:
                seen.append(replica)
                del seen[:-HOLDERS]
            model.move_to_end(key)
        while len(model) > size:
            model.popitem(last=False)
        assert len(index) == len(model) <= size
    asked = keys(seed, ENDS[blocks])
    enough = [key for key, end in zip(asked, ENDS, strict=False) if 2 * end >= ENDS[blocks]]
    expected = next(
        (name for key in reversed(enough) for name in model.get(key, ()) if name in replicas),
        None,
    )
    assert index.find(asked, replicas) == expected


def test_how_everybodys_prompts_begin_says_nothing_about_where_to_send_one() -> None:
    index = Index()
    system = prompt(0, 1024)
    first, second = system + prompt(1, 4096), system + prompt(2, 4096)
    index.note(prefix_keys(first, 0, len(first)), "a")
    assert index.find(prefix_keys(second, 0, len(second)), {"a"}) is None
    assert index.find(prefix_keys(system, 0, len(system)), {"a"}) == "a"
    assert index.find((), {"a"}) is None


def test_a_replica_that_is_gone_is_forgotten_even_when_its_name_comes_back() -> None:
    index = Index()
    asked = keys(1, 1024)
    index.note(asked, "a")
    index.note(asked, "b")
    index.keep({"b", "c"})
    assert index.find(asked, {"a", "b"}) == "b"
    index.note(asked, "c")
    index.note(asked, "a")
    assert index.find(asked, {"a", "c"}) == "c"
    index.keep(())
    assert index.find(asked, set(NAMES)) is None


def test_replicas_that_come_and_go_for_ever_fill_no_memory() -> None:
    index = Index(8)
    asked = keys(1, 256)
    for number in range(2 * MAX_REPLICAS):
        index.note(asked, f"r{number}")
    last = f"r{2 * MAX_REPLICAS - 1}"
    assert index.find(asked, {last, "r0"}) == last
    assert len(index._ids) == len(index._names) == MAX_REPLICAS
