"""How much one node may say: what agents really send passes, and a flood does not (ND-6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import protocol
from nodes.flow import A_SECOND, MOST, TOKEN_BYTES, Flow

STATES = ("fetching", "installing", "starting", "loading", "ready")


def test_a_register_after_a_long_cut_and_every_shard_that_changes_all_its_states_pass() -> None:
    flow = Flow()
    assert flow.take("one", protocol.MAX_MESSAGE_BYTES, 0.0)
    for _ in STATES:
        assert all(flow.take("one", 300, 0.0) for _ in range(protocol.MAX_SHARDS))


def test_every_shard_that_fails_at_once_with_all_its_lines_passes() -> None:
    flow = Flow()
    assert all(flow.take("one", protocol.TAIL_BYTES + 300, 0.0) for _ in range(protocol.MAX_SHARDS))


def test_heartbeats_with_whole_inventories_go_on_for_ever() -> None:
    flow = Flow()
    assert all(flow.take("one", 2 * 2**20, 5.0 * beat) for beat in range(10_000))


def test_whoever_never_stops_talking_is_cut_off_and_a_new_stream_is_no_fresh_start() -> None:
    flow = Flow()
    while flow.take("one", 100, 0.0):
        pass
    assert not flow.take("one", 100, 0.01)
    assert flow.take("one", 100, 1.0)
    assert flow.take("two", 100, 0.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, protocol.MAX_MESSAGE_BYTES)), max_size=60))
def test_never_more_passes_than_what_is_full_at_first_and_comes_in_time(said: list[tuple[float, int]]) -> None:
    flow, now, passed = Flow(), 0.0, 0.0
    for pause, size in said:
        now += pause
        if flow.take("one", size, now):
            passed += 1 + size / TOKEN_BYTES
        assert passed <= MOST + now * A_SECOND + 1e-6


def test_what_is_full_again_is_not_kept() -> None:
    flow = Flow()
    for number in range(100):
        flow.take(f"node{number}", 0, float(number))
    assert len(flow._left) < 5


@pytest.mark.parametrize("size", [0, protocol.MAX_MESSAGE_BYTES])
def test_any_single_message_that_may_be_sent_passes(size: int) -> None:
    assert Flow().take("one", size, 0.0)
