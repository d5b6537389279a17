"""A fleet in a store of its own, for `make bench BENCH=reconcile`, and what a pass over it costs in this process.

`python -m tests.bench.fleet seed NODES TOKENS` writes rows, and join tokens into the folder TOKENS.
`python -m tests.bench.fleet measure` prints a pass's and a placement's CPU, the queries of a pass, and memory, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from time import process_time
from typing import Any

import django
import msgspec

from agent import protocol
from tests.bench.load import rss_kib

CARDS, REPLICAS = 8, 2
"""Of a node; the replicas share the cards."""
COPIES = 10
"""Replicas of a model."""
ROUNDS = 7
CLASS = "h100-80g"


def node_name(number: int) -> str:
    return f"n{number:04d}"


def machine(number: int) -> protocol.Inventory:
    """What such a node reports: its cards, their links, an adapter on a fabric, builds, and some weights."""
    uuids = [card(number, index) for index in range(CARDS)]
    return protocol.Inventory(
        hostname=node_name(number),
        os="Debian 13",
        kernel="6.12",
        cpu=protocol.Cpu(model="a CPU", cores=192, numa_nodes=2),
        memory_bytes=2 * 10**12,
        disks=(protocol.Disk(path="/", total_bytes=10**13, free_bytes=5 * 10**12),),
        gpus=tuple(
            protocol.Gpu(
                uuid=uuid,
                index=index,
                name="NVIDIA H100 80GB HBM3",
                gpu_class=CLASS,
                memory_bytes=80 * 2**30,
                numa=index // 4,
                peers=tuple(each for each in uuids if each != uuid),
            )
            for index, uuid in enumerate(uuids)
        ),
        fabrics=(protocol.Fabric(name="ib0", adapters=("mlx5_0",), rate_gbit_s=400, link_layer="InfiniBand"),),
        builds=(protocol.Build(engine="vllm", name="vllm", version="0.33.0"),),
        files=tuple(protocol.File(path=f"w/{part}.safetensors", size_bytes=5 * 10**9) for part in range(20)),
    )


def card(number: int, index: int) -> str:
    return f"GPU-{number:08d}-{index:04d}-4000-8000-000000000000"


def shards(number: int, digest: str) -> tuple[protocol.Running, ...]:
    """What runs on the node, as its agent tells it."""
    found = []
    for place in range(REPLICAS):
        each = number * REPLICAS + place
        model, replica = f"m{each // COPIES}", f"m{each // COPIES}-{each}"
        share = CARDS // REPLICAS
        spec = protocol.ShardSpec(
            replica=replica,
            model=model,
            profile="gpu",
            profile_digest=digest,
            engine="vllm",
            source="/weights/m",
            gpus=tuple(card(number, place * share + index) for index in range(share)),
            tp=share,
        )
        status = protocol.ShardState(replica=replica, state="ready", port=21000 + place, pid=1000 + place)
        found.append(protocol.Running(spec=spec, status=status))
    return tuple(found)


def seed(nodes: int, tokens: Path) -> None:
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    from django.utils import timezone

    from catalog.models import Model, Profile
    from nodes.models import Node, Replica, Shard
    from nodes.state import profile_digest
    from tenants.keys import new_secret

    now = timezone.now()
    count = -(-nodes * REPLICAS // COPIES)
    models = [
        Model(name=f"m{each}", source="/weights/m", scaling_min=COPIES, scaling_max=COPIES) for each in range(count)
    ]
    # The last one's copies may be fewer, and all are there.
    models[-1].scaling_min = nodes * REPLICAS - (count - 1) * COPIES
    share = CARDS // REPLICAS
    profile = {"name": "gpu", "engine": "vllm", "gpu_class": CLASS, "tp": share, "gpus_per_node": share}
    Model.objects.bulk_create(models)
    Profile.objects.bulk_create(Profile(model=model, **profile) for model in Model.objects.all())
    one = Model.objects.snapshot()[0]
    digest = profile_digest(one, one.profiles[0])
    rows, replicas, parts = [], [], []
    for number in range(nodes):
        name, secret = node_name(number), new_secret("nt")
        path = tokens / name
        path.touch(0o600)
        path.write_text(secret.text)
        rows.append(
            Node(
                name=name,
                token_digest=secret.digest,
                machine_id=f"machine-{name}",
                state="ready",
                address="127.0.0.1",
                inventory=msgspec.to_builtins(machine(number)),
                registered_at=now,
                last_seen_at=now,
            )
        )
        for running in shards(number, digest):
            spec, status = running.spec, running.status
            replicas.append(
                Replica(
                    name=spec.replica,
                    model=spec.model,
                    profile=spec.profile,
                    profile_digest=digest,
                    engine=spec.engine,
                    state="ready",
                    ready_at=now,
                )
            )
            parts.append(
                Shard(
                    replica_id=spec.replica,
                    node_id=name,
                    gpus=list(spec.gpus),
                    state="ready",
                    port=status.port,
                    pid=status.pid,
                )
            )
    Node.objects.bulk_create(rows, batch_size=100)
    Replica.objects.bulk_create(replicas, batch_size=500)
    Shard.objects.bulk_create(parts, batch_size=500)
    (tokens / "digest").write_text(digest)


def measure() -> dict[str, Any]:
    """CPU of this process, as the median of a few rounds, so that other load on the machine matters little."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext
    from django.utils import timezone

    from catalog import spec
    from nodes import passes, snapshot
    from nodes.models import Node
    from nodes.placement import Placed, place

    now: datetime = timezone.now()
    Node.objects.update(last_seen_at=now)
    with CaptureQueriesContext(
        connection,
    ) as queries:
        if passes.run_pass(now):
            raise SystemExit("the pass did something: its figures would mean nothing")
    pass_ms = _median_ms(lambda: passes.run_pass(now))
    cluster = snapshot.take(now)
    last = node_name(len(cluster.nodes) - 1)
    room = replace(cluster, replicas=tuple(r for r in cluster.replicas if r.shards[0].node != last))
    share = CARDS // REPLICAS
    profile = spec.Profile("gpu", engine="vllm", gpu_class=CLASS, tp=share, gpus_per_node=share)
    model = spec.Model("new", source="/weights/m", profiles=(profile,), scaling=spec.Scaling(1, 1))
    if not isinstance(place(model, model.profiles, room), Placed):
        raise SystemExit("nothing was placed: its figure would mean nothing")
    place_ms = _median_ms(lambda: place(model, model.profiles, room))
    return {
        "pass_cpu_ms": pass_ms,
        "placement_cpu_ms": place_ms,
        "queries": len(queries),
        "rss_mib": rss_kib(os.getpid()) // 1024,
    }


def _median_ms(work: Callable[[], object]) -> float:
    took = []
    for _ in range(ROUNDS):
        before = process_time()
        work()
        took.append((process_time() - before) * 1000)
    return round(statistics.median(took), 2)


def main(words: list[str]) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    django.setup()
    match words:
        case ["seed", nodes, tokens]:
            seed(int(nodes), Path(tokens))
        case ["measure"]:
            print(json.dumps(measure()))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
