"""Whether a shard can start on this machine at all, before anything is fetched or launched (AG-14). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from agent import builds, sources
from agent.engines import ENGINES
from agent.engines.base import Engine, names_flag
from agent.engines.llamacpp import CACHE_RAM
from agent.host import Host
from agent.protocol import ShardSpec

GGUF_MAGIC = b"GGUF"


def refusal(
    spec: ShardSpec, host: Host, *, has_binary: bool = False, engines: Mapping[str, Engine] = ENGINES
) -> str | None:
    """Why `spec` is refused, naming the field; None when it may go on. `has_binary`: the operator named a server."""
    engine = engines.get(spec.engine)
    if engine is None:
        return f"engine: {spec.engine!r} is not one that this agent runs. It knows {', '.join(sorted(engines))}."
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
    if len(spec.gpus) > host.gpus:
        return f"gpus: {len(spec.gpus)} asked for, and this node has {host.gpus}."
    for field, source in (("source", spec.source), *((f"adapter {a.name}", a.source) for a in spec.adapters)):
        try:
            sources.parse(source)
        except sources.SourceError as error:
            return f"{field}: {error}"
    if spec.adapters and spec.engine == "llamacpp" and names_flag(spec.args, *CACHE_RAM):
        return "args: leave --cache-ram out. llama.cpp's prompt cache does not tell adapters apart, so it stays off."
    if not has_binary:
        objections = [builds.objection(build, host) for build in builds.for_engine(spec.engine)]
        if objections and all(objections):
            return f"engine: no build of {spec.engine} runs here. " + " ".join(filter(None, objections))
    return None


def weights_refusal(engine: str, path: str, *, is_file: bool, head: bytes) -> str | None:
    """Why the weights at `path` cannot be served; `head` holds the file's first bytes."""
    if engine != "llamacpp":
        return None
    if not is_file:
        return f"source: {path} is not a file. llama.cpp needs one GGUF file."
    if not head.startswith(GGUF_MAGIC):
        return f"source: {path} is not a GGUF file (it does not begin with GGUF). Name a model in GGUF format."
    return None


def adapter_refusal(engine: str, name: str, path: str, *, is_file: bool, head: bytes) -> str | None:
    """Why the adapter at `path` cannot be attached; `head` holds the file's first bytes."""
    if engine != "llamacpp":
        return None
    if not is_file or not head.startswith(GGUF_MAGIC):
        return f"adapter {name}: {path} is not a GGUF file. llama.cpp needs a LoRA adapter converted to GGUF."
    if "," in path or ":" in path:
        return f"adapter {name}: {path} holds a comma or colon, which llama.cpp takes for the end of a name. Rename it."
    return None
