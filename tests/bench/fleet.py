"""A fleet in a store of its own, for `make bench BENCH=reconcile`, and what a pass over it costs in this process.

`python -m tests.bench.fleet seed NODES TOKENS` writes rows, and join tokens into the folder TOKENS.
`python -m tests.bench.fleet measure` prints a pass's and a placement's CPU, the queries of a pass, and memory, as JSON;
then the same with hundreds of models that find no place, fail, or would preempt others.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
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
"""Replicas of a model, each on another node. Every second model is of the highest capacity class."""
ROUNDS = 7
UNPLACED, FAILING, PREEMPTING, NEWS = 300, 100, 50, 20
"""Models without a place, each asking for something else; models whose starts fail; models that look at others'
places and may not have them; and nodes on which something changes before a pass."""
MOST_PASSES = 100
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
        model = model_name(number, place)
        replica = f"{model}-{number}"
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


def model_name(number: int, place: int) -> str:
    """Which model runs in a place of a node."""
    return f"m{number // COPIES * REPLICAS + place}"


def seed(nodes: int, tokens: Path) -> None:
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    from django.utils import timezone

    from catalog.models import Model, Profile
    from nodes.models import Node, Replica, Shard
    from nodes.state import profile_digest
    from tenants.keys import new_secret

    now = timezone.now()
    copies = Counter(model_name(number, place) for number in range(nodes) for place in range(REPLICAS))
    models = [
        Model(name=name, source="/weights/m", scaling_min=most, scaling_max=most) for name, most in copies.items()
    ]
    share = CARDS // REPLICAS
    profile = {"name": "gpu", "engine": "vllm", "gpu_class": CLASS, "tp": share, "gpus_per_node": share}
    Model.objects.bulk_create(models)
    Profile.objects.bulk_create(
        Profile(model=model, capacity_class=("standard", "guaranteed")[number % REPLICAS], **profile)
        for number, model in enumerate(Model.objects.all())
    )
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
    rss_mib = rss_kib(os.getpid()) // 1024
    return {
        "pass_cpu_ms": pass_ms,
        "placement_cpu_ms": place_ms,
        "queries": len(queries),
        "rss_mib": rss_mib,
        **_crowd(now),
    }


def _crowd(now: datetime) -> dict[str, Any]:
    """The same fleet, with models that it has no place for."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from nodes import passes
    from nodes.models import ModelStatus, Node

    wanting = [*_unplaced(), *_preempting()]
    took = [_cpu_ms(lambda: passes.run_pass(now))]
    while ModelStatus.objects.exclude(reasons=[]).count() < len(wanting):
        if len(took) > MOST_PASSES:
            raise SystemExit("some models were not told why they find no place: the figures would mean nothing")
        took.append(_cpu_ms(lambda: passes.run_pass(now)))
    _failing(now)
    for _ in range(MOST_PASSES):
        before = list(ModelStatus.objects.order_by("model").values_list("model", "reasons_at"))
        took.append(_cpu_ms(lambda: passes.run_pass(now)))
        if before == list(ModelStatus.objects.order_by("model").values_list("model", "reasons_at")):
            break
    with CaptureQueriesContext(connection) as queries:
        if passes.run_pass(now):
            raise SystemExit("a pass did something for models without a place: its figures would mean nothing")
    crowded_ms = _median_ms(lambda: passes.run_pass(now))
    news = []
    for turn in range(ROUNDS):
        names = [node_name(number) for number in range(turn, Node.objects.count(), Node.objects.count() // NEWS or 1)]
        Node.objects.filter(name__in=names).update(reserved_cores=turn + 1)
        news.append(_cpu_ms(lambda: passes.run_pass(now)))
    return {
        "crowded_first_cpu_ms": took[0],
        "crowded_worst_cpu_ms": max(took[1:]),
        "crowded_cpu_ms": crowded_ms,
        "crowded_news_cpu_ms": statistics.median(news),
        "crowded_queries": len(queries),
        "crowded_rss_mib": rss_kib(os.getpid()) // 1024,
    }


def _unplaced() -> list[str]:
    """A third asks for cards that nobody has, the others for cards that are all held; no two for the same."""
    kinds = [
        {
            "gpu_class": "b300-288g" if number % 3 == 0 else CLASS,
            "gpus_per_node": number % 8 + 1,
            "nodes": 1 + number % 2,
        }
        for number in range(UNPLACED)
    ]
    return _models("unplaced", [kind | {"reserved_cores": 1 + number} for number, kind in enumerate(kinds)])


def _preempting() -> list[str]:
    """They ask for whole nodes, half of which others of their own class hold: looked at, and never to be had."""
    asked = {"gpu_class": CLASS, "gpus_per_node": CARDS, "capacity_class": "guaranteed"}
    return _models("preempting", [asked | {"reserved_cores": 1 + number} for number in range(PREEMPTING)])


def _failing(now: datetime) -> None:
    """Half wait everywhere, half on one node, and find no place on the others."""
    from catalog.models import Model
    from nodes.models import Backoff
    from nodes.state import profile_digest

    asked = {"gpu_class": CLASS, "gpus_per_node": 1}
    _models("failing", [asked | {"reserved_cores": 1 + number} for number in range(FAILING)])
    digests = {model.name: profile_digest(model, model.profiles[0]) for model in Model.objects.snapshot()}
    waits = {"failures": 5, "next_try_at": now + timedelta(hours=1), "reason": "out of memory"}
    Backoff.objects.bulk_create(
        Backoff(
            model=name, profile="gpu", node=node_name(0) if number % 2 else "", profile_digest=digests[name], **waits
        )
        for number, name in enumerate(f"failing{number}" for number in range(FAILING))
    )


def _models(kind: str, profiles: list[dict[str, Any]]) -> list[str]:
    from catalog.models import Model, Profile

    names = [f"{kind}{number}" for number in range(len(profiles))]
    made = Model.objects.bulk_create(
        Model(name=name, source="/weights/m", scaling_min=1, scaling_max=1) for name in names
    )
    Profile.objects.bulk_create(
        Profile(model=model, name="gpu", engine="vllm", **profile)
        for model, profile in zip(made, profiles, strict=True)
    )
    return names


def _median_ms(work: Callable[[], object]) -> float:
    return statistics.median(_cpu_ms(work) for _ in range(ROUNDS))


def _cpu_ms(work: Callable[[], object]) -> float:
    before = process_time()
    work()
    return round((process_time() - before) * 1000, 2)


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
