"""Whole machines as they went wrong for others: a driver that blocks, cards cut into slices, adapters of every kind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agent.discovery.cards import to_gpu
from agent.discovery.infiniband import read_adapters
from agent.discovery.nvml import Nvml
from agent.discovery.prober import Prober
from agent.engines import ranks
from agent.fabrics import advertise
from agent.host import Host
from agent.protocol import ShardSpec
from tests.agent.test_discovery_fabrics import ZEROS, adapter, port
from tests.agent.test_discovery_gpus import LIMIT_S, MIB, MIG_LIST, Clock, mig_xml, told
from tests.agent.test_discovery_nvml import fake_nvml, nvml_card


def test_a_driver_that_blocks_in_the_middle_of_a_card_holds_up_one_thread_and_its_cards_take_nothing_new() -> None:
    go_on, asked, clock = threading.Event(), [], Clock()

    def memory(handle: dict[str, Any]) -> Any:
        asked.append(handle)
        if len(asked) > 2:  # the first probe asks twice
            assert go_on.wait(LIMIT_S)
        return SimpleNamespace(total=81559 * MIB, used=5)

    library = fake_nvml([nvml_card()], nvmlDeviceGetMemoryInfo=memory)
    prober = Prober("the NVIDIA driver", Nvml(lambda: library).read, clock=clock)
    prober.wait(LIMIT_S)
    before = threading.active_count()
    for _ in range(1000):  # a night of heartbeats
        clock.now += 40
        latest = prober.latest()
    assert threading.active_count() <= before + 1
    assert latest.value
    assert len(latest.value.cards) == 1
    assert latest.age_s == 40_000
    assert latest.fault == "the NVIDIA driver has not answered for more than 90 s"
    go_on.set()


def test_slices_are_given_by_their_own_name_one_to_an_engine() -> None:
    cards = told(mig_xml(), names=MIG_LIST).cards
    gpus = tuple(to_gpu(card, given=True, stranger=lambda _: False) for card in cards)
    host = Host("10.0.0.1", "x86_64", cards=gpus, gpus=len(gpus))

    def visible(*uuids: str) -> str:
        spec = ShardSpec(
            replica="r", model="m", profile="p", profile_digest="d", engine="vllm", source="/w", gpus=uuids
        )
        return dict(ranks.cards(spec, host))["CUDA_VISIBLE_DEVICES"]

    assert [gpu.uuid for gpu in gpus] == ["MIG-bbbb", "MIG-cccc", "GPU-dddd"]
    assert visible("MIG-cccc") == "MIG-cccc"
    assert visible("GPU-dddd") == "GPU-dddd"  # beside slices, the driver counts cards in its own way


def test_of_adapters_of_every_kind_only_those_with_active_ports_carry_a_fabric(tmp_path: Path) -> None:
    root = tmp_path
    (root / "sys/class/infiniband").mkdir(parents=True)
    adapter(root, "mlx5_0", {**port(), "phys_state": "5: LinkUp", "counters/port_xmit_wait": "N/A (no PMA)"})
    adapter(root, "mlx5_1", port(rate="EINVAL"))
    adapter(root, "mlx5_2", port(state="1: DOWN", rate="10 Gb/sec (4X)"))
    adapter(root, "mlx5_bond_0", port(layer="Ethernet", rate="2.5 Gb/sec (1X SDR)", g0=ZEROS))
    adapter(root, "irdma0", port(layer="Ethernet"), node_type="4: RNIC")
    adapter(root, "empty0")
    adapter(root, "two0", port(state="1: DOWN"), port())
    adapter(root, "mlx5_9", port(g0=ZEROS, g1=ZEROS))
    os.symlink(root / "gone", root / "sys/class/infiniband/mlx5_10")
    found = read_adapters(root)
    up = {fabric.name: fabric for fabric in advertise({each.name: [each.name] for each in found}, found)}
    assert {name for name, fabric in up.items() if fabric.up} == {"mlx5_0", "mlx5_1", "mlx5_9", "mlx5_bond_0", "two0"}
    assert (up["mlx5_bond_0"].link_layer, up["mlx5_bond_0"].rate_gbit_s) == ("Ethernet", 2.5)
    assert up["mlx5_1"].rate_gbit_s is None
    assert all(fabric.reason for fabric in up.values() if not fabric.up)
    assert "iWARP" in up["irdma0"].reason
    assert "cannot be read" in up["mlx5_10"].reason
