"""What agents say, made fit to store and to show: bounded, and without anything that acts on a terminal. Pure."""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Iterable
from typing import assert_never

import msgspec

from agent import protocol

MAX_LABEL = 63
MAX_NAME = 120
MAX_NODE = 128
MAX_CLASS = 80
MAX_ERRANDS = 64
MAX_CHOICES = 16
LARGEST = 2**63 - 1
LARGEST_IN_ROWS = 2**31 - 1
# As colours, titles and cursor moves are written, in seven and in eight bits.
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
_ADDRESS = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")
_LENGTHS = {"replica": 120, "model": 200, "profile": 80, "profile_digest": 64, "engine": 20}
_YEARS = range(2000, 9000)
"""Of a replica's making. Times nearer to the ends of the calendar cannot be brought to another time zone."""


class Unfit(Exception):
    """A message that no row can hold, in words that name the field."""


def fitted(message: protocol.Up) -> protocol.Up:
    """The message as it may be stored and shown. Raises Unfit."""
    told = msgspec.to_builtins(message)
    clean = _cleaned(told)
    fit: protocol.Up = message if clean == told else msgspec.convert(clean, protocol.Up)  # type: ignore[call-overload]
    match fit:
        case protocol.Register():
            _check_register(fit)
        case protocol.Heartbeat():
            _check_count("shards", len(fit.shards), protocol.MAX_SHARDS)
            _check_states(fit.shards)
            _check_load(fit.load)
            _check_count("errands", len(fit.errands), MAX_ERRANDS)
            if fit.inventory is not None:
                _check_inventory(fit.inventory)
        case protocol.ShardStatus():
            _check_states((fit.status,))
        case protocol.Ack():
            pass
        case protocol.CertificateRequest():
            _check_count("characters of a certificate request", len(fit.request), protocol.MAX_REQUEST)
        case _:
            assert_never(fit)
    return fit


