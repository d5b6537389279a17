"""A fleet with cards, fabrics and sensors, for the pages that show them."""

from __future__ import annotations

from typing import Any

import msgspec

from agent import protocol
from agent.fabrics import advertise
from nodes.models import Event, Node, Shard
from tests import factories
from tests.factories import GIB

CARDS = 8


def cards(node: str, **faults: str) -> tuple[protocol.Gpu, ...]:
    """Eight on NVLink; `faults` by "c" and index."""
    ids = [f"GPU-{node}-{index}" for index in range(CARDS)]
    return tuple(
        protocol.Gpu(
            uuid=uuid,
            index=index,
            name="NVIDIA H100 80GB HBM3",
            gpu_class="h100-80g",
            memory_bytes=80 * GIB,
            healthy=f"c{index}" not in faults,
            fault=faults.get(f"c{index}", ""),
            pci=f"00000000:{index + 1}1:00.0",
            compute_capability="9.0",
            numa=index // 4,
            peers=tuple(other for other in ids if other != uuid),
        )
        for index, uuid in enumerate(ids)
    )


def adapters(manager: int = 1, rails: int = 2, **states: str) -> tuple[protocol.RdmaAdapter, ...]:
    """InfiniBand ones m0 and on, and one of RoCE that nobody declares."""
    found = [
        protocol.RdmaAdapter(
            name=f"mlx5_{number}",
            ports=(
                protocol.AdapterPort(
                    number=1,
                    state=states.get(f"m{number}", "ACTIVE"),
                    rate_gbit_s=400.0,
                    link_layer="InfiniBand",
                    subnet_prefix="fe80:0000:0000:0000",
                    sm_lid=manager,
                    gids=(protocol.Gid(index=0, gid=f"fe80:0000:0000:0000:9803:9b03:00a1:b2c{number}"),),
                ),
            ),
        )
        for number in range(rails)
    ]
    spare = protocol.AdapterPort(
        number=1,
        state="ACTIVE",
        rate_gbit_s=25.0,
        link_layer="Ethernet",
        subnet_prefix="10.0.0.0/24",
        network="ens1f0np0",
        gids=(protocol.Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0001", kind="RoCE v2"),),
    )
    return (*found, protocol.RdmaAdapter(name="mlx5_9", ports=(spare,)))


def inventory(
    name: str, declared: dict[str, list[str]], found: tuple[protocol.RdmaAdapter, ...], **faults: str
) -> dict[str, Any]:
    told = factories.inventory(
        gpus=cards(name, **faults),
        cpu=protocol.Cpu(model="AMD EPYC 9654", cores=192, numa_nodes=2),
        memory_bytes=512 * GIB,
        driver="580.65.06",
        cuda="13.0",
        fabrics=advertise(declared, found),
        adapters=found,
        builds=(
            protocol.Build(engine="vllm", name="cu13", version="0.21.0"),
            protocol.Build(
                engine="llamacpp",
                name="xllamacpp",
                version="2026.10",
                usable=False,
                reason="xllamacpp 2026.10 computes on CPUs only, and this node has 8 GPUs that it would leave idle.",
            ),
        ),
        files=tuple(protocol.File(path=f"qwen3-32b/model-{n:05}.safetensors", size_bytes=4 * 10**9) for n in range(17)),
    )
    built: dict[str, Any] = msgspec.to_builtins(told)
    return built


def load(name: str) -> dict[str, Any]:
    readings = tuple(
        protocol.GpuReading(
            uuid=f"GPU-{name}-{index}",
            memory_used_bytes=(71 if index < 4 else 1) * GIB,
            utilisation_percent=93.0 if index < 4 else 0.0,
            temperature_c=61.0 + index,
            power_w=612.5 if index < 4 else 70.2,
            power_limit_w=700.0,
            sm_clock_mhz=1980.0,
            throttled="hw thermal" if index == 3 else "",
        )
        for index in range(CARDS)
    )
    sensors = [protocol.Sensor(name=f"coretemp Core {n}", value=48.0 + n, unit="°C") for n in range(6)]
    sensors += [
        protocol.Sensor(name="nvme Composite", value=None, unit="°C"),
        protocol.Sensor(name="power_meter power1", value=2310.0, unit="W"),
    ]
    told = protocol.NodeLoad(
        load_1m=14.2,
        cpu_percent=22.0,
        memory_used_bytes=310 * GIB,
        disk_free_bytes=2_400 * 10**9,
        sensors=tuple(sensors),
        gpus=readings,
        gpus_age_s=4.0,
    )
    built: dict[str, Any] = msgspec.to_builtins(told)
    return built


def make_node(
    name: str, *, manager: int = 1, fabric: str = "ib0", states: dict[str, str] | None = None, **faults: str
) -> Node:
    found = adapters(manager, **(states or {}))
    declared = {fabric: [adapter.name for adapter in found if adapter.name != "mlx5_9"]}
    return factories.make_node(name, inventory=inventory(name, declared, found, **faults), load=load(name))


def make_fleet() -> None:
    """Four nodes that have something of everything, and a replica over two of them that is still starting."""
    make_node("gpu-01")
    make_node(
        "gpu-02",
        c5="row remap failure: it has to be replaced",
        c6="process 4711 (python3), which is not llmgw's, holds 1.5 GiB of it; end it",
    )
    make_node("gpu-03", manager=7)
    make_node("gpu-04", fabric="ib-east", states={"m1": "INIT"})
    bare = factories.inventory()
    factories.make_node("cpu-01", inventory=msgspec.to_builtins(bare))
    first = factories.make_replica(
        "qwen3-32b-1", node=Node.objects.get(pk="gpu-01"), model="qwen3-32b", profile="h100x4", engine="vllm"
    )
    first.shards.update(gpus=[f"GPU-gpu-01-{n}" for n in range(4)], fabric="")
    wide = factories.make_replica(
        "deepseek-1",
        node=Node.objects.get(pk="gpu-01"),
        model="deepseek-v3",
        profile="wide",
        engine="vllm",
        state="loading",
    )
    wide.shards.update(
        gpus=[f"GPU-gpu-01-{n}" for n in range(4, 8)],
        fabric="ib0",
        rendezvous=29501,
        state="loading",
        progress={"done_bytes": 41 * 10**9, "total_bytes": 100 * 10**9, "note": "weights"},
    )
    Shard.objects.create(
        replica=wide,
        rank=1,
        node_id="gpu-02",
        gpus=[f"GPU-gpu-02-{n}" for n in range(4)],
        cores=8,
        state="waiting",
        fabric="ib0",
    )
    for text in ("placed on gpu-01 and gpu-02 over ib0", "rank 0 on gpu-01 is loading: weights 41 %"):
        Event.objects.create(
            kind="placed", model="deepseek-v3", replica="deepseek-1", node="gpu-01", text=text.capitalize()
        )
