"""What the cluster has, counted: nothing twice, nothing left out, nothing free that cannot be had."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog import spec
from nodes.holdings import in_use
from nodes.state import Cluster, Node, Replica, Shard
from nodes.totals import CapacityLine, QuotaLine, capacity, quotas
from tests.nodes.fleets import NOW
from tests.nodes.simulation import a_model, machine


def count(cluster: Cluster) -> dict[str, CapacityLine]:
    return {line.gpu_class: line for line in capacity(cluster.nodes, cluster.replicas, in_use(cluster))}


def holder(name: str, node: str, *cards: str, ready: bool = True, model: str = "m", cores: float = 0) -> Replica:
    shard = Shard(node, 0, "ready" if ready else "loading", cores=cores, gpus=cards)
    return Replica(name, model, "only", "d", made_at=NOW, ready_at=NOW if ready else None, shards=(shard,))


def spoiled(node: Node, *which: int) -> Node:
    gpus = tuple(
        msgspec.structs.replace(gpu, healthy=False, fault="ECC") if index in which else gpu
        for index, gpu in enumerate(node.gpus)
    )
    return replace(node, gpus=gpus)


def test_a_faulty_card_is_neither_used_nor_free_whoever_holds_it() -> None:
    node = spoiled(machine("a", cards=4), 0, 3)
    cluster = Cluster(nodes=(node,), replicas=(holder("r", "a", "a-0", "a-1"),))
    assert count(cluster)["h100-80g"] == CapacityLine("h100-80g", "cards", 4, 1, 0, 1, 0, 2, 0, 1)


@pytest.mark.parametrize(
    "closed",
    [{"cordoned": True}, {"draining": True}, {"state": "unreachable"}, {"gpus_fault": "the driver does not answer"}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_free_where_nothing_new_is_placed_is_not_free_to_be_had(closed: dict[str, object]) -> None:
    shut = replace(machine("a", cards=4), **closed)  # type: ignore[arg-type]
    found = count(Cluster(nodes=(shut, machine("b", cards=2)), replicas=(holder("r", "a", "a-0", ready=False),)))
    line = found["h100-80g"]
    assert (line.total, line.used, line.starting, line.free, line.closed) == (6, 0, 1, 2, 3)
    assert found["cpu"].closed == (0 if "gpus_fault" in closed else 64)


def test_lost_nodes_count_nowhere() -> None:
    found = count(Cluster(nodes=(replace(machine("a", cards=4), state="lost"),), replicas=(holder("r", "a", "a-0"),)))
    assert list(found) == ["cpu"]
    assert found["cpu"] == CapacityLine("cpu", "cores", 0, 0, 0, 0, 0, 0, 0, 0)


def test_cores_that_one_node_lacks_are_not_taken_from_another() -> None:
    over = holder("r", "a", cores=12)
    nodes = (replace(machine("a", cores=8), reserved_cores=2), machine("b", cores=8), replace(machine("c"), cores=None))
    line = count(Cluster(nodes=nodes, replicas=(over,)))["cpu"]
    assert (line.total, line.used, line.free, line.reserved, line.nodes) == (16, 12, 8, 2, 2)


fates = st.fixed_dictionaries(
    {},
    optional={
        "cordoned": st.booleans(),
        "draining": st.booleans(),
        "state": st.sampled_from(["ready", "unreachable", "lost", "joining"]),
        "gpus_fault": st.sampled_from(["", "cannot be read"]),
    },
)


@given(st.lists(st.tuples(fates, st.sets(st.integers(0, 3)), st.sets(st.integers(0, 4)), st.booleans()), max_size=5))
def test_every_card_is_counted_exactly_once(fleet: list[tuple[dict[str, object], set[int], set[int], bool]]) -> None:
    nodes, replicas = [], []
    for number, (fate, faulty, held, ready) in enumerate(fleet):
        name = f"n{number}"
        nodes.append(spoiled(replace(machine(name, cards=4), **fate), *faulty))  # type: ignore[arg-type]
        replicas.append(holder(f"r{number}", name, *(f"{name}-{card}" for card in held), ready=ready))
    for line in count(Cluster(nodes=tuple(nodes), replicas=tuple(replicas))).values():
        if line.unit == "cards":
            parts = (line.used, line.starting, line.free, line.closed, line.faulty)
            assert sum(parts) == line.total
            assert min(parts) >= 0


# --- quotas ----------------------------------------------------------------------------------------------------------
def test_a_teams_cards_are_those_of_its_models_by_class() -> None:
    chat, batch = replace(a_model("chat"), team="red"), replace(a_model("batch"), team="red")
    nobodys = a_model("free")
    replicas = (
        holder("r1", "a", "a-0", "a-1", model="chat"),
        holder("r2", "a", "a-2", model="batch"),
        holder("r3", "a", "a-3", model="free"),
    )
    cluster = Cluster(
        nodes=(machine("a", cards=8),),
        models=(chat, batch, nobodys),
        replicas=replicas,
        quotas={"red": {"h100-80g": 2, "l4-22g": 4}, "blue": {}},
    )
    assert quotas(cluster) == (
        QuotaLine(
            "red",
            "h100-80g",
            2,
            3,
            ("batch 1", "chat 2"),
            "1 more than it may: what runs stays, nothing new starts",
        ),
        QuotaLine("red", "l4-22g", 4, 0, (), "no node reports cards of class l4-22g"),
    )


def test_cards_held_without_a_quota_are_told_too() -> None:
    cluster = Cluster(
        nodes=(machine("a", cards=2),),
        models=(replace(a_model("chat"), team="red"),),
        replicas=(holder("r", "a", "a-0", model="chat"),),
    )
    assert quotas(cluster) == (QuotaLine("red", "h100-80g", None, 1, ("chat 1",), ""),)
    assert quotas(replace(cluster, models=(spec.Model("chat"),))) == ()
