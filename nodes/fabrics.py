"""All nodes' fabrics on one map, and where a name and what stands behind it do not agree. Pure (ND-21, ND-22).

Every finding is about what ports report. Equal reports are no proof: most InfiniBand networks have the default prefix
and a manager with LID 1, and private addresses repeat. Different ones are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address

from agent.protocol import AdapterPort, Fabric, RdmaAdapter
from nodes.names import some

NAMED = 8
"""Nodes that a sentence names before it only counts them."""
GIDS = 4
"""Addresses of a port that are shown."""
KINDS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}


@dataclass(frozen=True, slots=True)
class Told:
    """What one node last said of its networks, and of its cards' NVLink peers: how many, None where it does not say."""

    node: str
    state: str = "ready"
    fabrics: tuple[Fabric, ...] = ()
    adapters: tuple[RdmaAdapter, ...] = ()
    peers: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Network:
    """What a port reports to be connected to. `manager`: the LID of an InfiniBand subnet's manager."""

    kind: str
    prefix: str
    manager: int = 0

    def __str__(self) -> str:
        if self.kind == "InfiniBand":
            return f"subnet manager {self.manager} of {self.prefix}"
        return f"network {self.prefix}"


@dataclass(frozen=True, slots=True)
class PortLine:
    """One port of one node. `number` None: an adapter without ports, or one that is declared and not there."""

    node: str
    node_state: str
    fabric: str
    """Empty: nobody declared it."""
    adapter: str
    number: int | None
    state: str
    link_layer: str
    rate_gbit_s: float | None
    reports: str
    """The subnet manager or the network behind it, in words."""
    gids: str
    note: str


@dataclass(frozen=True, slots=True)
class NamedFabric:
    """One name over all nodes that declare it."""

    name: str
    nodes: int
    up: int
    kinds: tuple[str, ...]
    rate_gbit_s: float | None
    """Of the slowest link that is up; unknown as soon as one is."""
    slowest: str
    """The node with that link, where others have faster ones."""
    networks: tuple[str, ...]
    marks: tuple[str, ...]
    """What does not agree, and what to do about it."""
    down: tuple[str, ...]
    """A line for each reason why it is not up somewhere, naming the nodes."""


@dataclass(frozen=True, slots=True)
class Links:
    """NVLink over the fleet, in cards: with peers, without, and those whose driver does not say."""

    linked: int = 0
    alone: int = 0
    unknown: int = 0

    @property
    def note(self) -> str:
        if self.linked:
            return ""
        if self.alone:
            return (
                "No card of the fleet reports a peer. Read that as unknown, not as absent: a driver without its fabric"
                " manager says the same. `nvidia-smi topo -m` on a node tells."
            )
        return "No driver says; `nvidia-smi topo -m` on a node tells." if self.unknown else ""


@dataclass(frozen=True, slots=True)
class FabricMap:
    """Fabrics by name, ports by node and adapter."""

    fabrics: tuple[NamedFabric, ...]
    ports: tuple[PortLine, ...]
    undeclared: int
    """Active ports that are in no fabric."""
    links: Links


@dataclass(frozen=True, slots=True)
class _Port:
    """An active port of a declared fabric, on a node that is not lost: what findings are made of."""

    fabric: str
    node: str
    kind: str
    """InfiniBand, RoCE, or empty where it is unknown."""
    network: Network | None


def network_of(port: AdapterPort) -> Network | None:
    """None: what it reports does not identify a network."""
    if not port.subnet_prefix or port.link_layer not in KINDS:
        return None
    if port.link_layer == "Ethernet":
        return Network("Ethernet", port.subnet_prefix)
    return Network("InfiniBand", port.subnet_prefix, port.sm_lid) if port.sm_lid else None


