"""What NCCL and Gloo are told about the network between ranks (AG-13), and which interface that is."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_interface

import msgspec
import pytest

from agent import interfaces
from agent.engines import nccl
from agent.host import Host
from agent.interfaces import Held
from agent.protocol import AdapterPort, Fabric, Gid, RdmaAdapter

ROCE = Fabric(name="roce", adapters=("mlx5_0", "mlx5_1"), link_layer="Ethernet")
BAND = Fabric(name="ib0", adapters=("mlx5_4",), link_layer="InfiniBand")
GIDS = (
    Gid(index=0, gid="fe80:0000:0000:0000:0e42:a1ff:fe00:0001", kind="IB/RoCE v1"),
    Gid(index=1, gid="fe80:0000:0000:0000:0e42:a1ff:fe00:0001", kind="RoCE v2"),
    Gid(index=2, gid="0000:0000:0000:0000:0000:ffff:0a00:0001", kind="IB/RoCE v1"),
    Gid(index=3, gid="0000:0000:0000:0000:0000:ffff:0a00:0001", kind="RoCE v2"),
)


def adapter(name: str, *gids: Gid, state: str = "ACTIVE") -> RdmaAdapter:
    return RdmaAdapter(name=name, ports=(AdapterPort(number=1, state=state, link_layer="Ethernet", gids=gids),))


def told(host: Host, fabric: str) -> dict[str, str]:
    return dict(nccl.environment(fabric, host))


HOST = Host(
    "10.0.0.7",
    "x86_64",
    interface="ens1f0",
    fabrics=(ROCE, BAND),
    adapters=(adapter("mlx5_0", *GIDS), adapter("mlx5_1", *GIDS), adapter("mlx5_4", *GIDS), adapter("mlx5_9")),
)


def test_infiniband_gets_exactly_its_adapters_and_no_row_of_gids() -> None:
    assert told(HOST, "ib0") == {
        "NCCL_SOCKET_IFNAME": "=ens1f0",
        "GLOO_SOCKET_IFNAME": "ens1f0",
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "=mlx5_4",
    }


def test_roce_gets_the_row_of_its_version_2_entry_with_an_ipv4_address() -> None:
    assert told(HOST, "roce") == {
        "NCCL_SOCKET_IFNAME": "=ens1f0",
        "GLOO_SOCKET_IFNAME": "ens1f0",
        "NCCL_NET": "IB",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "NCCL_IB_GID_INDEX": "3",
    }


def test_without_a_fabric_adapters_are_left_alone() -> None:
    assert told(HOST, "")["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_NET" not in told(HOST, "")
    assert told(replace(HOST, interface=""), "") == {"NCCL_IB_DISABLE": "1"}


@pytest.mark.parametrize(
    "second",
    [
        adapter("mlx5_1", *GIDS[:2], msgspec.structs.replace(GIDS[3], index=5)),
        adapter("mlx5_1", *GIDS[:3]),
        adapter("mlx5_1", Gid(index=3, gid="nonsense", kind="RoCE v2")),
    ],
)
def test_ports_that_differ_are_left_for_nccl_to_look_at_each(second: RdmaAdapter) -> None:
    host = replace(HOST, adapters=(HOST.adapters[0], second))
    assert "NCCL_IB_GID_INDEX" not in told(host, "roce")


def test_only_ports_that_are_up_count() -> None:
    host = replace(HOST, adapters=(HOST.adapters[0], adapter("mlx5_1", state="DOWN")))
    assert told(host, "roce")["NCCL_IB_GID_INDEX"] == "3"
    assert "NCCL_IB_GID_INDEX" not in told(replace(HOST, adapters=()), "roce")


# --- the interface ---------------------------------------------------------------------------------------------------
HELD = [
    Held("lo", ip_interface("127.0.0.1/8")),
    Held("eth0", ip_interface("10.0.0.7/24")),
    Held("eth1", ip_interface("10.0.0.9/16")),
    Held("eth1", ip_interface("fd00::9/64")),
]


@pytest.mark.parametrize(
    ("address", "found"),
    [("10.0.0.7", "eth0"), ("10.0.0.9", "eth1"), ("fd00::9", "eth1"), ("127.0.0.3", "lo"), ("10.0.0.8", "")],
)
def test_an_address_belongs_to_the_interface_that_holds_it(address: str, found: str) -> None:
    assert interfaces.find(ip_address(address), HELD) == found


def test_this_machines_loopback_is_found_and_what_is_no_address_is_not() -> None:
    assert interfaces.holding("127.0.0.1") == interfaces.holding("127.0.0.2") == "lo"
    assert interfaces.holding("somewhere.example") == interfaces.holding("192.0.2.255") == ""


def test_a_kernel_that_does_not_say_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses() -> list[Held]:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(interfaces, "all_held", refuses)
    assert interfaces.holding("127.0.0.1") == ""
    assert "cannot be listed" in caplog.text
