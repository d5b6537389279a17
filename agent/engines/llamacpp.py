"""llama.cpp's llama-server as a shard of one command (AG-11, AG-15, AG-34, AG-35). Pure.

Every flag has been seen to work in llama-server b11434 and in agent/engines/llama_server.py.
"""

from __future__ import annotations

from agent.engines import ranks
from agent.engines.base import Command, Launch, names_flag
from agent.flags import CACHE_RAM
from agent.host import Host
from agent.protocol import ShardSpec

CONTEXT_PER_SLOT = 4096
"""Tokens of context that a slot gets when the profile names no --ctx-size, which counts all slots together."""
MAX_CACHE_RAM_MIB = 2048
KEY_VARIABLE = "LLAMA_API_KEY"


class LlamaCpp:
    name = "llamacpp"
    health_path = "/health"
    models_path = "/v1/models"
    multi_node = False
    launch_modes: tuple[str, ...] = ("mp",)
    repositories = False

    def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
        slots = max(1, spec.slots)
        argv = [*launch.build.argv, "--model", launch.weights, "--alias", spec.model]
        # Always named: unnamed, the port has changed between releases and the address is the server's choice.
        argv += ["--host", host.address, "--port", str(launch.port)]
        # Held and not applied; each request says which one it wants. --lora-init-without-apply does apply them.
        for path in launch.adapters:
            argv += ["--lora-scaled", f"{path}:0"]
        # The cache of prompts does not tell adapters apart, and would answer with another one's.
        cache_mib = 0 if launch.adapters else cache_ram_mib(host)
        defaults: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
            (("--parallel", "-np"), (str(slots),)),
            (("--ctx-size", "-c"), (str(slots * CONTEXT_PER_SLOT),)),
            (("--threads", "-t"), (str(threads(host)),)),
            (("--n-gpu-layers", "-ngl", "--gpu-layers"), ("all" if spec.gpus else "0",)),
            (CACHE_RAM, (str(cache_mib),)),
            (("--metrics",), ()),
            (("--offline",), ()),
            (("--no-ui", "--ui", "--no-webui", "--webui"), ()),
        )
        for flags, value in defaults:
            if not names_flag(spec.args, *flags):
                argv += [flags[0], *value]
        argv += spec.args
        secrets = ((KEY_VARIABLE, launch.key),) if launch.key else ()
        env = (*launch.build.env, *sorted(spec.env.items()))
        if host.cards:  # else a replica on one card, or on CPUs, would take memory of all of them
            env = (*env, *ranks.cards(spec, host, by_uuid=True))
        return (Command(argv=tuple(argv), env=env, secrets=secrets),)

    def serves_http(self, rank: int) -> bool:
        return rank == 0


def threads(host: Host) -> int:
    """Half the CPUs: with a thread on every CPU two busy servers slow each other down many times over (AG-11)."""
    return host.llamacpp_threads or max(1, (host.cores or 2) // 2)


def cache_ram_mib(host: Host) -> int:
    """Host memory for prompts of idle slots: a sixteenth, where llama-server by itself would take up to 8 GiB."""
    return min(MAX_CACHE_RAM_MIB, (host.memory_bytes or 0) // 16 // 2**20)
