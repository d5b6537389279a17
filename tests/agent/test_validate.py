"""What is refused before anything is fetched or launched, and what the refusal says (AG-14)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from agent import launching, validate
from agent.host import Host
from agent.protocol import Fabric, Gpu, ShardSpec
from tests.agent.conftest import spec

H100 = Gpu(uuid="GPU-0", index=0, name="NVIDIA H100", gpu_class="h100-80g", compute_capability="9.0")
A100 = Gpu(uuid="GPU-2", index=2, name="NVIDIA A100", gpu_class="a100-80g", compute_capability="8.0")
HOST = Host(
    address="10.0.0.7",
    architecture="x86_64",
    gpus=3,
    cards=(H100, msgspec.structs.replace(H100, uuid="GPU-1", index=1), A100),
    fabrics=(Fabric(name="ib0", adapters=("mlx5_0",)), Fabric(name="ib1", up=False, reason="mlx5_1 is not there")),
    interface="eth0",
)
GOOD = spec("/m/big", engine="vllm", gpus=("GPU-0", "GPU-1"), tp=4, nodes=2, fabric="ib0")


def refusal(host: Host = HOST, **changes: object) -> str | None:
    return validate.refusal(msgspec.structs.replace(GOOD, **changes), host, has_binary=True)


def test_what_fits_is_not_refused() -> None:
    assert refusal() is None
    assert refusal(rank=1, rendezvous="10.0.0.9:21000", launch_mode="ray") is None
    assert refusal(engine="sglang", tp=2, pp=2) is None
    assert refusal(source="org/model") is None
    assert refusal(fabric="") is None
    assert refusal(nodes=1, tp=2, fabric="", launch_mode="ray", host=replace(HOST, interface="")) is None
    assert refusal(args=("--quantization", "fp8", "--kv-cache-dtype=fp8")) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": "exllama"}, "engine: 'exllama' is not one that this agent runs. It knows llamacpp, sglang, vllm."),
        ({"pp": 0}, "pp: 0 is not at least 1."),
        ({"rank": 2}, "rank: 2 is not one of the replica's 2 shards."),
        ({"source": "some where"}, "source: source 'some where' is not one that a node can fetch"),
        ({"args": ("--tensor_parallel_size=8",)}, "args: --tensor-parallel-size is set by llmgw itself"),
        ({"args": ("-tp", "8")}, "args: -tp is set by llmgw itself"),
        ({"args": ("--api-key", "x")}, "args: --api-key is set by llmgw itself"),
        ({"engine": "sglang", "args": ("--config", "x")}, "args: --config is set by llmgw itself"),
        ({"tp": 8}, "gpus: 2 on each of 2 nodes are 4, and tp x pp is 8."),
        ({"gpus": ()}, "gpus: 0 on each of 2 nodes are 0, and tp x pp is 4."),
        ({"gpus": ("GPU-0",) * 4}, "gpus: 4 asked for, and this node has 3."),
        ({"gpus": ("GPU-0", "GPU-9")}, "gpus: GPU-9 is not on this node."),
        ({"gpus": ("GPU-0", "GPU-2")}, "gpus: NVIDIA A100 and NVIDIA H100 are mixed"),
        ({"launch_mode": "slurm"}, "launch_mode: vllm knows mp and ray, not 'slurm'."),
        ({"engine": "sglang", "launch_mode": "ray"}, "launch_mode: sglang knows mp, not 'ray'."),
        ({"rank": 1}, "rendezvous: '' is no address where the leader awaits rank 1."),
        ({"fabric": "ib7"}, "fabric: ib7 is not declared on this node."),
        ({"fabric": "ib1"}, "fabric: ib1 is not up on this node: mlx5_1 is not there."),
    ],
)
def test_a_refusal_names_the_field_and_says_why(changes: dict[str, object], says: str) -> None:
    assert str(refusal(**changes)).startswith(says)


def test_ranks_on_several_nodes_need_an_address_that_is_on_an_interface() -> None:
    says = "address: no network interface of this node holds 10.0.0.7. Correct `address` in agent.yaml."
    assert refusal(host=replace(HOST, interface="")) == says


@pytest.mark.parametrize(
    "args", [("--quantization", "fp8"), ("-q", "fp8"), ("--kv-cache-dtype=fp8_e5m2",), ("--quantization", "w8a8_fp8")]
)
def test_fp8_is_refused_below_compute_capability_8_9(args: tuple[str, ...]) -> None:
    old = {"gpus": ("GPU-2",), "tp": 1, "nodes": 1, "fabric": ""}
    assert refusal(**old, args=("--quantization", "awq")) is None
    assert str(refusal(**old, args=args)).startswith("args: fp8 needs cards of compute capability 8.9 or more, and ")
    unknown = msgspec.structs.replace(A100, compute_capability="")
    assert refusal(host=replace(HOST, cards=(unknown,)), **old, args=args) is None


@pytest.mark.parametrize(("engine", "key"), [("vllm", "vllm.binary"), ("sglang", "sglang.python")])
def test_an_engine_that_nobody_installed_is_refused_with_what_to_do(engine: str, key: str) -> None:
    one: ShardSpec = msgspec.structs.replace(GOOD, engine=engine)
    says = f"engine: llmgw installs no {engine} yet; install it on the node and name it in agent.yaml as {key}."
    assert validate.refusal(one, HOST) == says


# --- weights ---------------------------------------------------------------------------------------------------------
def model(tmp_path: Path, config: str) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    if config:
        (folder / "config.json").write_text(config)
    return folder


FP8 = '{"quantization_config": {"quant_method": "fp8"}}'


@pytest.mark.parametrize(
    ("config", "cards", "says"),
    [
        ('{"architectures": ["X"]}', (A100,), ""),
        ('{"quantization_config": {"quant_method": "awq"}}', (A100,), ""),
        (FP8, (H100,), ""),
        (FP8, (A100,), "source: fp8 needs cards of compute capability 8.9 or more, and NVIDIA A100 has 8.0."),
        ("", (), "holds no config.json that can be read"),
        ("[1]", (), "holds no config.json that can be read"),
        ("{", (), "holds no config.json that can be read"),
        ("[" * 100_000, (), "holds no config.json that can be read"),
    ],
)
def test_a_directory_of_weights_is_looked_at(tmp_path: Path, config: str, cards: tuple[Gpu, ...], says: str) -> None:
    found = launching.look_at_weights("vllm", model(tmp_path, config), cards)
    assert says in found if found else not says


def test_a_single_file_for_engines_on_cards_is_gguf(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF1234")
    assert launching.look_at_weights("sglang", path) is None
    path.write_bytes(b"PK")
    assert "is one file and not in GGUF format" in str(launching.look_at_weights("sglang", path))
