"""SGLang as a shard: the same command on every node, the first of which serves (AG-11). Pure.

Flags: facts of SGLang 0.5.23. They are written out, since its parser takes prefixes and stumbles over some.
"""

from __future__ import annotations

import json

from agent.engines import ranks
from agent.engines.base import Command, Launch, names_flag
from agent.host import Host
from agent.protocol import ShardSpec

LORA_RANK = 64
"""What adapters may have whose ranks are not known yet."""


class SgLang:
    name = "sglang"
    health_path = "/health"
    models_path = "/v1/models"
    multi_node = True
    launch_modes: tuple[str, ...] = ("mp",)
    repositories = True

    def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
        argv = [*launch.build.argv, "-m", "sglang.launch_server", "--model-path", launch.weights]
        argv += ["--served-model-name", spec.model, "--host", host.address, "--port", str(launch.port)]
        argv += ["--tp-size", str(spec.tp), "--pp-size", str(spec.pp)]
        if spec.nodes > 1:
            meeting = ranks.joined(*ranks.leader(spec, host, launch))
            argv += ["--nnodes", str(spec.nodes), "--node-rank", str(spec.rank), "--dist-init-addr", meeting]
        private = None
        if launch.key and launch.private:
            # It takes a key from no variable, and everybody reads arguments. JSON is YAML.
            argv += ["--config", launch.private]
            private = (launch.private, json.dumps({"api-key": launch.key}) + "\n")
        argv += _lora(spec, launch)
        if not names_flag(spec.args, "--enable-metrics"):
            argv.append("--enable-metrics")
        return (Command(argv=(*argv, *spec.args), env=_environment(spec, host, launch), private=private),)

    def serves_http(self, rank: int) -> bool:
        """The others have a server too, which says that all is well from the first moment on."""
        return rank == 0


def _environment(spec: ShardSpec, host: Host, launch: Launch) -> tuple[tuple[str, str], ...]:
    return (
        *ranks.environment(spec, host, launch),
        # Else every health check waits for a token behind all other requests.
        ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0"),
        *sorted(spec.env.items()),
        ("SGLANG_HOST_IP", host.address),
        *ranks.cards(spec, host),
    )


def _lora(spec: ShardSpec, launch: Launch) -> list[str]:
    held = len(spec.adapters) if spec.max_loaded_adapters is None else spec.max_loaded_adapters
    if not held:
        return []
    found = ranks.adapters(spec, launch)
    argv = ["--enable-lora"]
    if found:
        argv += ["--lora-paths", *(json.dumps({"lora_name": name, "lora_path": path}) for name, path in found)]
    defaults = {
        "--max-loras-per-batch": str(min(held, ranks.MAX_AT_ONCE)),
        "--max-loaded-loras": str(held),
        **({} if found else {"--max-lora-rank": str(launch.adapter_rank or LORA_RANK), "--lora-target-modules": "all"}),
    }
    for flag, value in defaults.items():
        if not names_flag(spec.args, flag):
            argv += [flag, value]
    return argv
