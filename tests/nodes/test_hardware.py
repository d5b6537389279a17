"""What the page of a node says of its cards and networks, and the page of a model of why it has no place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from agent import protocol
from nodes import passes
from nodes.fabrics import PortLine
from nodes.hardware import CardCount, CardLine, FabricLine, cards_in_words, count_cards, hardware
from nodes.state import in_words
from tests import factories
from tests.factories import GIB
from tests.hardware import ADAPTER, FABRIC, INVENTORY, READING

IDLE = protocol.NodeLoad()
PORT = ADAPTER.ports[0]


def gpu(index: int = 0, **fields: Any) -> protocol.Gpu:
    fixed = {"uuid": f"GPU-{index}", "index": index, "name": "NVIDIA H100 PCIe", "gpu_class": "h100-80g"}
    return protocol.Gpu(**{**fixed, "memory_bytes": 80 * GIB, **fields})


def cards(*gpus: protocol.Gpu, load: protocol.NodeLoad = IDLE, **holders: str) -> tuple[CardLine, ...]:
    told = protocol.Inventory(hostname="h", gpus=gpus)
    return hardware(told, load, {f"GPU-{key[1:]}": replica for key, replica in holders.items()}).cards


def test_a_card_is_free_used_or_faulty() -> None:
    found = cards(gpu(2, healthy=False, fault="ECC"), gpu(1), gpu(0), g1="llama-1", g2="llama-1")
    assert [(card.index, card.state, card.replica, card.note) for card in found] == [
        (0, "free", "", ""),
        (1, "used", "llama-1", ""),
        (2, "faulty", "llama-1", "ECC"),
    ]


def test_readings_stand_beside_their_card_and_unknown_ones_are_unknown() -> None:
    load = protocol.NodeLoad(gpus=(READING,))
    first, other = cards(gpu(1), gpu(2), load=load)
    assert (first.temperature_c, first.power_w, first.note) == (3, 4, "slowed down: HW thermal")
    assert (first.power_limit_w, first.clock_mhz, first.fan_percent) == (5, 6, 7)
    assert (other.memory_used_bytes, other.utilisation_percent, other.note) == (None, None, "")


@pytest.mark.parametrize(
    ("fields", "links"),
    [
        ({}, "unknown"),
        ({"peers": ()}, "none"),
        ({"peers": ("a",)}, "1 card"),
        ({"peers": ("a", "b"), "nvlink_cluster": "c0ffee00ff", "nvlink_clique": 3}, "2 cards, clique 3 of c0ffee00"),
        ({"slice_of": "GPU-9"}, "MIG slice"),
    ],
)
def test_links_that_are_unknown_are_told_from_none(fields: dict[str, Any], links: str) -> None:
    assert cards(gpu(**fields))[0].links == links


def test_fabrics_and_ports_say_what_they_are_and_who_manages_them() -> None:
    infiniband = msgspec.structs.replace(
        PORT, number=2, link_layer="InfiniBand", network="", gids=(), fault="", sm_lid=None
    )
    both = msgspec.structs.replace(ADAPTER, ports=(PORT, infiniband))
    bare = protocol.RdmaAdapter(name="mlx5_9", fault="it has no ports")
    unnamed = msgspec.structs.replace(
        ADAPTER, name="mlx5_8", fault="", ports=(msgspec.structs.replace(infiniband, subnet_prefix="", sm_lid=4),)
    )
    found = hardware(msgspec.structs.replace(INVENTORY, adapters=(both, bare, unnamed)), protocol.NodeLoad(), {})
    assert found.fabrics == (FabricLine("ib0", "down", "mlx5_0", 400.0, "InfiniBand", FABRIC.reason),)
    shown = [
        (
            port.adapter,
            port.number,
            port.fabric,
            port.state,
            port.rate_gbit_s,
            port.link_layer,
            port.reports,
            port.gids,
            port.note,
        )
        for port in found.ports
    ]
    assert all(isinstance(port, PortLine) for port in found.ports)
    assert shown == [
        (
            "mlx5_0",
            1,
            "ib0",
            "ACTIVE",
            400.0,
            "RoCE",
            "network fe80:0000:0000:0000 on ens1f0np0",
            "3 ::ffff:10.0.0.1 (RoCE v2)",
            "no more; rate: Invalid argument",
        ),
        (
            "mlx5_0",
            2,
            "ib0",
            "ACTIVE",
            400.0,
            "InfiniBand",
            "subnet manager unknown of fe80:0000:0000:0000",
            "",
            "no more",
        ),
        ("mlx5_9", None, "", "", None, "", "", "", "it has no ports"),
        ("mlx5_8", 2, "", "ACTIVE", 400.0, "InfiniBand", "subnet manager 4 of unknown", "", ""),
    ]
    up = msgspec.structs.replace(INVENTORY, fabrics=(msgspec.structs.replace(FABRIC, up=True),))
    assert hardware(up, protocol.NodeLoad(), {}).fabrics[0].state == "up"


def test_what_is_wrong_with_a_node_is_said_first_with_what_to_do() -> None:
    told = protocol.Inventory(
        hostname="h",
        gpus=(
            gpu(1, healthy=False, fault="row remap failure: it has to be replaced", pci="00000000:61:00.0"),
            gpu(0, healthy=False, fault="2 uncorrected ECC errors; reset the card"),
            gpu(2),
        ),
        gpus_fault="the driver does not answer",
        fabrics=(FABRIC, msgspec.structs.replace(FABRIC, name="ib1", up=True)),
    )
    assert hardware(told, IDLE, {"GPU-1": "llama-1", "GPU-2": "llama-1"}).needs == (
        ("warn", "Its cards cannot be relied on: the driver does not answer. Nothing new is placed on them."),
        (
            "faulty",
            "Card 0 (NVIDIA H100 PCIe, GPU-0): 2 uncorrected ECC errors; reset the card. It counts neither used nor"
            " free.",
        ),
        (
            "faulty",
            "Card 1 (NVIDIA H100 PCIe, 00000000:61:00.0): row remap failure: it has to be replaced. It counts neither"
            " used nor free. Replica llama-1 still runs on it.",
        ),
        (
            "down",
            "Fabric ib0 is not advertised: adapter mlx5_0 has no ACTIVE port. No replica spans nodes over it.",
        ),
    )
    assert hardware(protocol.Inventory(hostname="h", gpus=(gpu(),)), IDLE, {}).needs == ()


def test_a_faulty_card_is_neither_used_nor_free_and_is_named() -> None:
    there = (gpu(0), gpu(1), gpu(2, healthy=False, fault="b"), gpu(3, healthy=False, fault="a"))
    assert count_cards(there, "", {"GPU-1", "GPU-2"}) == CardCount(1, 1, 2, "card 2: b; card 3: a")
    assert count_cards((), "no driver", ()) == CardCount(0, 0, 0, "cards cannot be read: no driver")


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12),
    st.sampled_from(["", "the driver does not answer"]),
)
def test_every_card_is_exactly_one_of_used_free_and_faulty(kinds: list[tuple[bool, bool]], unread: str) -> None:
    there = [gpu(n, healthy=healthy, fault="" if healthy else "x") for n, (healthy, _) in enumerate(kinds)]
    held = {f"GPU-{n}" for n, (_, is_held) in enumerate(kinds) if is_held} | {"GPU-elsewhere"}
    found = count_cards(there, unread, held)
    assert (found.used, found.free, found.faulty) == (
        kinds.count((True, True)),
        kinds.count((True, False)),
        sum(not healthy for healthy, _ in kinds),
    )
    assert bool(found.note) == bool(unread or found.faulty)


def test_a_shards_cards_are_named_by_class_and_place() -> None:
    there = (gpu(1), gpu(0), *map(gpu, range(3, 6)), gpu(2, gpu_class="l4-22g"), gpu(6, healthy=False), gpu(7), gpu(9))
    held = [f"GPU-{index}" for index in (1, 0, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert cards_in_words(held, there) == "h100-80g 0–1, 3–5, 6 (faulty), 7, 9; l4-22g 2; GPU-8 (not reported)"
    assert cards_in_words(["GPU-6"], there) == "h100-80g 6 (faulty)"
    assert cards_in_words([], there) == ""


def test_how_far_weights_have_come_is_told_in_units_that_fit() -> None:
    many = protocol.Progress(done_bytes=41 * 10**9, total_bytes=100 * 10**9, note="weights")
    assert in_words(many) == "weights: 41 % of 100.0 GB"
    assert in_words(protocol.Progress(done_bytes=2 * 10**9)) == "fetched: 2.0 GB"
    assert in_words(protocol.Progress(done_bytes=10**9 - 10**8, total_bytes=9 * 10**8)) == "100 % of 900.0 MB"


# --- pages -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def root(client: Client) -> Client:
    client.force_login(factories.make_user("root", is_superuser=True))
    return client


def page(client: Client, url: str) -> str:
    answer = client.get(url)
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.mark.django_db
def test_a_nodes_page_shows_cards_fabrics_adapters_and_labels(root: Client) -> None:
    told = factories.inventory(
        gpus=(gpu(0, peers=()), gpu(1, healthy=False, fault="row remap failure")),
        gpus_fault="the NVIDIA driver has not answered for more than 90 s",
        driver="580.65",
        fabrics=(FABRIC,),
        adapters=(ADAPTER,),
    )
    load = protocol.NodeLoad(gpus=(protocol.GpuReading(uuid="GPU-0", temperature_c=41),), gpus_age_s=125,
        sensors=(protocol.Sensor(name="coretemp Package", value=51.0, unit="°C"),),
    )  # fmt: skip
    node = factories.make_node(
        "gpu-01", inventory=msgspec.to_builtins(told), load=msgspec.to_builtins(load), labels={"zone": "east"}
    )
    held = factories.make_replica("llama-1", node=node)
    held.shards.update(gpus=["GPU-0"])
    text = page(root, "/nodes/gpu-01/")
    for words in (
        "h100-80g", "row remap failure", "faulty", "/replicas/llama-1/", "41", "driver 580.65", "zone", "east",
        "has not answered for more than 90 s. Nothing new is placed on them", "adapter mlx5_0 has no ACTIVE port",
        "on ens1f0np0", "RoCE v2", "1 used · 0 free · 1 faulty", "coretemp Package",
    ):  # fmt: skip
        assert words in text, words
    assert "None declared" in page(root, f"/nodes/{factories.make_node().name}/")
    assert "None found" in page(root, f"/nodes/{factories.make_node(inventory={}).name}/")


VLLM = protocol.Build(engine="vllm", name="cu13", version="1")


def gpu_node(name: str, count: int = 8, *, free_bytes: int = 500 * GIB, **fields: Any) -> None:
    told = factories.inventory(
        gpus=tuple(gpu(index, uuid=f"{name}-{index}") for index in range(count)),
        builds=(VLLM,),
        disks=(protocol.Disk(path="/", total_bytes=10**12, free_bytes=free_bytes),),
        **fields,
    )
    load = protocol.NodeLoad(disk_free_bytes=free_bytes)
    factories.make_node(name, inventory=msgspec.to_builtins(told), load=msgspec.to_builtins(load))


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (
            {"gpu_class": "b300-270g", "gpus_per_node": 1},
            "gpu: no node has b300-270g; the cluster has 16 h100-80g",
        ),
        (
            {"gpu_class": "h100-80g", "gpus_per_node": 8, "nodes": 2, "tp": 16},
            "b (gpu): fabric ib0 is down: adapter mlx5_0 has no ACTIVE port",
        ),
        (
            {"gpu_class": "h100-80g", "gpus_per_node": 1, "min_disk_gb": 900},
            "gpu: no node has 900.0 GB of disk free; the most is 536.8 GB, on a. Lower min_disk_gb of profile gpu",
        ),
        (
            {"gpu_class": "h100-80g", "gpus_per_node": 1, "labels": {"zone": "west"}},
            "gpu: no node has the label zone=west that profile gpu asks for",
        ),
    ],
)
def test_a_models_page_says_why_it_has_no_place(root: Client, profile: dict[str, Any], reason: str) -> None:
    gpu_node("a", fabrics=(msgspec.structs.replace(FABRIC, up=True, reason=""),))
    gpu_node("b", fabrics=(FABRIC,))
    factories.make_model("llama", profiles=({"name": "gpu", "engine": "vllm", **profile},))
    passes.run_pass(timezone.now())
    assert reason in page(root, "/models/llama/").replace("&#x27;", "'")
