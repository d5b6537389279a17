"""Network adapters out of a made-up /sys, declared fabrics against them, and what is cut to fit a message."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from agent import protocol
from agent.bounds import within_bounds
from agent.config import AgentSettings, ConfigError, load
from agent.discovery.infiniband import read_adapters
from agent.fabrics import advertise
from agent.protocol import AdapterPort, Gid, RdmaAdapter
from tests import hardware
from tests.factories import GIB

ZEROS = "0000:0000:0000:0000:0000:0000:0000:0000"
IB_GID = "fe80:0000:0000:0000:9803:9b03:00a1:b2c3"
ROCE_GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    return tmp_path


def adapter(
    root: Path, name: str, *ports: dict[str, str | dict[str, str]], node_type: str = "1: CA", numa: str = "1"
) -> None:
    home = root / "sys/class/infiniband" / name
    (home / "ports").mkdir(parents=True)
    (home / "device").mkdir()
    (home / "device/numa_node").write_text(numa + "\n")
    (home / "node_type").write_text(node_type + "\n")
    for number, port in enumerate(ports, start=1):
        for key, value in port.items():
            path = home / "ports" / str(number) / key
            path.parent.mkdir(parents=True, exist_ok=True)
            if value == "EINVAL":
                path.mkdir()  # reads as an error, as `rate` does without a transceiver
            else:
                path.write_text(f"{value}\n")


def port(
    state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand", **gids: str
) -> dict[str, str]:
    rows = {f"gids/{index.removeprefix('g')}": gid for index, gid in gids.items()}
    return {"state": state, "rate": rate, "link_layer": layer, "sm_lid": "0x1", **rows}


def read(root: Path) -> dict[str, RdmaAdapter]:
    return {adapter.name: adapter for adapter in read_adapters(root)}


def test_no_infiniband_is_no_error(tmp_path: Path) -> None:
    assert read_adapters(tmp_path) == ()


def test_an_adapter_is_told_with_its_ports_and_who_manages_them(sys_root: Path) -> None:
    adapter(sys_root, "mlx5_0", port(g0=IB_GID, g1=ZEROS))
    assert read(sys_root)["mlx5_0"] == RdmaAdapter(
        name="mlx5_0",
        numa=1,
        ports=(
            AdapterPort(
                number=1, state="ACTIVE", rate_gbit_s=400.0, link_layer="InfiniBand",
                subnet_prefix="fe80:0000:0000:0000", sm_lid=1, gids=(Gid(index=0, gid=IB_GID),),
            ),
        ),
    )  # fmt: skip


def test_roce_is_told_from_infiniband_with_its_network_and_kinds_of_addresses(sys_root: Path) -> None:
    rows = {"gid_attrs/types/3": "RoCE v2", "gid_attrs/ndevs/3": "ens1f0np0", "gid_attrs/types/5": "EINVAL"}
    adapter(sys_root, "mlx5_bond_0", {**port(layer="Ethernet", g3=ROCE_GID, g5=ZEROS), **rows})
    [found] = read(sys_root)["mlx5_bond_0"].ports
    assert (found.link_layer, found.network) == ("Ethernet", "ens1f0np0")
    assert found.gids == (Gid(index=3, gid=ROCE_GID, kind="RoCE v2"),)
    assert found.subnet_prefix == ""


def test_the_network_of_a_roce_port_is_the_one_that_its_interface_reaches_without_a_gateway(sys_root: Path) -> None:
    routes = sys_root / "proc/net/route"
    routes.parent.mkdir(parents=True)
    shown = {
        "eno1": ("0000000A", "00000000", "00FFFFFF"),
        "bond0": ("00000000", "0100000A", "00000000"),  # by way of a gateway
        "ens1": ("00000000", "00000000", "00000000"),  # everywhere
        "ens1f0np0": ("0000000A", "00000000", "0000FFFF"),
        "odd": ("zz", "00000000", "00FFFFFF"),
    }
    lines = [f"{name}\t{there}\t{way}\t0001\t0\t0\t0\t{mask}\t0\t0\t0" for name, (there, way, mask) in shown.items()]
    routes.write_text("Iface\tDestination\tGateway\tFlags\n" + "\n".join([*lines, "cut short"]))

    def seen(name: str, interface: str, **gids: str) -> AdapterPort:
        named = {f"gid_attrs/ndevs/{index.removeprefix('g')}": interface for index in gids}
        adapter(sys_root, name, {**port(layer="Ethernet", **gids), **named})
        return read(sys_root)[name].ports[0]

    both = seen("mlx5_0", "ens1f0np0", g0=IB_GID, g3=ROCE_GID)
    assert (both.network, both.subnet_prefix) == ("ens1f0np0", "10.0.0.0/16")
    assert seen("mlx5_1", "bond0", g3=ROCE_GID).subnet_prefix == ""
    assert seen("mlx5_2", "ens1f0np0", g0=IB_GID).subnet_prefix == ""
    assert seen("mlx5_3", "ens1f0np0", g0="not an address").subnet_prefix == ""
    assert seen("mlx5_4", "ens1", g3=ROCE_GID).subnet_prefix == ""
    routes.unlink()
    assert read(sys_root)["mlx5_0"].ports[0].subnet_prefix == ""


@pytest.mark.parametrize(
    ("text", "rate"),
    [("2.5 Gb/sec (1X SDR)", 2.5), ("100 Gb/sec (4X EDR)", 100.0), ("10 Gb/sec (4X)", 10.0), ("N/A (no PMA)", None)],
)
def test_rates_are_numbers_or_unknown(sys_root: Path, text: str, rate: float | None) -> None:
    adapter(sys_root, "mlx5_0", port(rate=text))
    [found] = read(sys_root)["mlx5_0"].ports
    assert found.rate_gbit_s == rate
    assert (found.fault == "") == (rate is not None)


def test_each_broken_adapter_says_what_is_wrong_and_hides_no_other(sys_root: Path) -> None:
    adapter(sys_root, "mlx5_10", port())
    adapter(sys_root, "mlx5_1", port(rate="EINVAL"))
    adapter(sys_root, "mlx5_2", port(state="1: DOWN", rate="10 Gb/sec (4X)"), port())
    adapter(sys_root, "hfi1_0", port(state="SwLinkUp,32"))
    adapter(sys_root, "irdma0", port(layer="Ethernet"), node_type="4: RNIC", numa="-1")
    adapter(sys_root, "none_0", numa="odd")
    os.symlink(sys_root / "gone", sys_root / "sys/class/infiniband/mlx5_9")
    found = read(sys_root)
    assert list(found) == ["hfi1_0", "irdma0", "mlx5_1", "mlx5_2", "mlx5_9", "mlx5_10", "none_0"]
    assert found["mlx5_1"].ports[0].fault == "rate: Is a directory"
    assert found["mlx5_1"].ports[0].state == "ACTIVE"
    assert [each.state for each in found["mlx5_2"].ports] == ["DOWN", "ACTIVE"]
    assert found["hfi1_0"].ports[0].fault == "state: 'SwLinkUp,32' is not understood"
    assert found["irdma0"].fault == "it speaks iWARP, over which engines do not talk"
    assert (found["irdma0"].numa, found["none_0"].numa) == (None, None)
    assert found["mlx5_9"].fault == "its ports cannot be read: No such file or directory"
    assert found["none_0"].fault == "it has no ports"


# --- declared fabrics ------------------------------------------------------------------------------------------------
def active(name: str, rate: float | None = 400.0, layer: str = "InfiniBand", state: str = "ACTIVE") -> RdmaAdapter:
    return RdmaAdapter(name=name, ports=(AdapterPort(number=1, state=state, rate_gbit_s=rate, link_layer=layer),))


FOUND = (
    active("mlx5_0"),
    active("mlx5_1", 100.0),
    active("mlx5_2", state="DOWN"),
    active("mlx5_3", layer="Ethernet"),
    active("mlx5_4", None),
    RdmaAdapter(name="mlx5_5", fault="it has no ports"),
    msgspec.structs.replace(active("mlx5_6"), ports=(AdapterPort(number=2, fault="state: Input/output error"),)),
)


@pytest.mark.parametrize(
    ("names", "reason", "rate", "layer"),
    [
        (["mlx5_0"], "", 400.0, "InfiniBand"),
        (["mlx5_0", "mlx5_1"], "", 100.0, "InfiniBand"),
        (["mlx5_0", "mlx5_4"], "", None, "InfiniBand"),
        (["mlx5_0", "mlx5_2"], "adapter mlx5_2 has no ACTIVE port: port 1 is DOWN", 400.0, "InfiniBand"),
        (["mlx5_5"], "adapter mlx5_5: it has no ports", None, ""),
        (
            ["mlx5_6"],
            "adapter mlx5_6 has no ACTIVE port: port 2 is unknown (state: Input/output error)",
            None,
            "",
        ),
        (
            ["mlx5_9"],
            "adapter mlx5_9 is not there (there are: mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6)",
            None,
            "",
        ),
        (
            ["mlx5_0", "mlx5_3"],
            "its adapters are of several kinds (mlx5_0 InfiniBand, mlx5_3 Ethernet); declare a fabric for each kind",
            400.0,
            "",
        ),
    ],
)
def test_a_fabric_is_up_when_all_its_adapters_are(
    names: list[str], reason: str, rate: float | None, layer: str
) -> None:
    [fabric] = advertise({"ib0": names}, FOUND)
    assert (fabric.up, fabric.reason, fabric.rate_gbit_s, fabric.link_layer) == (not reason, reason, rate, layer)


def test_fabrics_are_down_while_adapters_cannot_be_read() -> None:
    [fabric] = advertise({"ib0": ["mlx5_0"]}, (), "the network adapters have not answered for more than 90 s")
    assert fabric.reason == "its adapters cannot be read: the network adapters have not answered for more than 90 s"
    assert [each.name for each in advertise({"b": ["x"], "a": ["y"]}, ())] == ["a", "b"]


# --- settings --------------------------------------------------------------------------------------------------------
def settings(tmp_path: Path, text: str) -> AgentSettings:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    return load(path)


def test_fabrics_and_labels_are_declared_in_the_settings(tmp_path: Path) -> None:
    found = settings(tmp_path, "labels: {zone: a, llmgw.io/rack: '7'}\nfabrics: {ib0: [mlx5_0, mlx5_1]}\n")
    assert found.fabrics == {"ib0": ["mlx5_0", "mlx5_1"]}
    assert found.labels == {"zone": "a", "llmgw.io/rack": "7"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("fabrics: {ib0: []}", "fabric ib0 names no adapter"),
        ("fabrics: {ib0: [mlx5_0], ib1: [mlx5_0]}", "adapter mlx5_0 is in ib0 and in ib1"),
        ("fabrics: {'a b': [mlx5_0]}", "'a b' is not a fabric's name"),
        ("labels: {'a b': c}", "'a b' is not a label's name"),
        ('labels: {a: "x\\ny"}', "the value of a is not one line"),
        ("labels: {" + ", ".join(f"l{i}: a" for i in range(65)) + "}", "there are 65; 64 is the most"),
        ("fabrics: {" + ", ".join(f"f{i}: [a{i}]" for i in range(17)) + "}", "there are 17; 16 is the most"),
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, text)
    assert fault in str(error.value)


# --- bounds ----------------------------------------------------------------------------------------------------------
def test_an_inventory_within_bounds_is_told_as_it_is() -> None:
    assert within_bounds(hardware.INVENTORY) == hardware.INVENTORY


def test_the_largest_inventory_there_can_be_fits_a_message_and_says_what_was_cut() -> None:
    uuids = tuple(f"GPU-{i:032d}" for i in range(200))
    long = "ü" * 5000
    gpu = msgspec.structs.replace(hardware.GPU, peers=uuids[:16], name=long, fault=long)
    gids = tuple(Gid(index=i, gid=ROCE_GID, kind="RoCE v2") for i in range(300))
    ports = tuple(
        msgspec.structs.replace(hardware.ADAPTER.ports[0], number=i, gids=gids, fault=long) for i in range(20)
    )
    files = tuple(protocol.File(path="/" + "m" * 900 + str(i), size_bytes=GIB) for i in range(5000))
    told = msgspec.structs.replace(
        hardware.INVENTORY,
        gpus=tuple(msgspec.structs.replace(gpu, uuid=uuid) for uuid in uuids),
        gpus_fault=long,
        adapters=tuple(
            msgspec.structs.replace(hardware.ADAPTER, name=f"a{i}", ports=ports, fault=long) for i in range(99)
        ),
        fabrics=tuple(msgspec.structs.replace(hardware.FABRIC, name=f"f{i}", reason=long) for i in range(99)),
        files=(*files, protocol.File(path="/" + "m" * 2000, size_bytes=1)),
    )
    cut = within_bounds(told)
    assert cut.cut == ("adapters", "fabrics", "files", "gpus")
    assert (len(cut.gpus), len(cut.adapters), len(cut.fabrics)) == (128, 64, 16)
    assert len(cut.gpus[0].fault) == protocol.MAX_TEXT
    assert cut.gpus[0].fault.endswith("…")
    assert len(protocol.encode(cut)) < protocol.MAX_MESSAGE_BYTES
    only_long = msgspec.structs.replace(hardware.INVENTORY, files=told.files[-1:], cut=())
    assert within_bounds(only_long).cut == ("files",)
