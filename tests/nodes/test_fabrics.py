"""The map of all nodes' fabrics: what it shows, and where a name and what stands behind it do not agree (ND-21)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.fabrics import advertise
from agent.protocol import AdapterPort, Fabric, Gid, RdmaAdapter
from nodes.fabrics import FabricMap, Links, NamedFabric, Told, fabric_map, network_of, reports

DEFAULT = "fe80:0000:0000:0000"


def infiniband(number: int = 1, manager: int | None = 1, prefix: str = DEFAULT, state: str = "ACTIVE") -> AdapterPort:
    return AdapterPort(
        number=number, state=state, rate_gbit_s=400.0, link_layer="InfiniBand", subnet_prefix=prefix, sm_lid=manager
    )


def roce(prefix: str, number: int = 1, state: str = "ACTIVE") -> AdapterPort:
    return AdapterPort(
        number=number, state=state, rate_gbit_s=100.0, link_layer="Ethernet", subnet_prefix=prefix, network="ens1"
    )


def node(name: str, declared: dict[str, list[str]], state: str = "ready", **ports: AdapterPort) -> Told:
    adapters = tuple(RdmaAdapter(name=adapter, ports=(port,)) for adapter, port in ports.items())
    return Told(name, state, advertise(declared, adapters), adapters)


def named(found: FabricMap, name: str = "ib0") -> NamedFabric:
    [line] = [line for line in found.fabrics if line.name == name]
    return line


def test_a_name_over_two_subnet_managers_is_marked_with_who_is_on_which() -> None:
    found = named(
        fabric_map(
            [
                node("a", {"ib0": ["m0"]}, m0=infiniband(manager=1)),
                node("b", {"ib0": ["m0"]}, m0=infiniband(manager=1)),
                node("c", {"ib0": ["m0"]}, m0=infiniband(manager=7)),
            ]
        )
    )
    assert found.marks == (
        f"One name over 2 subnet managers (subnet manager 1 of {DEFAULT} on a, b; subnet manager 7 of {DEFAULT} on c):"
        " give each network a name of its own.",
    )
    assert (found.nodes, found.up, found.kinds, found.rate_gbit_s, found.slowest) == (3, 3, ("InfiniBand",), 400.0, "")
    assert found.networks == (f"subnet manager 1 of {DEFAULT} on a, b", f"subnet manager 7 of {DEFAULT} on c")


def test_two_names_under_one_manager_are_marked_on_both_and_equal_reports_are_called_no_proof() -> None:
    found = fabric_map(
        [node("a", {"ib0": ["m0"]}, m0=infiniband()), node("b", {"ib1": ["m0"]}, m0=infiniband())],
    )
    for name, other in (("ib0", "ib1"), ("ib1", "ib0")):
        [mark] = named(found, name).marks
        assert mark.startswith(f"{other} reports the same (subnet manager 1 of {DEFAULT}): if it is one network")
        assert mark.endswith("Equal reports alone do not prove it.")


def test_equal_prefixes_under_different_managers_are_two_networks() -> None:
    found = fabric_map(
        [node("a", {"ib0": ["m0"]}, m0=infiniband()), node("b", {"ib1": ["m0"]}, m0=infiniband(manager=2))]
    )
    assert [line.marks for line in found.fabrics] == [(), ()]


def test_rails_of_roce_are_one_fabric_and_networks_that_differ_between_nodes_are_marked() -> None:
    rails = {"m0": roce("10.0.1.0/24"), "m1": roce("10.0.2.0/24")}
    even = [node(name, {"roce": ["m0", "m1"]}, **rails) for name in "ab"]
    assert named(fabric_map(even), "roce").marks == ()
    odd = node("c", {"roce": ["m0"]}, m0=roce("10.0.9.0/24"))
    assert named(fabric_map([*even, odd]), "roce").marks == (
        "One name over several networks (network 10.0.1.0/24 on a, b; network 10.0.2.0/24 on a, b; network 10.0.9.0/24"
        " on c): unless they are routed, give each a name of its own.",
    )


def test_one_name_over_two_kinds_of_links_is_marked() -> None:
    found = fabric_map(
        [node("a", {"x": ["m0"]}, m0=infiniband()), node("b", {"x": ["m0"]}, m0=roce("10.0.1.0/24"))],
    )
    assert named(found, "x").marks == (
        "One name over several kinds of links (InfiniBand on a; RoCE on b): give each kind a name of its own.",
    )
    assert named(found, "x").kinds == ("InfiniBand", "RoCE")


@pytest.mark.parametrize(
    "port",
    [
        infiniband(manager=7, state="DOWN"),
        infiniband(manager=None),
        infiniband(manager=0),
        infiniband(manager=7, prefix=""),
        AdapterPort(number=1, state="ACTIVE", subnet_prefix=DEFAULT, sm_lid=7),
        roce(""),
    ],
)
def test_what_is_down_or_unknown_is_no_finding(port: AdapterPort) -> None:
    first = node("a", {"ib0": ["m0"]}, m0=infiniband())
    found = fabric_map([first, node("b", {"ib0": ["m0"], "ib1": ["m1"]}, m0=port, m1=port)])
    kinds = [mark for line in found.fabrics for mark in line.marks if "kinds of links" not in mark]
    assert kinds == []
    lost = node("c", {"ib0": ["m0"]}, "lost", m0=infiniband(manager=9))
    assert named(fabric_map([first, lost])).marks == ()


def test_a_fabrics_rate_is_that_of_its_slowest_link_with_the_node_named_and_unknown_where_one_is() -> None:
    def rated(name: str, rate: float | None, up: bool = True) -> Told:
        return Told(name, fabrics=(Fabric(name="ib0", adapters=("m0",), up=up, reason="it is down", rate_gbit_s=rate),))

    found = named(fabric_map([rated("a", 400), rated("b", 200), rated("c", 100, up=False)]))
    assert (found.rate_gbit_s, found.slowest) == (200, "b")
    assert (found.nodes, found.up, found.down) == (3, 2, ("c: it is down",))
    assert named(fabric_map([rated("a", 400), rated("b", None)])).rate_gbit_s is None
    assert named(fabric_map([rated("a", 400, up=False)])).rate_gbit_s is None


def test_reasons_name_the_nodes_that_have_them_and_count_the_rest() -> None:
    down = [node(f"n{n:02}", {"ib0": ["m0"]}, m0=infiniband(state="INIT")) for n in range(12)]
    lost = node("z", {"ib0": ["m0"]}, "lost", m0=infiniband())
    assert named(fabric_map([*down, lost])).down == (
        "n00, n01, n02, n03, n04, n05, n06, n07 and 4 more: adapter m0 has no ACTIVE port: port 1 is INIT",
        "z: the node is lost",
    )


def test_undeclared_adapters_are_shown_with_what_they_report_and_which_fabric_reports_the_same() -> None:
    mapped = "0000:0000:0000:0000:0000:ffff:0a00:0001"
    gids = (Gid(index=0, gid="fe80:0000:0000:0000:0000:0000:0000:0001"), Gid(index=3, gid=mapped, kind="RoCE v2"))
    odd = tuple(Gid(index=index, gid="odd") for index in range(6))
    told = Told(
        "a",
        fabrics=(Fabric(name="ib0", adapters=("m0", "gone")), Fabric(name="ib1", adapters=("m9",))),
        adapters=(
            RdmaAdapter(name="m0", ports=(infiniband(),)),
            RdmaAdapter(name="m1", ports=(infiniband(), infiniband(2, manager=None, prefix="")), fault="worn"),
            RdmaAdapter(
                name="m2",
                ports=(AdapterPort(number=1, state="ACTIVE", link_layer="Ethernet", network="ens1", gids=gids),),
            ),
            RdmaAdapter(name="m3", fault="it has no ports"),
            RdmaAdapter(name="m4", ports=(AdapterPort(number=1, link_layer="Odd", gids=odd, fault="state: no"),)),
        ),
    )
    found = fabric_map([told])
    shown = [
        (line.fabric, line.adapter, line.number, line.link_layer, line.reports, line.gids, line.note)
        for line in found.ports
    ]
    assert shown == [
        ("ib0", "m0", 1, "InfiniBand", f"subnet manager 1 of {DEFAULT}", "", ""),
        ("", "m1", 1, "InfiniBand", f"subnet manager 1 of {DEFAULT}", "", "worn; reports the same as ib0"),
        ("", "m1", 2, "InfiniBand", "subnet manager unknown of unknown", "", "worn"),
        ("", "m2", 1, "RoCE", "network unknown on ens1", "0 fe80::1; 3 ::ffff:10.0.0.1 (RoCE v2)", ""),
        ("", "m3", None, "", "", "", "it has no ports"),
        ("", "m4", 1, "Odd", "", "0 odd; 1 odd; 2 odd; 3 odd; 2 more", "state: no"),
        ("ib0", "gone", None, "", "", "", "declared, and not there"),
        ("ib1", "m9", None, "", "", "", "declared, and not there"),
    ]
    assert found.undeclared == 3


def test_a_roce_port_reports_its_network() -> None:
    assert reports(roce("10.0.0.0/24")) == "network 10.0.0.0/24 on ens1"
    bare = AdapterPort(number=1, link_layer="Ethernet", subnet_prefix="10.0.0.0/24")
    assert reports(bare) == "network 10.0.0.0/24"
    assert str(network_of(bare)) == "network 10.0.0.0/24"


# --- NVLink ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("peers", "links", "says"),
    [
        ((), Links(), ""),
        ((7, 7, 0, None), Links(2, 1, 1), ""),
        ((0, 0, None), Links(0, 2, 1), "Read that as unknown, not as absent"),
        ((None, None), Links(0, 0, 2), "No driver says"),
    ],
)
def test_zero_peers_across_a_fleet_are_unknown_and_not_absent(
    peers: tuple[int | None, ...], links: Links, says: str
) -> None:
    found = fabric_map([Told("a", peers=peers[:1]), Told("b", peers=peers[1:])]).links
    assert found == links
    assert says in found.note
    assert bool(found.note) == bool(says)


# --- whatever there is -----------------------------------------------------------------------------------------------
PORTS = st.one_of(
    st.builds(
        infiniband,
        st.integers(1, 2),
        st.one_of(st.none(), st.integers(0, 2)),
        st.sampled_from([DEFAULT, "", "fec0:0000:0000:0001"]),
        st.sampled_from(["ACTIVE", "DOWN", ""]),
    ),
    st.builds(roce, st.sampled_from(["", "10.0.1.0/24", "10.0.2.0/24"]), st.integers(1, 2)),
)
ADAPTERS = st.lists(
    st.builds(RdmaAdapter, name=st.sampled_from(["m0", "m1", "m2"]), ports=st.lists(PORTS, max_size=2).map(tuple)),
    max_size=3,
    unique_by=lambda adapter: adapter.name,
).map(tuple)
OWNERS = st.dictionaries(st.sampled_from(["m0", "m1", "m2"]), st.sampled_from(["ib0", "ib1", "ib2"]))


@st.composite
def fleets(draw: st.DrawFn) -> list[Told]:
    fleet = []
    for number in range(draw(st.integers(0, 5))):
        adapters, owners = draw(ADAPTERS), draw(OWNERS)
        declared: dict[str, list[str]] = {}
        for adapter, fabric in owners.items():
            declared.setdefault(fabric, []).append(adapter)
        state = draw(st.sampled_from(["ready", "unreachable", "lost"]))
        fleet.append(Told(f"n{number}", state, advertise(declared, adapters), adapters))
    return fleet


@given(fleets(), st.randoms())
def test_the_order_of_nodes_changes_nothing(fleet: list[Told], dice: random.Random) -> None:
    mixed = list(fleet)
    dice.shuffle(mixed)
    assert fabric_map(mixed) == fabric_map(fleet)


@given(fleets())
def test_every_port_and_every_name_is_on_the_map_once(fleet: list[Told]) -> None:
    found = fabric_map(fleet)
    ports = [(line.node, line.adapter, line.number) for line in found.ports if line.number is not None]
    assert sorted(ports) == sorted(
        (told.node, adapter.name, port.number) for told in fleet for adapter in told.adapters for port in adapter.ports
    )
    owners = {(t.node, a): fabric.name for t in fleet for fabric in t.fabrics for a in fabric.adapters}
    assert all(line.fabric == owners.get((line.node, line.adapter), "") for line in found.ports)
    assert {line.adapter for line in found.ports if line.fabric} == {adapter for _, adapter in owners}
    assert [line.name for line in found.fabrics] == sorted(set(owners.values()))
    assert all(0 <= line.up <= line.nodes for line in found.fabrics)


@given(fleets())
def test_a_mark_stands_where_two_networks_differ_or_two_names_meet_and_nowhere_else(fleet: list[Told]) -> None:
    behind: dict[str, set[tuple[str, int]]] = {}
    for told in fleet:
        for fabric in told.fabrics if told.state != "lost" else ():
            for adapter in told.adapters:
                for port in adapter.ports if adapter.name in fabric.adapters else ():
                    if (
                        port.state == "ACTIVE"
                        and port.link_layer == "InfiniBand"
                        and port.subnet_prefix
                        and port.sm_lid
                    ):
                        behind.setdefault(fabric.name, set()).add((port.subnet_prefix, port.sm_lid))
    for line in fabric_map(fleet).fabrics:
        mine = behind.get(line.name, set())
        assert any("subnet managers" in mark for mark in line.marks) == (len(mine) > 1)
        others = sorted(name for name, held in behind.items() if name != line.name and held & mine)
        said = [mark for mark in line.marks if "(subnet manager" in mark and "reports the same" in mark]
        assert {name for mark in said for name in mark.split(" reports")[0].split(", ")} == set(others)
