"""Cards, adapters and fabrics as agents report them, with every field filled in."""

from __future__ import annotations

from agent import protocol

GPU = protocol.Gpu(
    uuid="GPU-1",
    index=3,
    name="NVIDIA L4",
    gpu_class="l4-22g",
    memory_bytes=3,
    healthy=False,
    fault="row remap failure",
    pci="00000000:61:00.0",
    compute_capability="8.9",
    numa=1,
    peers=("GPU-2",),
    nvlink_cluster="c0ffee",
    nvlink_clique=7,
    slice_of="GPU-0",
)
ADAPTER = protocol.RdmaAdapter(
    name="mlx5_0",
    numa=1,
    ports=(
        protocol.AdapterPort(
            number=1,
            state="ACTIVE",
            rate_gbit_s=400.0,
            link_layer="Ethernet",
            subnet_prefix="fe80:0000:0000:0000",
            sm_lid=1,
            network="ens1f0np0",
            gids=(protocol.Gid(index=3, gid="::ffff:10.0.0.1", kind="RoCE v2"),),
            fault="rate: Invalid argument",
        ),
    ),
    fault="no more",
)
FABRIC = protocol.Fabric(
    name="ib0",
    adapters=("mlx5_0",),
    up=False,
    reason="adapter mlx5_0 has no ACTIVE port",
    rate_gbit_s=400.0,
    link_layer="InfiniBand",
)
INVENTORY = protocol.Inventory(
    hostname="h",
    os="Debian",
    kernel="6.12",
    cpu=protocol.Cpu(model="c", cores=8, numa_nodes=2),
    memory_bytes=5,
    disks=(protocol.Disk(path="/", total_bytes=2, free_bytes=1),),
    gpus=(GPU,),
    gpus_fault="nvidia-smi does not answer",
    driver="580.65",
    cuda="13.0",
    fabrics=(FABRIC,),
    adapters=(ADAPTER,),
    builds=(protocol.Build(engine="vllm", name="cu13", version="1", usable=False, reason="driver"),),
    engine_builds={"vllm": "cu13"},
    files=(protocol.File(path="/x.gguf", size_bytes=9),),
    cut=("files",),
)
READING = protocol.GpuReading(
    uuid="GPU-1",
    memory_used_bytes=1,
    utilisation_percent=2,
    temperature_c=3,
    power_w=4,
    power_limit_w=5,
    sm_clock_mhz=6,
    fan_percent=7,
    throttled="HW thermal",
)
