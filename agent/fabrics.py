"""Declared fabrics against the adapters that are there: which are up, and why the others are not (ND-21). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent.protocol import AdapterPort, Fabric, RdmaAdapter


def advertise(
    declared: Mapping[str, Sequence[str]], found: Iterable[RdmaAdapter], fault: str = ""
) -> tuple[Fabric, ...]:
    """Every declared fabric, in the order of names. `fault`: why the adapters could not be read at all."""
    adapters = {adapter.name: adapter for adapter in found}
    return tuple(_fabric(name, tuple(names), adapters, fault) for name, names in sorted(declared.items()))


def _fabric(name: str, names: tuple[str, ...], adapters: Mapping[str, RdmaAdapter], fault: str) -> Fabric:
    reasons = [f"its adapters cannot be read: {fault}"] if fault else []
    ports: list[tuple[str, AdapterPort]] = []
    for each in names if not fault else ():
        active, why = _active(each, adapters)
        ports += [(each, port) for port in active]
        reasons += [why] if why else []
    kinds = sorted({port.link_layer or "unknown" for _, port in ports})
    if len(kinds) > 1:
        which = ", ".join(f"{each} {port.link_layer or 'unknown'}" for each, port in ports)
        reasons.append(f"its adapters are of several kinds ({which}); declare a fabric for each kind")
    rates = [port.rate_gbit_s for _, port in ports]
    known = [rate for rate in rates if rate is not None]
    return Fabric(
        name=name,
        adapters=names,
        up=not reasons,
        reason="; ".join(reasons),
        rate_gbit_s=min(known) if known and len(known) == len(rates) else None,
        link_layer=kinds[0] if len(kinds) == 1 else "",
    )


def _active(name: str, adapters: Mapping[str, RdmaAdapter]) -> tuple[list[AdapterPort], str]:
    adapter = adapters.get(name)
    if adapter is None:
        there = ", ".join(sorted(adapters)) or "none"
        return [], f"adapter {name} is not there (there are: {there})"
    if adapter.fault:
        return [], f"adapter {name}: {adapter.fault}"
    active = [port for port in adapter.ports if port.state == "ACTIVE"]
    if active:
        return active, ""
    states = ", ".join(f"port {port.number} is {port.state or f'unknown ({port.fault})'}" for port in adapter.ports)
    return [], f"adapter {name} has no ACTIVE port: {states}"