def reports(port: AdapterPort) -> str:
    """What stands behind a port, in words; empty where it says nothing."""
    if port.link_layer == "InfiniBand":
        return f"subnet manager {port.sm_lid or 'unknown'} of {port.subnet_prefix or 'unknown'}"
    if port.network or port.subnet_prefix:
        return f"network {port.subnet_prefix or 'unknown'}" + (f" on {port.network}" if port.network else "")
    return ""


def _gids(port: AdapterPort) -> str:
    more = f"; {len(port.gids) - GIDS} more" if len(port.gids) > GIDS else ""
    return "; ".join(f"{each.index} {_short(each.gid)}" + _in_brackets(each.kind) for each in port.gids[:GIDS]) + more


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


@lru_cache(maxsize=2**14)
def _short(gid: str) -> str:
    """As addresses are written by people; what is none stays as it is."""
    try:
        address = IPv6Address(gid)
    except ValueError:
        return gid
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def fabric_map(told: Iterable[Told]) -> FabricMap:
    nodes = sorted(told, key=lambda each: each.node)
    known = [port for each in nodes if each.state != "lost" for port in _known(each)]
    names: dict[Network, set[str]] = defaultdict(set)
    for port in known:
        if port.network:
            names[port.network].add(port.fabric)
    by_fabric: dict[str, list[_Port]] = defaultdict(list)
    for port in known:
        by_fabric[port.fabric].append(port)
    declared: dict[str, list[tuple[Told, Fabric]]] = defaultdict(list)
    for each in nodes:
        for fabric in each.fabrics:
            declared[fabric.name].append((each, fabric))
    ports = [line for each in nodes for line in _lines(each, names)]
    return FabricMap(
        fabrics=tuple(_named(name, declared[name], by_fabric[name], names) for name in sorted(declared)),
        ports=tuple(ports),
        undeclared=sum(not line.fabric and line.state == "ACTIVE" for line in ports),
        links=_links(count for each in nodes for count in each.peers),
    )


# --- ports -----------------------------------------------------------------------------------------------------------
def _names(told: Told) -> dict[str, str]:
    """By adapter, the fabric that it is declared in."""
    return {adapter: fabric.name for fabric in told.fabrics for adapter in fabric.adapters}


def _known(told: Told) -> Iterator[_Port]:
    names = _names(told)
    for adapter in told.adapters:
        for port in adapter.ports:
            if adapter.name in names and port.state == "ACTIVE":
                kind = KINDS.get(port.link_layer, "")
                yield _Port(names[adapter.name], told.node, kind, network_of(port))


def _lines(told: Told, names: Mapping[Network, Collection[str]]) -> Iterator[PortLine]:
    mine = _names(told)

    def line(adapter: str, port: AdapterPort | None, note: str) -> PortLine:
        return PortLine(
            node=told.node,
            node_state=told.state,
            fabric=mine.get(adapter, ""),
            adapter=adapter,
            number=port.number if port else None,
            state=port.state if port else "",
            link_layer=KINDS.get(port.link_layer, port.link_layer) if port else "",
            rate_gbit_s=port.rate_gbit_s if port else None,
            reports=reports(port) if port else "",
            gids=_gids(port) if port else "",
            note=note,
        )

    for adapter in told.adapters:
        if not adapter.ports:
            yield line(adapter.name, None, adapter.fault)
        for port in adapter.ports:
            network = network_of(port)
            alike = sorted(names.get(network, ())) if network and adapter.name not in mine else ()
            same = f"reports the same as {', '.join(alike)}" if alike else ""
            yield line(adapter.name, port, "; ".join(filter(None, (adapter.fault, port.fault, same))))
    for name in sorted(mine.keys() - {adapter.name for adapter in told.adapters}):
        yield line(name, None, "declared, and not there")


