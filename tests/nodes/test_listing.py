"""Lists in the order that an address names, and where their next page begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes import listing
from nodes.lines import NodeLine
from nodes.listing import MODELS, NODES, REPLICAS, Order
from tests.nodes.test_placement import GOOD
from tests.nodes.test_reconcile import SERVING
from tests.nodes.test_summary import summed

LINES = [
    summed(nodes=(replace(GOOD, name=name, cpu_percent=cpu),)).nodes[0]
    for name, cpu in (("a", 5.0), ("b", None), ("c", 90.0), ("d", 5.0))
]


def names(text: str) -> str:
    return "".join(line.name for line in listing.sort(LINES, NODES, listing.order_of(text, NODES)))


def test_figures_are_sorted_either_way_alike_ones_by_name_and_unknown_ones_last() -> None:
    assert [names(text) for text in ("", "cpu", "-cpu", "-name")] == ["abcd", "adcb", "cadb", "dcba"]


@pytest.mark.parametrize("text", ["nothing", "-", "--cpu", "<b>", "cpu,name", "\x00"])
def test_what_is_no_column_is_sorted_by_name(text: str) -> None:
    assert listing.order_of(text, NODES) == Order()


def test_a_click_asks_for_the_largest_first_and_then_the_other_way_round() -> None:
    first = Order().clicked("cpu", figures=True)
    assert (str(first), str(first.clicked("cpu", figures=True))) == ("-cpu", "cpu")
    assert (str(Order().clicked("state", figures=False)), str(Order().clicked("name", figures=False))) == (
        "state",
        "-name",
    )
    assert str(Order("name", descending=True).clicked("name", figures=False)) == ""


@given(st.sampled_from(sorted(NODES)), st.booleans(), st.integers(1, 4))
def test_pages_show_every_line_once(column: str, descending: bool, size: int) -> None:
    order = Order(column, descending)
    whole = listing.sort(LINES, NODES, order)
    seen: list[NodeLine] = []
    name = ""
    for _ in range(len(LINES)):
        page = listing.after(whole, name, order)[:size]
        seen += page
        name = page[-1].name if page else name
        if len(seen) == len(LINES):
            break
    assert seen == whole


def test_a_page_after_a_line_that_is_gone_begins_where_it_stood_by_name_and_anew_otherwise() -> None:
    assert [line.name for line in listing.after(LINES, "bb", Order())] == ["c", "d"]
    assert listing.after(LINES, "bb", Order("cpu")) == LINES


def test_every_column_has_something_to_sort_by() -> None:
    summary = summed(replicas=(SERVING,))
    for column in NODES:
        assert listing.sort(summary.nodes, NODES, Order(column)) == list(summary.nodes)
    for column in MODELS:
        assert listing.sort(summary.models, MODELS, Order(column)) == list(summary.models)
    for column in REPLICAS:
        assert listing.sort(summary.replicas, REPLICAS, Order(column)) == list(summary.replicas)
