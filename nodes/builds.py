"""Which build of each engine a node uses: chosen here, gone by there, and what is to be told. Pure (AG-32)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agent.protocol import AUTO, MAX_BUILD_NAME, NONE, Build, Inventory
from catalog.spec import ENGINES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\Z")


@dataclass(frozen=True, slots=True)
class BuildLine:
    """`state`: ready, cannot run, not chosen, or off. `reason`: why it is not ready, with the next step."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineLine:
    """One engine of a node. `at_node`: what its agent goes by; None: it does not say. `note`: why that is not what was
    chosen."""

    engine: str
    chosen: str
    at_node: str | None
    options: tuple[str, ...]
    builds: tuple[BuildLine, ...]
    note: str


def lines(chosen: Mapping[str, str], told: Inventory | None) -> tuple[EngineLine, ...]:
    """Every engine, whether the node has builds of it or not. `told` None: the node has not registered yet."""
    return tuple(_line(engine, chosen.get(engine, AUTO), told) for engine in ENGINES)


def objection(engine: str, build: str, told: Inventory | None) -> str:
    """Why `build` cannot be chosen, as a sentence; empty when it can. A node that has not registered may have any."""
    if engine not in ENGINES:
        return f"There is no engine {engine[:40]!r}; known: {', '.join(ENGINES)}."
    if build in (AUTO, NONE):
        return ""
    if told is None:
        return "" if _is_name(build) else f"{build[:40]!r} is no name of a build; choose {AUTO}, {NONE}, or a name."
    there = _names(engine, told)
    if build in there:
        return ""
    return f"The node reports no build {build[:40]!r} of {engine}; choose {', '.join((AUTO, *there))} or {NONE}."


def to_tell(chosen: Mapping[str, str], told: Mapping[str, str] | None) -> dict[str, str]:
    """What an agent that goes by `told` must hear to go by what was chosen. None: it takes no choice."""
    if told is None:
        return {}
    return {engine: build for engine, build in sorted(chosen.items()) if told.get(engine, AUTO) != build}


def found(chosen: Mapping[str, str], told: Mapping[str, str] | None) -> dict[str, str]:
    """What an agent goes by of engines that nobody here chose for: a store that forgot takes it over."""
    known = {engine: build for engine, build in (told or {}).items() if engine in ENGINES and _is_name(build)}
    return {engine: build for engine, build in known.items() if engine not in chosen and build != AUTO}


def in_words(engine: str, build: str) -> str:
    """What a node does that goes by it."""
    if build == NONE:
        return f"starts no {engine} any more; what runs goes on"
    which = f"the best build of {engine} that runs there" if build == AUTO else f"build {build} of {engine}"
    return f"uses {which} from the next start on"


def _line(engine: str, chosen: str, told: Inventory | None) -> EngineLine:
    said = told.engine_builds if told else None
    at_node = None if said is None else said.get(engine, AUTO)
    there = _names(engine, told) if told else ()
    options = dict.fromkeys((AUTO, *there, chosen, NONE))  # what was chosen may have left the node since
    return EngineLine(
        engine=engine,
        chosen=chosen,
        at_node=at_node,
        options=tuple(options),
        builds=tuple(_build(each, at_node) for each in (told.builds if told else ()) if each.engine == engine),
        note=_note(chosen, at_node, joined=told is not None),
    )


def _build(build: Build, at_node: str | None) -> BuildLine:
    state = "ready" if build.usable else "cannot run"
    if at_node == NONE:
        state = "off"
    elif at_node not in (None, AUTO, build.name):
        state = "not chosen"
    return BuildLine(build.name, build.version, state, "" if build.usable else build.reason)


def _note(chosen: str, at_node: str | None, *, joined: bool) -> str:
    if chosen == (at_node or AUTO):
        return ""
    if not joined:
        return "it is told when it joins"
    if at_node is None:
        return "its agent takes no choice; upgrade llmgw on the node and restart its agent"
    return f"the node still goes by {at_node}; it is told while it is connected, and its timeline says if it refuses"


def _names(engine: str, told: Inventory) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.name for each in told.builds if each.engine == engine))


def _is_name(build: str) -> bool:
    return len(build) <= MAX_BUILD_NAME and bool(_NAME.match(build))