# --- names -----------------------------------------------------------------------------------------------------------
def _named(
    name: str,
    declared: Sequence[tuple[Told, Fabric]],
    ports: Sequence[_Port],
    names: Mapping[Network, Collection[str]],
) -> NamedFabric:
    up = [(fabric.rate_gbit_s, told.node) for told, fabric in declared if fabric.up and told.state != "lost"]
    rates = sorted((rate, node) for rate, node in up if rate is not None)
    whole = bool(rates) and len(rates) == len(up)
    return NamedFabric(
        name=name,
        nodes=len(declared),
        up=len(up),
        kinds=tuple(sorted({port.kind for port in ports if port.kind})),
        rate_gbit_s=rates[0][0] if whole else None,
        slowest=rates[0][1] if whole and rates[0][0] < rates[-1][0] else "",
        networks=tuple(_with_nodes(network, nodes) for network, nodes in sorted(_by_network(ports).items())),
        marks=(*_apart(ports), *_shared(name, ports, names)),
        down=tuple(_down(declared)),
    )


def _by_network(ports: Iterable[_Port]) -> dict[Network, set[str]]:
    found: dict[Network, set[str]] = defaultdict(set)
    for port in ports:
        if port.network:
            found[port.network].add(port.node)
    return found


def _apart(ports: Sequence[_Port]) -> Iterator[str]:
    """One name over what are several networks."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for port in ports:
        if port.kind:
            kinds[port.kind].add(port.node)
    if len(kinds) > 1:
        which = "; ".join(f"{kind} on {_some(nodes)}" for kind, nodes in sorted(kinds.items()))
        yield f"One name over several kinds of links ({which}): give each kind a name of its own."
    networks = _by_network(ports)
    managers = {network: nodes for network, nodes in networks.items() if network.kind == "InfiniBand"}
    if len(managers) > 1:
        which = "; ".join(_with_nodes(network, nodes) for network, nodes in sorted(managers.items()))
        yield f"One name over {len(managers)} subnet managers ({which}): give each network a name of its own."
    roce = {network: nodes for network, nodes in networks.items() if network.kind == "Ethernet"}
    # The same networks on every node are rails, one for each adapter.
    if len(_rails(roce)) > 1:
        which = "; ".join(_with_nodes(network, nodes) for network, nodes in sorted(roce.items()))
        yield f"One name over several networks ({which}): unless they are routed, give each a name of its own."


def _rails(networks: Mapping[Network, Collection[str]]) -> set[frozenset[Network]]:
    """The sets of networks that nodes have."""
    by_node: dict[str, set[Network]] = defaultdict(set)
    for network, nodes in networks.items():
        for node in nodes:
            by_node[node].add(network)
    return {frozenset(held) for held in by_node.values()}


def _shared(name: str, ports: Iterable[_Port], names: Mapping[Network, Collection[str]]) -> Iterator[str]:
    """Several names for what may be one network."""
    for network in sorted({port.network for port in ports if port.network}):
        others = sorted(set(names[network]) - {name})
        if others:
            yield (
                f"{', '.join(others)} reports the same ({network}): if it is one network, give it one name, so that"
                " replicas can span all its nodes. Equal reports alone do not prove it."
            )


def _down(declared: Iterable[tuple[Told, Fabric]]) -> Iterator[str]:
    alike: dict[str, list[str]] = defaultdict(list)
    for told, fabric in declared:
        if told.state == "lost":
            alike["the node is lost"].append(told.node)
        elif not fabric.up:
            alike[fabric.reason].append(told.node)
    for reason, nodes in alike.items():
        yield f"{_some(nodes)}: {reason}"


def _with_nodes(network: Network, nodes: Collection[str]) -> str:
    return f"{network} on {_some(nodes)}"


def _some(nodes: Collection[str]) -> str:
    return some(sorted(nodes), NAMED)


# --- NVLink ----------------------------------------------------------------------------------------------------------
def _links(peers: Iterable[int | None]) -> Links:
    linked = alone = unknown = 0
    for count in peers:
        linked += bool(count)
        alone += count == 0
        unknown += count is None
    return Links(linked, alone, unknown)
