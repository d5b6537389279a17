"""vLLM as a shard: one server a node, or a server and headless ranks, or a server on a Ray cluster (AG-10). Pure.

On several nodes the leader comes first, the others are told where it listens. With `mp` they are vLLM too; with `ray`
the leader's Ray head is a sidecar of its server, and the others only join it. Flags: facts of vLLM 0.33.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

from agent.engines import ranks
from agent.engines.base import Command, Launch, names_flag
from agent.host import Host
from agent.protocol import ShardSpec

KEY_VARIABLE = "VLLM_API_KEY"
SHUTDOWN_S = 4
"""How long a server that is told to stop goes on with what it has: less than the agent waits before it kills."""
UUIDS_SINCE = (0, 24)
"""The first version that does not read a UUID in CUDA_VISIBLE_DEVICES as a number."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
Environment = tuple[tuple[str, str], ...]


class Vllm:
    name = "vllm"
    health_path = "/health"
    models_path = "/v1/models"
    multi_node = True
    launch_modes: tuple[str, ...] = ("mp", "ray")
    repositories = True

    def commands(self, spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
        if spec.nodes == 1:
            return (_server(spec, host, launch),)
        if spec.launch_mode == "ray":
            return _over_ray(spec, host, launch)
        place, port = ranks.leader(spec, host, launch)
        meeting = ["--distributed-executor-backend", "mp", "--nnodes", str(spec.nodes), "--node-rank", str(spec.rank)]
        meeting += ["--master-addr", place, "--master-port", str(port)]
        if spec.rank == 0:
            return (_server(spec, host, launch, *meeting),)
        argv = (*_serve(spec, launch), *meeting, "--headless", *spec.args)
        return (Command(argv=argv, env=_environment(spec, host, launch)),)

    def serves_http(self, rank: int) -> bool:
        return rank == 0


def _serve(spec: ShardSpec, launch: Launch) -> tuple[str, ...]:
    """What every rank of a replica is told alike."""
    argv = [*launch.build.argv, "serve", launch.weights, "--served-model-name", spec.model]
    argv += ["--tensor-parallel-size", str(spec.tp), "--pipeline-parallel-size", str(spec.pp)]
    return (*argv, *_lora(spec, launch))


def _server(
    spec: ShardSpec, host: Host, launch: Launch, *meeting: str, ray: str = "", wait_for: tuple[str, int] | None = None
) -> Command:
    argv = [*_serve(spec, launch), *meeting, "--host", host.address, "--port", str(launch.port)]
    argv += ["--shutdown-timeout", str(SHUTDOWN_S)]
    if not names_flag(spec.args, "--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"):
        argv.append("--enable-prompt-tokens-details")
    return Command(
        argv=(*argv, *spec.args),
        env=_environment(spec, host, launch) + ((("RAY_ADDRESS", ray),) if ray else ()),
        secrets=((KEY_VARIABLE, launch.key),) if launch.key else (),
        wait_for=wait_for,
    )


def _over_ray(spec: ShardSpec, host: Host, launch: Launch) -> tuple[Command, ...]:
    place, port = ranks.leader(spec, host, launch)
    address = ranks.joined(place, port)
    role = ("--head", "--port", str(port), "--include-dashboard=false") if spec.rank == 0 else ("--address", address)
    argv = (str(PurePosixPath(launch.build.argv[0]).with_name("ray")), "start", *role)
    argv += ("--node-ip-address", host.address, "--num-gpus", str(len(spec.gpus)), "--disable-usage-stats", "--block")
    env = _environment(spec, host, launch)
    if spec.rank:
        return (Command(argv=argv, env=env, wait_for=(place, port)),)
    backend = ("--distributed-executor-backend", "ray")
    return (
        Command(argv=argv, env=env),
        _server(spec, host, launch, *backend, ray=address, wait_for=(place, port)),
    )


def _environment(spec: ShardSpec, host: Host, launch: Launch) -> Environment:
    return (
        *ranks.environment(spec, host, launch),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("DO_NOT_TRACK", "1"),
        # Its own limit is ten minutes, whatever the profile says.
        ("VLLM_ENGINE_READY_TIMEOUT_S", f"{spec.startup_timeout_s:.0f}"),
        *((("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"),) if spec.max_loaded_adapters is not None else ()),
        *sorted(spec.env.items()),
        # A profile is the same for all nodes, and these are not. Left alone, vLLM guesses by a route to the internet.
        ("VLLM_HOST_IP", host.address),
        *ranks.cards(
            spec, host, by_uuid=spec.launch_mode != "ray" and ranks.at_least(launch.build.version, *UUIDS_SINCE)
        ),
    )


def _lora(spec: ShardSpec, launch: Launch) -> tuple[str, ...]:
    held = len(spec.adapters) if spec.max_loaded_adapters is None else spec.max_loaded_adapters
    if not held:
        return ()
    argv = ["--enable-lora"]
    if not names_flag(spec.args, "--max-loras", "--max-cpu-loras"):
        argv += ["--max-loras", str(min(held, ranks.MAX_AT_ONCE)), "--max-cpu-loras", str(held)]
    rank = next((rank for rank in LORA_RANKS if rank >= (launch.adapter_rank or 0)), None)
    if launch.adapter_rank and rank and not names_flag(spec.args, "--max-lora-rank"):
        argv += ["--max-lora-rank", str(rank)]
    found = ranks.adapters(spec, launch)
    if found:
        # As JSON: in NAME=PATH a comma or another = would be read as something else.
        argv += ["--lora-modules", *(json.dumps({"name": name, "path": path}) for name, path in found)]
    return tuple(argv)
