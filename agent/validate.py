"""Whether a shard can start on this machine at all, before anything is fetched or launched (AG-14). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from agent import builds, flags, gguf, sources
from agent.engines import ENGINES, ranks
from agent.engines.base import Engine, is_repository
from agent.host import Host
from agent.protocol import Gpu, ShardSpec

FP8_CAPABILITY = 8.9
"""The least compute capability of cards that compute in fp8."""
FP8_FLAGS = ("--quantization", "-q", "--kv-cache-dtype")


def refusal(
    spec: ShardSpec, host: Host, *, has_binary: bool = False, engines: Mapping[str, Engine] = ENGINES
) -> str | None:
    """Why `spec` is refused, naming the field; None when it may go on. `has_binary`: the operator named a program."""
    engine = engines.get(spec.engine)
    if engine is None:
        return f"engine: {spec.engine!r} is not one that this agent runs. It knows {', '.join(sorted(engines))}."
    return (
        _counts_refusal(spec, engine)
        or _source_refusal(spec, engine)
        or _args_refusal(spec)
        or (None if has_binary else _build_refusal(spec.engine, host))
        or _cards_refusal(spec, engine, host)
        or (_meeting_refusal(spec, engine, host) if spec.nodes > 1 else None)
    )


def _counts_refusal(spec: ShardSpec, engine: Engine) -> str | None:
    for field, value in (("tp", spec.tp), ("pp", spec.pp), ("nodes", spec.nodes), ("slots", spec.slots)):
        if value < 1:
            return f"{field}: {value} is not at least 1."
    if not engine.multi_node:
        # llama.cpp would start on one machine while the catalog counts several.
        for field, value in (("tp", spec.tp), ("pp", spec.pp), ("nodes", spec.nodes)):
            if value != 1:
                return f"{field}: {spec.engine} runs a replica on one node without parallel ranks; set {field} to 1."
    if not 0 <= spec.rank < spec.nodes:
        return f"rank: {spec.rank} is not one of the replica's {spec.nodes} shards."
    return None


def _source_refusal(spec: ShardSpec, engine: Engine) -> str | None:
    for field, source in (("source", spec.source), *((f"adapter {a.name}", a.source) for a in spec.adapters)):
        if engine.repositories and is_repository(source):
            continue
        try:
            sources.parse(source)
        except sources.SourceError as error:
            return f"{field}: {error}"
    return None


def _args_refusal(spec: ShardSpec) -> str | None:
    objection = next(filter(None, (flags.objection(spec.engine, arg) for arg in spec.args)), None)
    if objection is None and spec.adapters:
        objection = flags.cache_objection(spec.engine, spec.args)
    return objection and f"args: {objection}"


def _build_refusal(engine: str, host: Host) -> str | None:
    objections = [builds.objection(build, host) for build in builds.for_engine(engine)]
    if not objections:
        return f"engine: {builds.unnamed(engine)}"
    if all(objections):
        return f"engine: no build of {engine} runs here. " + " ".join(filter(None, objections))
    return None


def _cards_refusal(spec: ShardSpec, engine: Engine, host: Host) -> str | None:
    if len(spec.gpus) > host.gpus:
        return f"gpus: {len(spec.gpus)} asked for, and this node has {host.gpus}."
    if not engine.multi_node:
        return None
    if len(spec.gpus) * spec.nodes != spec.tp * spec.pp:
        had = f"{len(spec.gpus)} on each of {spec.nodes} nodes"
        return f"gpus: {had} are {len(spec.gpus) * spec.nodes}, and tp x pp is {spec.tp * spec.pp}. Make them equal."
    cards = [(uuid, host.card(uuid)) for uuid in spec.gpus]
    for uuid, card in cards:
        if card is None:
            return f"gpus: {uuid} is not on this node."
    there = [card for _, card in cards if card is not None]
    kinds = sorted({card.name for card in there})
    if len(kinds) > 1:
        return f"gpus: {' and '.join(kinds)} are mixed, and one replica needs cards of one type."
    if any("fp8" in value.lower() for value in _values(spec.args, FP8_FLAGS)):
        return _fp8_refusal("args", there)
    return None


def _values(args: tuple[str, ...], flags: tuple[str, ...]) -> Iterator[str]:
    """What `args` give for any of `flags`, as `--flag value` or `--flag=value`."""
    for arg, following in pairwise((*args, "")):
        flag, equals, value = arg.partition("=")
        if flag in flags:
            yield value if equals else following


def _fp8_refusal(field: str, cards: list[Gpu]) -> str | None:
    for card in cards:
        capability = _capability(card)
        if capability is not None and capability < FP8_CAPABILITY:
            return (
                f"{field}: fp8 needs cards of compute capability {FP8_CAPABILITY} or more, and {card.name} has "
                f"{card.compute_capability}. Take other weights or another class."
            )
    return None


def _capability(card: Gpu) -> float | None:
    try:
        return float(card.compute_capability)
    except ValueError:
        return None


def _meeting_refusal(spec: ShardSpec, engine: Engine, host: Host) -> str | None:
    """Of a replica over several nodes: whether this rank and the others can find each other."""
    if spec.launch_mode not in engine.launch_modes:
        return f"launch_mode: {spec.engine} knows {' and '.join(engine.launch_modes)}, not {spec.launch_mode!r}."
    if spec.rank and ranks.split(spec.rendezvous) is None:
        return f"rendezvous: {spec.rendezvous!r} is no address where the leader awaits rank {spec.rank}."
    if not host.interface:
        return f"address: no network interface of this node holds {host.address}. Correct `address` in agent.yaml."
    fabric = host.fabric(spec.fabric)
    if spec.fabric and fabric is None:
        return f"fabric: {spec.fabric} is not declared on this node. Name its adapters in `fabrics` of agent.yaml."
    if fabric is not None and not fabric.up:
        return f"fabric: {spec.fabric} is not up on this node: {fabric.reason}."
    return None


def weights_refusal(
    engine: str, path: str, *, is_file: bool, head: bytes, config: object = None, cards: tuple[Gpu, ...] = ()
) -> str | None:
    """Why the weights at `path` cannot be served. `head` holds a file's first bytes; `config` what a directory's
    config.json says, None where it has none; `cards` are the shard's."""
    if engine != "llamacpp":
        return _model_refusal(engine, path, is_file=is_file, head=head, config=config, cards=cards)
    if not is_file:
        return f"source: {path} is not a file. llama.cpp needs one GGUF file."
    if not head.startswith(gguf.MAGIC):
        return f"source: {path} is not a GGUF file (it does not begin with GGUF). Name a model in GGUF format."
    return None


def _model_refusal(
    engine: str, path: str, *, is_file: bool, head: bytes, config: object, cards: tuple[Gpu, ...]
) -> str | None:
    if is_file:
        if head.startswith(gguf.MAGIC):
            return None
        return f"source: {path} is one file and not in GGUF format. Name the model's directory, which {engine} reads."
    if not isinstance(config, Mapping):
        return f"source: {path} holds no config.json that can be read. Name a model's directory as a hub has it."
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and "fp8" in str(quantised.get("quant_method")).lower():
        return _fp8_refusal("source", list(cards))
    return None


def adapter_refusal(engine: str, name: str, path: str, *, is_file: bool, head: bytes) -> str | None:
    """Why the adapter at `path` cannot be attached; `head` holds the file's first bytes."""
    if engine != "llamacpp":
        return None
    if not is_file or not head.startswith(gguf.MAGIC):
        return f"adapter {name}: {path} is not a GGUF file. llama.cpp needs a LoRA adapter converted to GGUF."
    if "," in path or ":" in path:
        return f"adapter {name}: {path} holds a comma or colon, which llama.cpp takes for the end of a name. Rename it."
    return None
