"""Whole nodes that are free on a fabric, for replicas that span nodes (WEB-2)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agent.protocol import Fabric, Gpu
from nodes.state import Node
from nodes.wholes import WholeLine, wholes
from tests.nodes.test_placement import GOOD

IB = Fabric(name="ib0", adapters=("mlx5_0",), up=True, rate_gbit_s=400.0)
DOWN = Fabric(name="ib0", adapters=("mlx5_0",), up=False, reason="mlx5_0 has no ACTIVE port")


def machine(name: str, *, kind: str = "h100-80g", fabrics: tuple[Fabric, ...] = (IB,), **fields: object) -> Node:
    cards = tuple(Gpu(uuid=f"GPU-{name}-{n}", index=n, name=kind, gpu_class=kind) for n in range(8))
    return replace(GOOD, name=name, gpus=cards, fabrics=fabrics, **fields)  # type: ignore[arg-type]


def line(*nodes: Node, held: dict[str, set[str]] | None = None) -> WholeLine:
    [found] = wholes(nodes, held or {})
    return found


def test_a_node_of_which_every_card_is_free_is_whole() -> None:
    found = line(machine("a"), machine("b"), held={"b": {"GPU-b-0"}})
    assert found == WholeLine("ib0", "h100-80g", 2, 2, 1, 8, 400.0, "")


def test_a_node_with_a_faulty_card_or_slices_or_that_takes_nothing_is_not() -> None:
    whole = machine("a")
    worn = replace(whole, gpus=(*whole.gpus[1:], Gpu(uuid="x", index=0, name="h", gpu_class="h100-80g", healthy=False)))
    cut = replace(
        whole, gpus=(Gpu(uuid="MIG-1", index=0, name="h", gpu_class="h100-80g", slice_of="GPU-a"), *whole.gpus)
    )
    closed = [replace(whole, **{mark: True}) for mark in ("cordoned", "draining")]
    others = [replace(whole, state="unreachable"), replace(whole, gpus_fault="the driver does not answer")]
    for node in (worn, cut, *closed, *others):
        assert (line(node).nodes, line(node).free, line(node).free_cards) == (1, 0, 0)
    assert wholes([replace(whole, state="lost"), replace(whole, name="b", state="joining")], {}) == ()


def test_a_fabric_that_is_down_somewhere_says_where_and_why() -> None:
    down = [machine(name, fabrics=(DOWN,)) for name in "bcdef"]
    found = line(machine("a"), *down)
    assert (found.nodes, found.up, found.free, found.rate_gbit_s) == (6, 1, 1, 400.0)
    assert found.note == "b, c, d and 2 more: mlx5_0 has no ACTIVE port"
    silent = line(machine("a", fabrics=(Fabric(name="ib0", adapters=(), up=False),)))
    assert (silent.note, silent.rate_gbit_s) == ("a: its agent does not say why", None)


def test_the_rate_is_the_slowest_link_and_unknown_as_soon_as_one_is() -> None:
    slow = Fabric(name="ib0", adapters=("mlx5_0",), up=True, rate_gbit_s=200.0)
    mute = Fabric(name="ib0", adapters=("mlx5_0",), up=True)
    assert line(machine("a"), machine("b", fabrics=(slow,))).rate_gbit_s == 200.0
    assert line(machine("a"), machine("b", fabrics=(mute,))).rate_gbit_s is None


def test_each_class_on_each_fabric_has_a_line_and_one_without_cards_too() -> None:
    other = Fabric(name="roce", adapters=("mlx5_9",), up=True, rate_gbit_s=100.0)
    bare = replace(GOOD, name="c", fabrics=(other,))
    found = wholes([machine("a"), machine("b", kind="l40s-45g"), bare], {})
    assert [(each.fabric, each.gpu_class, each.nodes, each.free) for each in found] == [
        ("ib0", "h100-80g", 1, 1),
        ("ib0", "l40s-45g", 1, 1),
        ("roce", "", 1, 0),
    ]


@given(st.lists(st.tuples(st.sampled_from([IB, DOWN]), st.integers(0, 8), st.booleans()), max_size=6))
def test_no_more_is_free_than_is_up_and_every_free_card_is_held_by_nobody(
    drawn: list[tuple[Fabric, int, bool]],
) -> None:
    nodes = [machine(f"n{n}", fabrics=(fabric,), cordoned=shut) for n, (fabric, _, shut) in enumerate(drawn)]
    held = {f"n{n}": {f"GPU-n{n}-{card}" for card in range(taken)} for n, (_, taken, _) in enumerate(drawn)}
    for found in wholes(nodes, held):
        whole = sum(fabric.up and not taken and not shut for fabric, taken, shut in drawn)
        assert found.free == whole <= found.up <= found.nodes
        assert found.free_cards == 8 * whole
    assert wholes(list(reversed(nodes)), held) == wholes(nodes, held)
