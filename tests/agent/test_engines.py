"""Command lines and environments of engines on cards, word by word (AG-10 to AG-12, AG-15, AG-34, AG-36)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agent.discovery.cards import LOST
from agent.engines import ENGINES, ranks
from agent.engines.base import Build, Command, Launch, is_repository
from agent.engines.llamacpp import LlamaCpp
from agent.engines.sglang import SgLang
from agent.engines.vllm import SHUTDOWN_S, Vllm
from agent.host import Host
from agent.protocol import Adapter, Fabric, Gpu, ShardSpec, StopShard
from routing import lora
from tests.agent.conftest import spec

CARDS = tuple(
    Gpu(uuid=f"GPU-{index}", index=index, name="NVIDIA H100", gpu_class="h100-80g", compute_capability="9.0")
    for index in range(4)
)
HOST = Host(
    address="10.0.0.7",
    architecture="x86_64",
    gpus=4,
    cards=CARDS,
    fabrics=(Fabric(name="ib0", adapters=("mlx5_0", "mlx5_1"), link_layer="InfiniBand"),),
    interface="eth0",
)
OTHER = replace(HOST, address="10.0.0.8")
LAUNCH = Launch(
    Build("named", "1", ("/opt/vllm/bin/vllm",)), "/m/big", port=21007, private="/w/r1.0.yaml", key="secret"
)
SGLANG = replace(LAUNCH, build=Build("named", "1", ("/opt/sglang/bin/python",)))
LEADER = replace(LAUNCH, rendezvous=21008)
ADAPTERS = (Adapter(name="law", source="/a/law"), Adapter(name="sql", source="org/sql"))


def shard(**changes: object) -> ShardSpec:
    told = {"engine": "vllm", "model": "big", "gpus": ("GPU-1", "GPU-3"), "tp": 2, "startup_timeout_s": 900}
    return spec("/m/big", **(told | changes))


def wide(rank: int, **changes: object) -> ShardSpec:
    """Rank of a replica over two nodes with two cards each."""
    told = {"rank": rank, "nodes": 2, "tp": 4, "fabric": "ib0", "rendezvous": "10.0.0.7:21008" if rank else ""}
    return shard(**(told | changes))


def line(command: Command) -> str:
    return " ".join(command.argv)


# --- vLLM ------------------------------------------------------------------------------------------------------------
def test_vllm_on_one_node_is_one_server() -> None:
    (command,) = Vllm().commands(shard(args=("--max-model-len", "4096"), env={"Z": "1"}), HOST, LAUNCH)
    assert line(command) == (
        "/opt/vllm/bin/vllm serve /m/big --served-model-name big --tensor-parallel-size 2 --pipeline-parallel-size 1"
        " --host 10.0.0.7 --port 21007 --shutdown-timeout 4 --enable-prompt-tokens-details --max-model-len 4096"
    )
    assert command.env == (
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("NCCL_IB_DISABLE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        ("VLLM_ENGINE_READY_TIMEOUT_S", "900"),
        ("Z", "1"),
        ("VLLM_HOST_IP", "10.0.0.7"),
        ("CUDA_VISIBLE_DEVICES", "1,3"),
    )
    assert command.secrets == (("VLLM_API_KEY", "secret"),)
    assert "secret" not in repr(command)
    assert (command.private, command.wait_for) == (None, None)


def test_vllm_without_a_key_has_none_and_a_profile_may_leave_the_details_out() -> None:
    one = shard(args=("--no-enable-prompt-tokens-details",))
    (command,) = Vllm().commands(one, HOST, replace(LAUNCH, key=None))
    assert command.secrets == ()
    assert line(command).endswith("--shutdown-timeout 4 --no-enable-prompt-tokens-details")


def test_the_leader_of_vllm_listens_for_headless_ranks_that_are_told_where() -> None:
    (leader,) = Vllm().commands(wide(0, args=("--dtype", "half")), HOST, LEADER)
    assert line(leader) == (
        "/opt/vllm/bin/vllm serve /m/big --served-model-name big --tensor-parallel-size 4 --pipeline-parallel-size 1"
        " --distributed-executor-backend mp --nnodes 2 --node-rank 0 --master-addr 10.0.0.7 --master-port 21008"
        " --host 10.0.0.7 --port 21007 --shutdown-timeout 4 --enable-prompt-tokens-details --dtype half"
    )
    (worker,) = Vllm().commands(wide(1, args=("--dtype", "half")), OTHER, LAUNCH)
    assert line(worker) == (
        "/opt/vllm/bin/vllm serve /m/big --served-model-name big --tensor-parallel-size 4 --pipeline-parallel-size 1"
        " --distributed-executor-backend mp --nnodes 2 --node-rank 1 --master-addr 10.0.0.7 --master-port 21008"
        " --headless --dtype half"
    )
    assert worker.secrets == ()
    assert dict(leader.env)["VLLM_HOST_IP"] == "10.0.0.7"
    assert dict(worker.env)["VLLM_HOST_IP"] == "10.0.0.8"
    for command in (leader, worker):
        told = dict(command.env)
        assert (told["NCCL_NET"], told["NCCL_IB_HCA"]) == ("IB", "=mlx5_0,mlx5_1")
        assert "NCCL_IB_DISABLE" not in told


def test_a_leader_with_an_ipv6_address_is_met_there() -> None:
    (worker,) = Vllm().commands(wide(1, rendezvous="[fd00::7]:21008"), OTHER, LAUNCH)
    assert worker.argv[worker.argv.index("--master-addr") + 1] == "fd00::7"
    assert worker.argv[worker.argv.index("--master-port") + 1] == "21008"


def test_over_ray_the_head_is_a_sidecar_of_the_server_which_waits_for_it() -> None:
    head, server = Vllm().commands(wide(0, launch_mode="ray"), HOST, LEADER)
    assert line(head) == (
        "/opt/vllm/bin/ray start --head --port 21008 --include-dashboard=false"
        " --node-ip-address 10.0.0.7 --num-gpus 2 --disable-usage-stats --block"
    )
    assert (head.wait_for, head.secrets) == (None, ())
    assert line(server) == (
        "/opt/vllm/bin/vllm serve /m/big --served-model-name big --tensor-parallel-size 4 --pipeline-parallel-size 1"
        " --distributed-executor-backend ray"
        " --host 10.0.0.7 --port 21007 --shutdown-timeout 4 --enable-prompt-tokens-details"
    )
    assert server.wait_for == ("10.0.0.7", 21008)
    assert server.secrets == (("VLLM_API_KEY", "secret"),)
    assert dict(server.env)["RAY_ADDRESS"] == "10.0.0.7:21008"


def test_a_worker_over_ray_only_joins_and_waits_for_the_head() -> None:
    (worker,) = Vllm().commands(wide(1, launch_mode="ray"), OTHER, LAUNCH)
    assert line(worker) == (
        "/opt/vllm/bin/ray start --address 10.0.0.7:21008"
        " --node-ip-address 10.0.0.8 --num-gpus 2 --disable-usage-stats --block"
    )
    assert worker.wait_for == ("10.0.0.7", 21008)
    assert 0 < worker.wait_s <= 600
    assert dict(worker.env)["VLLM_HOST_IP"] == "10.0.0.8"
    assert dict(worker.env)["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert worker.secrets == ()


def test_vllm_ends_in_order_before_the_agent_kills() -> None:
    assert StopShard(replica="r").grace_s / 2 >= SHUTDOWN_S


# --- SGLang ----------------------------------------------------------------------------------------------------------
def test_sglang_on_one_node_has_its_key_in_a_file_of_its_own() -> None:
    (command,) = SgLang().commands(shard(engine="sglang", args=("--context-length", "4096")), HOST, SGLANG)
    assert line(command) == (
        "/opt/sglang/bin/python -m sglang.launch_server --model-path /m/big --served-model-name big"
        " --host 10.0.0.7 --port 21007 --tp-size 2 --pp-size 1 --config /w/r1.0.yaml --enable-metrics"
        " --context-length 4096"
    )
    assert command.private == ("/w/r1.0.yaml", '{"api-key": "secret"}\n')
    assert command.secrets == ()
    assert "secret" not in repr(command)
    told = dict(command.env)
    assert told["SGLANG_HOST_IP"] == "10.0.0.7"
    assert told["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert told["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_sglang_without_a_key_has_no_file_and_metrics_are_asked_for_once() -> None:
    (command,) = SgLang().commands(shard(engine="sglang", args=("--enable-metrics",)), HOST, replace(SGLANG, key=None))
    assert line(command).endswith("--pp-size 1 --enable-metrics")
    assert command.private is None


def test_all_ranks_of_sglang_run_the_same_command_with_their_own_number() -> None:
    sent = [
        line(SgLang().commands(wide(rank, engine="sglang", pp=2, tp=2), host, replace(SGLANG, rendezvous=port))[0])
        for rank, host, port in ((0, HOST, 21008), (1, OTHER, None))
    ]
    assert sent == [
        "/opt/sglang/bin/python -m sglang.launch_server --model-path /m/big --served-model-name big"
        f" --host {own} --port 21007 --tp-size 2 --pp-size 2 --nnodes 2 --node-rank {rank}"
        " --dist-init-addr 10.0.0.7:21008 --config /w/r1.0.yaml --enable-metrics"
        for rank, own in ((0, "10.0.0.7"), (1, "10.0.0.8"))
    ]


# --- adapters --------------------------------------------------------------------------------------------------------
def arguments(command: Command, flag: str, count: int = 1) -> list[str]:
    at = command.argv.index(flag)
    return list(command.argv[at + 1 : at + 1 + count])


def test_vllm_registers_adapters_at_its_start_under_the_names_that_gateways_use() -> None:
    told = replace(LAUNCH, adapters=("/a/law", "org/sql"), adapter_rank=24)
    (command,) = Vllm().commands(shard(adapters=ADAPTERS), HOST, told)
    assert "--enable-lora --max-loras 2 --max-cpu-loras 2 --max-lora-rank 32" in line(command)
    sent = [json.loads(each) for each in arguments(command, "--lora-modules", 2)]
    names = [lora.adapter(each.name, each.source).engine_name for each in ADAPTERS]
    assert sent == [{"name": names[0], "path": "/a/law"}, {"name": names[1], "path": "org/sql"}]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in dict(command.env)


def test_vllm_that_loads_adapters_as_it_runs_starts_without_any() -> None:
    one = shard(adapters=ADAPTERS, max_loaded_adapters=20)
    (command,) = Vllm().commands(one, HOST, replace(LAUNCH, adapter_rank=16))
    assert "--enable-lora --max-loras 8 --max-cpu-loras 20 --max-lora-rank 16 --host" in line(command)
    assert "--lora-modules" not in command.argv
    assert dict(command.env)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


@pytest.mark.parametrize(("rank", "flag"), [(None, []), (9999, []), (1, ["1"]), (64, ["64"]), (65, ["128"])])
def test_the_rank_of_adapters_is_the_next_that_vllm_has(rank: int | None, flag: list[str]) -> None:
    (command,) = Vllm().commands(shard(max_loaded_adapters=1), HOST, replace(LAUNCH, adapter_rank=rank))
    assert ("--max-lora-rank" in command.argv) is bool(flag)
    assert not flag or arguments(command, "--max-lora-rank") == flag


def test_what_a_profile_says_of_adapters_stands() -> None:
    args = ("--max-loras", "3", "--max-lora-rank=256")
    (command,) = Vllm().commands(shard(max_loaded_adapters=4, args=args), HOST, replace(LAUNCH, adapter_rank=8))
    assert line(command).count("--max-lora") == 2
    assert "--max-cpu-loras" not in command.argv
    args = ("--max-loaded-loras", "9", "--max-lora-rank=256")
    (command,) = SgLang().commands(shard(engine="sglang", max_loaded_adapters=4, args=args), HOST, SGLANG)
    assert line(command).count("--max-loaded-loras") == line(command).count("--max-lora-rank") == 1


def test_sglang_takes_adapters_at_its_start_or_as_it_runs() -> None:
    told = replace(SGLANG, adapters=("/a/law", "org/sql"))
    (command,) = SgLang().commands(shard(engine="sglang", adapters=ADAPTERS), HOST, told)
    names = [lora.adapter(each.name, each.source).engine_name for each in ADAPTERS]
    sent = [json.loads(each) for each in arguments(command, "--lora-paths", 2)]
    assert sent == [
        {"lora_name": names[0], "lora_path": "/a/law"},
        {"lora_name": names[1], "lora_path": "org/sql"},
    ]
    assert "--max-loras-per-batch 2 --max-loaded-loras 2" in line(command)
    (command,) = SgLang().commands(shard(engine="sglang", adapters=ADAPTERS, max_loaded_adapters=20), HOST, SGLANG)
    assert (
        "--enable-lora --max-loras-per-batch 8 --max-loaded-loras 20 --max-lora-rank 64 --lora-target-modules all"
        in line(command)
    )
    assert "--lora-paths" not in command.argv


# --- what all have in common -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("version", "visible"),
    [
        ("0.33.0", "GPU-1,GPU-3"),
        ("0.24.0+cu129", "GPU-1,GPU-3"),
        ("1.0", "GPU-1,GPU-3"),
        ("0.22.0", "1,3"),
        ("0.19.1", "1,3"),
        ("unknown", "1,3"),
    ],
)
def test_vllm_is_given_uuids_from_the_version_on_that_takes_them(version: str, visible: str) -> None:
    launch = replace(LAUNCH, build=replace(LAUNCH.build, version=version))
    (command,) = Vllm().commands(shard(), HOST, launch)
    assert dict(command.env)["CUDA_VISIBLE_DEVICES"] == visible
    over_ray = Vllm().commands(wide(0, launch_mode="ray"), HOST, replace(launch, rendezvous=21008))
    assert [dict(each.env)["CUDA_VISIBLE_DEVICES"] for each in over_ray] == ["1,3", "1,3"]


def test_llamacpp_sees_its_own_cards_by_uuid_and_on_cpus_none() -> None:
    (command,) = LlamaCpp().commands(shard(engine="llamacpp", tp=1, gpus=("GPU-2",)), HOST, LAUNCH)
    assert command.env == (("CUDA_VISIBLE_DEVICES", "GPU-2"),)
    (command,) = LlamaCpp().commands(
        shard(engine="llamacpp", tp=1, gpus=(), env={"CUDA_VISIBLE_DEVICES": "0"}), HOST, LAUNCH
    )
    assert dict(command.env)["CUDA_VISIBLE_DEVICES"] == ""


def test_where_the_driver_may_count_otherwise_than_we_a_card_goes_by_its_uuid() -> None:
    gone = Gpu(uuid="lost-0", index=4, name="lost", gpu_class="lost", healthy=False, fault=f"{LOST}; reset it")
    worn = Gpu(uuid="GPU-9", index=4, name="NVIDIA H100", gpu_class="h100-80g", healthy=False, fault="3 ECC errors")
    visible = {
        card.uuid: dict(ranks.cards(shard(), replace(HOST, cards=(*CARDS, card))))["CUDA_VISIBLE_DEVICES"]
        for card in (gone, worn)
    }
    assert visible == {"lost-0": "GPU-1,GPU-3", "GPU-9": "1,3"}


def test_cards_are_named_by_number_and_slices_by_uuid() -> None:
    assert ranks.cards(shard(), HOST) == (("CUDA_VISIBLE_DEVICES", "1,3"),)
    sliced = Gpu(uuid="MIG-1", index=9, name="NVIDIA A100", gpu_class="a100-mig-3g-20g", slice_of="GPU-0")
    host = replace(HOST, cards=(*CARDS, sliced))
    assert ranks.cards(shard(gpus=("MIG-1",)), host) == (("CUDA_VISIBLE_DEVICES", "MIG-1"),)
    assert ranks.cards(shard(gpus=("GPU-1", "GPU-gone")), HOST) == (("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-gone"),)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[fd00::7]:65535", ("fd00::7", 65535)),
        ("gpu-1:29500", ("gpu-1", 29500)),
        ("", None),
        ("10.0.0.7", None),
        (":80", None),
        ("10.0.0.7:0", None),
        ("10.0.0.7:65536", None),
        ("10.0.0.7:x", None),
    ],
)
def test_a_meeting_place_is_host_and_port(address: str, found: tuple[str, int] | None) -> None:
    assert ranks.split(address) == found
    assert found is None or ranks.joined(*found) == address


def test_a_rank_that_was_told_nothing_has_no_leader() -> None:
    assert ranks.leader(wide(1, rendezvous=""), OTHER, LAUNCH) == ("", 0)
    assert ranks.leader(wide(0), HOST, LAUNCH) == ("10.0.0.7", 0)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_only_rank_0_serves_http(engine: str) -> None:
    assert [ENGINES[engine].serves_http(rank) for rank in range(3)] == [True, False, False]


def test_only_a_bare_id_is_a_repository() -> None:
    assert all(map(is_repository, ("org/model", "gpt2", "Org-1/Model_2.5-x")))
    assert not any(map(is_repository, ("/m/big", "./m", "https://x/y", "a/b/c", "pypi://a==1/b", "", "a/")))
    assert not LlamaCpp.repositories
