"""Which cards a replica gets, on one node and over several, and what is said where there are none."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest

from agent.protocol import Build, Fabric, Gpu
from catalog import spec
from nodes.placement import Part, Placed, Unplaced, place
from nodes.state import Cluster, Node, Replica, Shard
from tests.nodes.fleets import NOW

CLASS = "h100-80g"
BUILD = Build(engine="vllm", name="cu13", version="1")
IB0 = Fabric(name="ib0", adapters=("mlx5_0",), rate_gbit_s=400.0, link_layer="InfiniBand")
DOWN = msgspec.structs.replace(IB0, up=False, reason="adapter mlx5_1 has no ACTIVE port")
ONE = spec.Profile("one", gpu_class=CLASS, gpus_per_node=1)
FOUR = replace(ONE, name="four", tp=4, gpus_per_node=4)
WIDE = replace(FOUR, name="wide", tp=8, nodes=2)
GIB = 2**30


def cards(count: int = 8, *, node: str = "a", **fields: object) -> tuple[Gpu, ...]:
    fixed = {"name": "NVIDIA H100 80GB HBM3", "gpu_class": CLASS, "memory_bytes": 80 * GIB, **fields}
    return tuple(Gpu(uuid=f"{node}-{i}", index=i, **fixed) for i in range(count))  # type: ignore[arg-type]


def node(name: str = "a", count: int = 8, *, gpus: tuple[Gpu, ...] | None = None, **fields: object) -> Node:
    gpus = cards(count, node=name) if gpus is None else gpus
    fixed = {"cores": 64, "memory_bytes": 512 * GIB, "disk_free_bytes": 10**12, "builds": (BUILD,)}
    return Node(name, gpus=gpus, **{**fixed, **fields})  # type: ignore[arg-type]


def linked(gpus: tuple[Gpu, ...], *groups: range) -> tuple[Gpu, ...]:
    """With NVLink inside each group and nowhere else."""
    peers = {i: tuple(gpus[j].uuid for j in group if j != i) for group in groups for i in group}
    return tuple(msgspec.structs.replace(gpu, peers=peers.get(gpu.index, ())) for gpu in gpus)


def changed(gpus: tuple[Gpu, ...], *which: int, **fields: object) -> tuple[Gpu, ...]:
    return tuple(msgspec.structs.replace(gpu, **fields) if gpu.index in which else gpu for gpu in gpus)


def holder(name: str, home: str, *indices: int, model: str = "other", **fields: object) -> Replica:
    shard = Shard(home, state="ready", gpus=tuple(f"{home}-{i}" for i in indices), **fields)  # type: ignore[arg-type]
    return Replica(name, model, "p", "d", made_at=NOW - timedelta(minutes=1), state="ready", shards=(shard,))


def answer(
    profile: spec.Profile, *nodes: Node, replicas: tuple[Replica, ...] = (), team: str = "", **fields: object
) -> Placed | Unplaced:
    model = spec.Model("m", profiles=(profile,), team=team)
    return place(model, (profile,), Cluster(nodes=nodes, models=(model,), replicas=replicas, **fields))  # type: ignore[arg-type]


def parts(found: Placed | Unplaced) -> tuple[Part, ...]:
    assert isinstance(found, Placed), found
    return found.parts


def given_cards(found: Placed | Unplaced) -> list[int]:
    [part] = parts(found)
    return [int(card.rpartition("-")[2]) for card in part.gpus]


def why(found: Placed | Unplaced) -> dict[str, str]:
    assert isinstance(found, Unplaced)
    return {turned.node: turned.reason for turned in found.reasons}


# --- inside a node ---------------------------------------------------------------------------------------------------
def test_without_topology_the_lowest_indices_are_given() -> None:
    gpus = tuple(reversed(cards()))
    assert given_cards(answer(FOUR, node(gpus=gpus))) == [0, 1, 2, 3]
    assert given_cards(answer(FOUR, node(), replicas=(holder("r", "a", 1, 2),))) == [0, 3, 4, 5]


def test_a_tensor_group_stays_in_one_nvlink_domain() -> None:
    gpus = linked(cards(), range(4), range(4, 8))
    assert given_cards(answer(FOUR, node(gpus=gpus), replicas=(holder("r", "a", 1),))) == [4, 5, 6, 7]


def test_the_domain_left_with_the_fewest_is_taken() -> None:
    gpus = linked(cards(), range(4), range(4, 6))
    assert given_cards(answer(replace(ONE, gpus_per_node=2, tp=2), node(gpus=gpus))) == [4, 5]
    assert given_cards(answer(ONE, node(gpus=gpus))) == [6]


def test_domains_reach_through_cards_that_others_hold() -> None:
    gpus = cards(4)
    chain = {0: ("a-2",), 1: (), 2: ("a-0", "a-3"), 3: ("a-2",)}
    gpus = tuple(msgspec.structs.replace(gpu, peers=chain[gpu.index]) for gpu in gpus)
    held = (holder("r", "a", 2),)
    assert given_cards(answer(replace(ONE, gpus_per_node=2, tp=2), node(gpus=gpus), replicas=held)) == [0, 3]


def test_a_link_that_only_one_end_reports_is_one() -> None:
    gpus = tuple(msgspec.structs.replace(g, peers=("a-3",) if g.index == 1 else ()) for g in cards(4))
    assert given_cards(answer(replace(ONE, gpus_per_node=2, tp=2), node(gpus=gpus))) == [1, 3]


def test_links_to_what_is_not_reported_join_nothing() -> None:
    gpus = tuple(msgspec.structs.replace(g, peers=("switch",) if g.index in (1, 3) else None) for g in cards(4))
    assert given_cards(answer(replace(ONE, gpus_per_node=2, tp=2), node(gpus=gpus))) == [0, 1]


def test_without_one_domain_one_numa_node_is_next_best() -> None:
    gpus = changed(cards(), 0, 2, 4, 6, numa=0)
    gpus = changed(gpus, 1, 3, 5, 7, numa=1)
    assert given_cards(answer(FOUR, node(gpus=gpus))) == [0, 2, 4, 6]
    assert given_cards(answer(FOUR, node(gpus=gpus), replicas=(holder("r", "a", 0),))) == [1, 3, 5, 7]
    split = (holder("r", "a", 0, 1),)
    assert given_cards(answer(FOUR, node(gpus=gpus), replicas=split)) == [2, 3, 4, 5]


def test_where_nothing_holds_the_group_together_it_is_placed_all_the_same() -> None:
    gpus = linked(cards(4), range(2), range(2, 4))
    assert given_cards(answer(FOUR, node(gpus=gpus))) == [0, 1, 2, 3]


def test_types_of_one_class_are_not_mixed() -> None:
    gpus = changed(cards(6), 0, 1, name="NVIDIA H100 PCIe")
    assert given_cards(answer(FOUR, node(gpus=gpus))) == [2, 3, 4, 5]
    mixed = changed(cards(4), 0, 1, name="NVIDIA H100 PCIe")
    assert why(answer(FOUR, node(gpus=mixed)))["a"] == (
        "needs 4 h100-80g; 4 free of 4: the free ones are 2 NVIDIA H100 80GB HBM3, 2 NVIDIA H100 PCIe, "
        "and one replica mixes no types; ask for fewer a node"
    )


def test_slices_of_a_card_are_given_one_by_one_and_never_joined() -> None:
    sliced = cards(4, gpu_class="a100-mig-3g-20g", slice_of="GPU-parent")
    single = replace(ONE, gpu_class="a100-mig-3g-20g")
    assert given_cards(answer(single, node(gpus=sliced), replicas=(holder("r", "a", 0),))) == [1]
    double = replace(single, tp=2, gpus_per_node=2)
    assert "only as MIG slices, which cannot be joined; 2 are needed" in why(answer(double, node(gpus=sliced)))["a"]


# --- which node ------------------------------------------------------------------------------------------------------
def test_the_node_with_the_least_left_over_is_taken() -> None:
    held = (holder("r", "b", 0, 1, 2), holder("s", "c", 0, 1, 2, 3, 4))
    nodes = [node("a"), node("b"), node("c")]
    assert [part.node for part in parts(answer(FOUR, *nodes, replicas=held))] == ["b"]
    assert [part.node for part in parts(answer(ONE, *nodes, replicas=held))] == ["c"]
    assert [part.node for part in parts(answer(ONE, node("b"), node("a")))] == ["a"]


def test_what_ended_holds_no_card_and_what_is_on_its_way_out_does() -> None:
    over = replace(holder("r", "a", 0), shards=(Shard("a", state="stopped", gpus=("a-0",)),))
    leaving = replace(holder("s", "a", 1), wanted="stop", shards=(Shard("a", state="stopping", gpus=("a-1",)),))
    assert given_cards(answer(ONE, node(), replicas=(over, leaving))) == [0]
    assert given_cards(answer(ONE, node(count=3), replicas=(holder("x", "a", 0), leaving))) == [2]


def test_cards_of_the_same_name_on_another_node_are_others() -> None:
    gpus = cards(1, node="same")
    held = replace(holder("r", "b"), shards=(Shard("b", state="ready", gpus=("same-0",)),))
    assert parts(answer(ONE, node("a", gpus=gpus), node("b", gpus=gpus), replicas=(held,)))[0].node == "a"


# --- why not ---------------------------------------------------------------------------------------------------------
def test_held_and_faulty_cards_are_named() -> None:
    gpus = changed(cards(), 7, healthy=False, fault="row remap failure")
    held = (holder("llama-1", "a", 0, 1, 2, 3, 4),)
    assert why(answer(FOUR, node(gpus=gpus), replicas=held))["a"] == (
        "needs 4 h100-80g; 2 free of 8: 5 held by llama-1, 1 faulty (row remap failure); free some"
    )


def test_a_faulty_card_that_a_replica_holds_is_counted_once() -> None:
    gpus = changed(cards(4), 0, healthy=False)
    reason = why(answer(FOUR, node(gpus=gpus), replicas=(holder("r", "a", 0),)))["a"]
    assert reason == "needs 4 h100-80g; 3 free of 4: 1 faulty (it does not say why); repair them"


def test_many_holders_are_counted() -> None:
    held = tuple(holder(f"r{i}", "a", i) for i in range(7))
    assert why(answer(FOUR, node(), replicas=held))["a"] == (
        "needs 4 h100-80g; 1 free of 8: 1 held by r0, 1 held by r1, 1 held by r2, 1 held by r3, 3 more replicas; "
        "free some"
    )


@pytest.mark.parametrize(
    ("where", "profile", "reason"),
    [
        (node(count=2), FOUR, "needs 4 h100-80g and has 2; ask for fewer a node"),
        (
            node(count=0),
            ONE,
            "no node has h100-80g; the cluster has no cards. Add a node with them, or change gpu_class of profile one",
        ),
        (
            node(gpus=cards(2, gpu_class="l4-22g")),
            ONE,
            "no node has h100-80g; the cluster has 2 l4-22g. Add a node with them, or change gpu_class of profile one",
        ),
        (
            node(gpus_fault="nvidia-smi has not answered"),
            ONE,
            "has cards that cannot be read: nvidia-smi has not answered",
        ),
        (
            node(),
            replace(ONE, required_memory_gb=100),
            "1 h100-80g have 85.9 GB of memory, 100.0 GB are required; use more cards or a larger class",
        ),
        (
            node(gpus=cards(memory_bytes=None)),
            replace(ONE, required_memory_gb=1),
            "does not say how much memory its h100-80g have, and 1.0 GB are required",
        ),
        (
            node(),
            replace(ONE, reserved_cores=65),
            "has 64 of 64 cores left, 65 are needed; add a larger node, or lower reserved_cores of the profile",
        ),
        (
            node(cores=None),
            replace(ONE, reserved_cores=2),
            "does not say how many cores it has, and reserved_cores asks for 2",
        ),
        (
            node(disk_free_bytes=5 * 10**10),
            replace(ONE, min_disk_gb=100),
            "no node has 100.0 GB of disk free; the most is 50.0 GB, on a. "
            "Lower min_disk_gb of profile one, add a node with more, or free some",
        ),
        (
            node(disk_bytes=2 * 10**11, disk_free_bytes=5 * 10**10),
            replace(ONE, min_disk_gb=200),
            "no node has 200.0 GB of disk free; the most is 50.0 GB, on a. "
            "Lower min_disk_gb of profile one, add a node with more, or free some",
        ),
        (
            node(disk_bytes=2 * 10**11, disk_free_bytes=5 * 10**10),
            replace(ONE, min_disk_gb=201),
            "no node has a disk of 201.0 GB; the largest has 200.0 GB, on a. "
            "Lower min_disk_gb of profile one, or add a node with a larger one",
        ),
        (
            node(disk_free_bytes=None),
            replace(ONE, min_disk_gb=100),
            "does not say how much disk it has free, and min_disk_gb asks for 100.0 GB",
        ),
        (
            node(),
            replace(ONE, only_nodes=("x", "y")),
            "no node is named x, y; correct only_nodes of profile one",
        ),
        (
            node(),
            replace(ONE, only_nodes=tuple("uvwxyz")),
            "no node is named u, v, w, x and 2 more; correct only_nodes of profile one",
        ),
        (
            node(),
            replace(ONE, labels=(("zone", "b"),)),
            "no node has the label zone=b that profile one asks for; label a node so, or change the profile",
        ),
        (
            node(labels=(("zone", "a"),)),
            replace(ONE, labels=(("zone", "b"),)),
            "no node has the label zone=b that profile one asks for; label a node so, or change the profile",
        ),
    ],
)
def test_a_node_is_turned_down_with_its_reason(where: Node, profile: spec.Profile, reason: str) -> None:
    assert why(answer(profile, where)) == {"a": reason}


def test_what_another_node_has_is_a_nodes_own_fault() -> None:
    full = holder("r", "z", *range(8))
    other = node("z", labels=(("zone", "b"),))
    label = replace(ONE, labels=(("zone", "b"),))
    asks = "profile one asks for zone=b; label it so, or change the profile"
    assert why(answer(label, node(), other, replicas=(full,)))["a"] == f"has no label zone; {asks}"
    elsewhere = node(labels=(("zone", "a"),))
    assert why(answer(label, elsewhere, other, replicas=(full,)))["a"] == f"has label zone=a; {asks}"
    pinned = replace(ONE, only_nodes=tuple("vwxyz"))
    assert why(answer(pinned, node(), other, replicas=(full,)))["a"] == (
        "is not among only_nodes of profile one: v, w, x, y and 1 more"
    )
    bare = node(gpus=cards(2, gpu_class="l4-22g"))
    assert why(answer(ONE, bare, other, replicas=(full,)))["a"] == "has no h100-80g; it has 2 l4-22g"
    assert why(answer(ONE, node(count=0), other, replicas=(full,)))["a"] == "has no h100-80g; it has no cards"
    roomy = replace(ONE, min_disk_gb=100)
    assert why(answer(roomy, node(disk_free_bytes=5 * 10**10), other, replicas=(full,)))["a"] == (
        "has 50.0 GB of disk free, and min_disk_gb asks for 100.0 GB; free some, or lower min_disk_gb"
    )
    small = node(disk_bytes=9 * 10**10, disk_free_bytes=5 * 10**10)
    assert why(answer(roomy, small, other, replicas=(full,)))["a"] == (
        "has a disk of 90.0 GB, and min_disk_gb asks for 100.0 GB; add a node with a larger one, or lower min_disk_gb"
    )
    unsaid = node("z", disk_free_bytes=None)
    assert why(answer(roomy, node(disk_free_bytes=5 * 10**10), unsaid))["a"].startswith("has 50.0 GB of disk free")


def test_pins_labels_memory_disk_and_cores_that_suffice_are_no_reason() -> None:
    asking = replace(
        FOUR, only_nodes=("a",), labels=(("zone", "a"),), required_memory_gb=300, min_disk_gb=100, reserved_cores=8
    )
    [part] = parts(answer(asking, node(labels=(("rack", "7"), ("zone", "a")))))
    assert (part.node, part.cores, len(part.gpus), part.fabric) == ("a", 8, 4, "")


def test_weights_on_their_way_have_their_disk() -> None:
    profile = replace(ONE, min_disk_gb=60)
    coming = Shard("a", state="fetching", gpus=("a-0",))
    on_its_way = Replica("r", "m", "one", "d", made_at=NOW, shards=(coming,))
    where = node(disk_free_bytes=10**11)
    assert why(answer(profile, where, replicas=(on_its_way,)))["a"] == (
        "has 100.0 GB of disk free, of which 60.0 GB are for weights on their way, and min_disk_gb asks for 60.0 GB; "
        "free some, or lower min_disk_gb"
    )
    there = replace(on_its_way, shards=(replace(coming, state="loading"),))
    assert given_cards(answer(profile, where, replicas=(there,))) == [1]


def test_cores_that_replicas_on_cards_reserve_are_taken_for_all() -> None:
    held = (holder("r", "a", 0, cores=60),)
    assert why(answer(replace(ONE, reserved_cores=5), node(), replicas=held)) == {
        "a": "has 4 of 64 cores left, 5 are needed; free some, or lower reserved_cores of the profile"
    }
    cpu = spec.Profile("cpu", engine="vllm", reserved_cores=5)
    assert why(answer(cpu, node(), replicas=held)) == {
        "a": "has 4 of 64 cores left, 5 are needed; free some, or lower reserved_cores of the profile"
    }


# --- quotas ----------------------------------------------------------------------------------------------------------
def test_a_teams_quota_turns_every_node_down_and_says_who_holds_what() -> None:
    gone = Shard("a", state="ready", gpus=("a-7",))  # of which its node says nothing
    mine = (
        replace(holder("r", "a", 0, 1), model="m"),
        replace(holder("s", "b"), model="m", profile="four", shards=(replace(gone, node="b", gpus=("b-99",)),)),
        replace(holder("t", "a", 2), model="m", shards=(Shard("a", state="failed", gpus=("a-2",)),)),
        holder("x", "a", 3),
    )
    quotas = {"red": {CLASS: 6}, "blue": {CLASS: 0}}
    found = answer(FOUR, node("a"), node("b"), replicas=mine, team="red", quotas=quotas)
    reason = (
        "team red may hold 6 h100-80g and holds 3: m 3; this needs 4 more. "
        "Stop one of its replicas, or: llmgw ctl quota set red h100-80g 7"
    )
    assert why(found) == {"a": reason, "b": reason}
    assert isinstance(answer(FOUR, node(), replicas=mine[:1], team="red", quotas=quotas), Placed)


def test_a_quota_that_nothing_is_held_of_says_so() -> None:
    found = answer(FOUR, node(), team="red", quotas={"red": {CLASS: 3}})
    assert why(found)["a"] == (
        "team red may hold 3 h100-80g and holds 0; this needs 4 more. Raise it: llmgw ctl quota set red h100-80g 4"
    )
    nowhere = answer(FOUR, team="red", quotas={"red": {CLASS: 3}})
    assert list(why(nowhere)) == [""]


def test_a_quota_does_not_hide_that_there_are_no_such_cards() -> None:
    found = answer(FOUR, node(gpus=cards(2, gpu_class="l4-22g")), team="red", quotas={"red": {CLASS: 3}})
    assert why(found)["a"] == (
        "no node has h100-80g; the cluster has 2 l4-22g. Add a node with them, or change gpu_class of profile four; "
        "besides: team red may hold 3 h100-80g and holds 0; this needs 4 more. "
        "Raise it: llmgw ctl quota set red h100-80g 4"
    )


def test_faulty_cards_count_against_no_quota() -> None:
    gpus = changed(cards(), 0, healthy=False)
    held = (replace(holder("r", "a", 0, 1, 2, 3), model="m"),)
    assert isinstance(
        answer(FOUR, node(gpus=gpus), node("b"), replicas=held, team="red", quotas={"red": {CLASS: 7}}), Placed
    )


@pytest.mark.parametrize(
    ("team", "quotas"), [("", {"red": {CLASS: 0}}), ("red", {"red": {"l4-22g": 0}}), ("red", {"blue": {CLASS: 0}})]
)
def test_a_quota_binds_its_team_and_class_only(team: str, quotas: dict[str, dict[str, int]]) -> None:
    assert isinstance(answer(ONE, node(), team=team, quotas=quotas), Placed)


def test_replicas_on_cpus_need_no_quota() -> None:
    cpu = spec.Profile("cpu", engine="vllm")
    assert isinstance(answer(cpu, node(), team="red", quotas={"red": {CLASS: 0}}), Placed)


# --- over several nodes ----------------------------------------------------------------------------------------------
def test_a_replica_over_nodes_gets_whole_parts_on_one_fabric() -> None:
    nodes = [node("c", fabrics=(IB0,)), node("b", fabrics=(IB0,)), node("a")]
    found = parts(answer(WIDE, *nodes))
    assert [(part.node, part.rank, len(part.gpus), part.fabric) for part in found] == [
        ("b", 0, 4, "ib0"),
        ("c", 1, 4, "ib0"),
    ]


def test_what_keeps_nodes_from_joining_is_said_of_each() -> None:
    other = msgspec.structs.replace(IB0, name="ib1")
    nodes = [
        node("a", fabrics=(IB0,)),
        node("b", fabrics=(other,)),
        node("c", fabrics=(DOWN,)),
        node("d"),
        node("e", fabrics=(other, DOWN)),
        node("f", count=2, fabrics=(IB0,)),
        node("g", fabrics=(msgspec.structs.replace(DOWN, reason=""),)),
    ]
    three = replace(WIDE, nodes=3, tp=12)
    room = "of the 3 nodes needed on fabric {}, with cards of one type, there is room on {}; free some on another"
    down = "fabric ib0 is down: adapter mlx5_1 has no ACTIVE port; repair its link"
    assert why(answer(three, *nodes)) == {
        "a": room.format("ib0", 1),
        "b": room.format("ib1", 2),
        "c": down,
        "d": "has no fabric, and a replica over 3 nodes needs one that they share; declare it in its agent.yaml",
        "e": f"{down}; {room.format('ib1', 2)}",
        "f": "needs 4 h100-80g and has 2; ask for fewer a node",
        "g": "fabric ib0 is down: its agent does not say why; repair its link",
    }


def test_one_name_over_two_kinds_of_links_is_two_fabrics() -> None:
    roce = msgspec.structs.replace(IB0, link_layer="Ethernet")
    assert isinstance(answer(WIDE, node("a", fabrics=(IB0,)), node("b", fabrics=(roce,))), Unplaced)


def test_types_are_not_mixed_over_nodes_either() -> None:
    pcie = cards(node="b", name="NVIDIA H100 PCIe")
    assert isinstance(answer(WIDE, node("a", fabrics=(IB0,)), node("b", gpus=pcie, fabrics=(IB0,))), Unplaced)


def test_nodes_of_one_clique_are_preferred_and_their_cards_in_it_given() -> None:
    def in_clique(name: str, clique: int, *which: int) -> Node:
        gpus = changed(cards(node=name), *which, nvlink_cluster="c", nvlink_clique=clique)
        return node(name, gpus=gpus, fabrics=(IB0,))

    full = holder("r", "a", 0, 1, 2, 3)
    nodes = [
        node("a", fabrics=(IB0,)),
        in_clique("b", 1, 4, 5, 6, 7),
        in_clique("c", 2, *range(8)),
        in_clique("d", 1, *range(8)),
        in_clique("e", 1, 0, 1),
    ]
    found = parts(answer(WIDE, *nodes, replicas=(full,)))
    assert [part.node for part in found] == ["b", "d"]
    assert found[0].gpus == ("b-4", "b-5", "b-6", "b-7")


def test_of_nodes_that_share_a_fabric_those_with_the_least_left_over_and_then_the_fastest_are_taken() -> None:
    fast = msgspec.structs.replace(IB0, name="ib9", rate_gbit_s=800.0)
    slow = msgspec.structs.replace(IB0, name="ib1", rate_gbit_s=None)
    both = [node("a", fabrics=(IB0, fast, slow)), node("b", fabrics=(IB0, fast, slow))]
    assert {part.fabric for part in parts(answer(WIDE, *both))} == {"ib9"}
    fuller = [*both, node("c", 4, fabrics=(IB0,)), node("d", 5, fabrics=(IB0,))]
    assert [part.node for part in parts(answer(WIDE, *fuller))] == ["c", "d"]