def shown(text: str) -> str:
    """Text without escape sequences; other characters that cannot be seen stand as U+FFFD. Lines and tabs stay."""
    if text.isprintable():
        return text
    text = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return "".join(letter if _may_stay(letter) else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _may_stay(letter: str) -> bool:
    return letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs"


def _cleaned(part: object) -> object:
    if isinstance(part, str):
        return shown(part)
    if isinstance(part, dict):
        return {shown(key): _cleaned(value) for key, value in part.items()}
    if isinstance(part, tuple):  # what messages have for lists
        return tuple(_cleaned(value) for value in part)
    if isinstance(part, int | float) and abs(part) > LARGEST:
        raise Unfit("a number has more than 63 bits")
    return part


def _check_register(told: protocol.Register) -> None:
    for name, limit in (("node", MAX_NODE), ("agent_version", 40), ("machine_id", 64), ("instance", 64)):
        if len(getattr(told, name)) > limit or not getattr(told, name).isprintable():
            raise Unfit(f"{name} is not one line of at most {limit} characters")
    if not _ADDRESS.fullmatch(told.address):
        raise Unfit(f"the address {told.address[:80]!r} is no host name and no IP address")
    if is_nowhere(told.address):
        raise Unfit(f"nothing is reached at the address {told.address}; set address in agent.yaml")
    _check_count("labels", len(told.labels), protocol.MAX_LABELS)
    for name, value in told.labels.items():
        if not (1 <= len(name) <= MAX_LABEL and len(value) <= MAX_LABEL):
            raise Unfit(
                f"label {name[:MAX_LABEL]!r} or its value has more than {MAX_LABEL} characters, or it has no name"
            )
    _check_inventory(told.inventory)
    _check_count("shards", len(told.shards), protocol.MAX_SHARDS)
    for each in told.shards:
        for name, limit in _LENGTHS.items():
            value = getattr(each.spec, name)
            if not (1 <= len(value) <= limit and value.isprintable()):
                raise Unfit(f"{name} of a shard is not one line of 1 to {limit} characters")
        _check_held(each.spec)
        _check_adapters(each.spec)
    _check_states(each.status for each in told.shards)


def is_address(text: str) -> bool:
    """Whether it may be one, of a name or of a number."""
    return bool(_ADDRESS.fullmatch(text))


def is_nowhere(address: str) -> bool:
    """Whether it is the address of no machine in particular: any, many, or whoever is next to the one that asks, as
    what clouds tell their machines' secrets at."""
    number = _number(address)
    return number is not None and (number.is_unspecified or number.is_multicast or number.is_link_local)


def is_loopback(address: str) -> bool:
    number = _number(address)
    return address == "localhost" if number is None else number.is_loopback


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        number = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return None
    return getattr(number, "ipv4_mapped", None) or number


def misplaced(address: str, *, peer: str, here: str) -> str:
    """Why gateways cannot go to the `address` that an agent gave, when its stream came from `peer` to `here`: loopback
    is another machine for each of them. Empty when they can, or nobody knows."""
    if not is_loopback(address) or not peer or peer == here or is_loopback(peer):
        return ""
    return (
        f"the agent comes from {peer} and says that it is reached at {address}, which is this machine itself; "
        "correct address in its agent.yaml"
    )


def _check_held(told: protocol.ShardSpec) -> None:
    """What a shard takes of its node, and since when."""
    of = f"of replica {told.replica}"
    if not all(0 <= number <= LARGEST_IN_ROWS for number in (told.rank, told.slots, told.cores)):
        raise Unfit(f"rank, slots or cores {of} is out of range")
    _check_count(f"cards {of}", len(told.gpus), protocol.MAX_GPUS)
    if len(told.fabric) > MAX_NAME:
        raise Unfit(f"the name of the fabric {of} is longer than {MAX_NAME} characters")
    if told.made_at is not None and (told.made_at.tzinfo is None or told.made_at.year not in _YEARS):
        raise Unfit(f"made_at {of} has no time zone, or is not of our time: {told.made_at}")


def _check_inventory(told: protocol.Inventory) -> None:
    """Names that placement and pages tell things apart by are there once, and short."""
    cards = tuple(gpu.uuid for gpu in told.gpus)
    networks = tuple(adapter.name for adapter in told.adapters)
    for kind, found, most in (
        ("cards", cards, protocol.MAX_GPUS),
        ("fabrics", tuple(fabric.name for fabric in told.fabrics), protocol.MAX_FABRICS),
        ("adapters", networks, protocol.MAX_ADAPTERS),
    ):
        _check_count(kind, len(found), most)
        if len(set(found)) < len(found):
            raise Unfit(f"one of the {kind} is there twice")
        if not all(1 <= len(name) <= MAX_NAME and name.isprintable() for name in found):
            raise Unfit(f"the name of one of the {kind} is not one line of 1 to {MAX_NAME} characters")
    for gpu in told.gpus:
        if len(gpu.gpu_class) > MAX_CLASS or max(len(gpu.name), len(gpu.fault)) > protocol.MAX_TEXT:
            raise Unfit(f"class, name or fault of card {gpu.uuid} is too long")
    _check_count("files", len(told.files), protocol.MAX_FILES)
    chosen = told.engine_builds or {}
    _check_count("choices of builds", len(chosen), MAX_CHOICES)
    for word in (*chosen, *chosen.values()):
        if not (1 <= len(word) <= protocol.MAX_BUILD_NAME and word.isprintable()):
            raise Unfit(f"a chosen build or its engine is not one line of 1 to {protocol.MAX_BUILD_NAME} characters")
    disks = (size for disk in told.disks for size in (disk.total_bytes, disk.free_bytes))
    sizes = (told.cpu.cores, told.memory_bytes, *disks)
    if any(size is not None and size < 0 for size in sizes):
        raise Unfit("cores, memory or disk are less than nothing")


def _check_load(told: protocol.NodeLoad) -> None:
    _check_count("readings of cards", len(told.gpus), protocol.MAX_GPUS)
    if not 0 <= (told.gpus_age_s or 0) <= LARGEST_IN_ROWS:
        raise Unfit("the age of the cards' readings is out of range")


def _check_adapters(told: protocol.ShardSpec) -> None:
    for adapter in told.adapters:
        if not (1 <= len(adapter.name) <= 200 and len(adapter.source) <= 1000):
            raise Unfit(f"an adapter of replica {told.replica} has no name, or too long a name or source")
    if not 0 <= (told.max_loaded_adapters or 0) <= LARGEST_IN_ROWS:
        raise Unfit(f"max_loaded_adapters of replica {told.replica} is out of range")


def _check_states(told: Iterable[protocol.ShardState]) -> None:
    for each in told:
        if not (1 <= len(each.replica) <= _LENGTHS["replica"] and each.replica.isprintable()):
            raise Unfit(f"the replica of a state is not one line of 1 to {_LENGTHS['replica']} characters")
        for port in (each.port, each.rendezvous):
            if port is not None and not 1 <= port <= 65535:
                raise Unfit(f"port {port} of replica {each.replica} is none")
        if not (0 <= each.rank <= LARGEST_IN_ROWS and 0 <= (each.pid or 0) <= LARGEST_IN_ROWS):
            raise Unfit(f"rank or pid of replica {each.replica} is out of range")


def _check_count(kind: str, count: int, most: int) -> None:
    if count > most:
        raise Unfit(f"{count} {kind} are more than {most}")
