"""What a page costs with 1,000 nodes, 8,000 cards, 2,000 replicas, 10,000 keys in 200 projects, and 100,000 requests.

One row a page, signed in as an operator: milliseconds until it is rendered and CPU of this process, both medians;
queries; bytes of the answer; and `peak_mib`, the most that answering it held at once. The aim is 150 ms (WEB-11).
LLMGW_BENCH_PAGES (comma list) narrows a run, LLMGW_BENCH_STORE keeps the seeded store in a folder for the next one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import django
import msgspec

from agent import protocol
from tests.bench import fleet, rows
from tests.bench.rig import ROOT

NODES, KEYS, PROJECTS, REQUESTS, LATELY = 1_000, 10_000, 200, 100_000, 3_000
"""LATELY of the requests ended in the last minutes, the others since midnight UTC."""
GATEWAYS, ADAPTERS, EVENTS, UNPLACED, REASONS, ROUNDS = 2, 4, 20_000, 50, 60, 9
MODELS = NODES // fleet.COPIES * fleet.REPLICAS
AIM_MS = 150
SEEDED = "seeded"

PAGES = {
    "home": "/",
    "dashboard": "/dashboard/",
    "nodes": "/nodes/",
    "nodes-by-cards": "/nodes/?sort=-gpus",
    "node": "/nodes/n0500/",
    "node-manage": "/nodes/n0500/manage/",
    "models": "/models/",
    "model": "/models/m7/",
    "model-unplaced": "/models/unplaced7/",
    "replicas": "/replicas/",
    "replicas-by-load": "/replicas/?sort=-requests",
    "replica": "/replicas/m100-500/",
    "fabrics": "/fabrics/",
    "catalog": "/catalog/",
    "keys": "/keys/",
    "projects": "/projects/",
    "limits-organisation": "/limits/organisation/1/",
    "limits-team": "/limits/team/1/",
    "limits-project": "/limits/project/1/",
    "limits-key": "/limits/key/1/",
    "requests": "/requests/",
    "requests-of-a-project": "/requests/?project=7",
    "requests-failed": "/requests/?result=failed",
    "request": "/requests/req-7/",
    "account": "/account/",
    "admin": "/admin/",
    "admin-nodes": "/admin/nodes/node/",
    "admin-replicas": "/admin/nodes/replica/",
    "admin-shards": "/admin/nodes/shard/",
    "admin-events": "/admin/nodes/event/",
    "admin-loads": "/admin/nodes/replicaload/",
    "admin-models": "/admin/catalog/model/",
    "admin-keys": "/admin/tenants/key/",
    "admin-projects": "/admin/tenants/project/",
    "admin-budgets": "/admin/tenants/budget/",
    "admin-usage": "/admin/tenants/usage/",
    "api-summary": "/api/v1/summary",
    "api-keys": "/api/v1/keys",
    "api-usage": "/api/v1/usage",
}


# --- rows -------------------------------------------------------------------------------------------------------------
def seed(folder: Path) -> None:
    fleet.seed(NODES, folder)
    rows.seed(9, keys=KEYS, projects=PROJECTS)
    now = _machines()
    _loads(now)
    _models(now)
    _requests(now)
    (folder / SEEDED).touch()


def machine(number: int) -> protocol.Inventory:
    """With its network adapters; of every fiftieth node a card is faulty."""
    told = fleet.machine(number)
    ports = (
        protocol.AdapterPort(
            number=1,
            state="ACTIVE",
            rate_gbit_s=400.0,
            link_layer="InfiniBand",
            subnet_prefix="fe80:0000:0000:0000",
            sm_lid=1,
            gids=(protocol.Gid(index=0, gid=f"fe80:0000:0000:0000:9803:9b03:00a1:{number:04x}"),),
        ),
    )
    gpus = told.gpus
    if number % 50 == 49:
        gpus = (*gpus[:-1], msgspec.structs.replace(gpus[-1], healthy=False, fault="row remap failure"))
    names = [f"mlx5_{place}" for place in range(ADAPTERS)]
    return msgspec.structs.replace(
        told,
        gpus=gpus,
        fabrics=(msgspec.structs.replace(told.fabrics[0], adapters=tuple(names)),),
        adapters=tuple(protocol.RdmaAdapter(name=name, ports=ports) for name in names),
    )


def _machines() -> datetime:
    from django.utils import timezone

    from nodes.models import Event, Node

    now = timezone.now()
    nodes = list(Node.objects.exclude(name="bench").order_by("name"))
    for number, node in enumerate(nodes):
        readings = tuple(
            protocol.GpuReading(
                uuid=fleet.card(number, index),
                memory_used_bytes=70 * 2**30,
                utilisation_percent=93.0,
                temperature_c=60.0,
                power_w=500.0,
            )
            for index in range(fleet.CARDS)
        )
        told = protocol.NodeLoad(load_1m=number / 10, cpu_percent=number % 100, memory_used_bytes=10**11, gpus=readings)
        node.inventory, node.load = msgspec.to_builtins(machine(number)), msgspec.to_builtins(told)
        node.last_seen_at = now
        node.address = f"10.0.{number // 250}.{number % 250}"
        node.state = {17: "lost", 18: "unreachable"}.get(number % 200, "ready")
        node.cordoned_at = now if number % 100 == 19 else None
    Node.objects.bulk_update(
        nodes, ["inventory", "load", "last_seen_at", "address", "state", "cordoned_at"], batch_size=100
    )
    Event.objects.bulk_create(
        (
            Event(
                at=now - timedelta(seconds=number),
                kind="ready",
                model=fleet.model_name(number % NODES, 0),
                node=fleet.node_name(number % NODES),
                replica=f"{fleet.model_name(number % NODES, 0)}-{number % NODES}",
                text=f"Replica on {fleet.node_name(number % NODES)} is ready after 42 s.",
            )
            for number in range(EVENTS)
        ),
        batch_size=1000,
    )
    return now


def _loads(now: datetime) -> None:
    """As gateways keep telling them: dated a while ahead, so that a long run does not see them grow old."""
    from nodes.models import Replica, ReplicaLoad

    ReplicaLoad.objects.all().delete()
    Replica.objects.update(weight=16)
    ReplicaLoad.objects.bulk_create(
        (
            ReplicaLoad(
                gateway=f"g{gateway}",
                replica=name,
                in_flight=number % 5,
                running=number % 5,
                waiting=0,
                kv_used=0.4,
                at=now + timedelta(hours=1),
            )
            for gateway in range(GATEWAYS)
            for number, name in enumerate(Replica.objects.values_list("name", flat=True))
        ),
        batch_size=1000,
    )


def _models(now: datetime) -> None:
    """Prices, and models without a place, each told why in lines that name nodes."""
    from catalog.models import Model, Profile
    from nodes.models import Backoff, ModelStatus
    from tenants.models import Price

    since = now - timedelta(days=30)
    names = Model.objects.exclude(name="m").values_list("name", flat=True)
    Price.objects.bulk_create(
        Price(model=name, valid_from=since, input=rows.INPUT, output=rows.OUTPUT) for name in names
    )
    unplaced = Model.objects.bulk_create(
        Model(name=f"unplaced{number}", source="/weights/m", scaling_min=1, scaling_max=1) for number in range(UNPLACED)
    )
    Profile.objects.bulk_create(
        Profile(model=model, name="gpu", engine="vllm", gpu_class="b300-288g", gpus_per_node=8) for model in unplaced
    )
    why = [
        f"{fleet.node_name(number)}, {fleet.node_name(number + 1)}, {fleet.node_name(number + 2)} and {number} more"
        f" (gpu): have {number % 8} free cards of 8 that it asks for"
        for number in range(REASONS)
    ]
    ModelStatus.objects.bulk_create(ModelStatus(model=model.name, reasons=why, reasons_at=now) for model in unplaced)
    Backoff.objects.bulk_create(
        Backoff(
            model=model.name,
            profile="gpu",
            node=fleet.node_name(number),
            failures=3,
            next_try_at=now + timedelta(hours=1),
            reason="out of memory",
        )
        for model in unplaced[:10]
        for number in range(20)
    )


def _requests(now: datetime) -> None:
    """Of random keys, each with a model of its own, as a gateway writes them, with the sums that stand beside them."""
    from routing.shapes import Record
    from routing.store import DjangoStore
    from tenants.models import Key
    from tenants.usage import midnight

    draw, store, end = random.Random(1), DjangoStore(), now.timestamp()
    day = end - midnight(now).timestamp()
    times = sorted(end - draw.random() * (min(290, day) if number < LATELY else day) for number in range(REQUESTS))
    keys = list(Key.objects.order_by("pk").values_list("pk", "project_id"))
    made = []
    for number, at in enumerate(times):
        place = min(int(draw.expovariate(1 / 300)), KEYS - 1)
        (key, project), model = keys[place], place % MODELS
        made.append(
            Record(
                request_id=f"req-{number}",
                at=at,
                project=project,
                key=key,
                route="/v1/chat/completions",
                model=f"m{model}",
                replica=f"m{model}-{model // fleet.REPLICAS * fleet.COPIES}",
                node=fleet.node_name(model // fleet.REPLICAS * fleet.COPIES),
                status=200 if number % 100 else 503,
                prompt_tokens=draw.randrange(4000),
                cached_tokens=0,
                completion_tokens=draw.randrange(800),
                first_token_ms=41.0,
                total_ms=285.0,
                cost=draw.randrange(200_000),
            )
        )
    for start in range(0, REQUESTS, 1000):
        store.save_usage(made[start : start + 1000])


# --- pages ------------------------------------------------------------------------------------------------------------
def measure() -> Iterator[dict[str, Any]]:
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    import llmgw.asgi  # noqa: F401  how a server collects garbage
    from tenants.models import User
    from tests.pages.rows import sign_in_verified

    client = Client(SERVER_NAME="127.0.0.1")
    sign_in_verified(client, User.objects.get(username="bench"))
    wanted = os.environ.get("LLMGW_BENCH_PAGES", "")
    for page in wanted.split(",") if wanted else PAGES:

        def get(url: str = PAGES[page], page: str = page) -> bytes:
            answer = client.get(url)
            if answer.status_code != 200:
                raise SystemExit(f"{page} answers {answer.status_code}: its figures would mean nothing")
            return answer.content

        content = get()
        with CaptureQueriesContext(connection) as captured:
            get()
        queries = len(captured)  # before the next request empties the log
        took = [_took(get) for _ in range(ROUNDS)]
        tracemalloc.start()
        get()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        ms, cpu_ms = (round(statistics.median(each)) for each in zip(*took, strict=True))
        yield {
            "bench": "pages",
            "page": page,
            "ms": ms,
            "cpu_ms": cpu_ms,
            "queries": queries,
            "bytes": len(content),
            "peak_mib": round(peak / 2**20, 1),
        }


def _took(get: Callable[[], object]) -> tuple[float, float]:
    began, spent = time.perf_counter(), time.process_time()
    get()
    return (time.perf_counter() - began) * 1000, (time.process_time() - spent) * 1000


def child(words: list[str]) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    django.setup()
    match words:
        case ["seed", tokens]:
            seed(Path(tokens))
        case ["measure"]:
            slow = []
            for row in measure():
                print(json.dumps(row), flush=True)
                slow += [row["page"]] if row["ms"] > AIM_MS else []
            print(json.dumps({"bench": "pages", "aim_ms": AIM_MS, "slower": slow}))
        case _:
            raise SystemExit(__doc__)


def main() -> None:
    kept = os.environ.get("LLMGW_BENCH_STORE", "")
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        home = Path(kept or folder)
        env = {**os.environ, "LLMGW_DATA_DIR": str(home / "data"), "LLMGW_LOGGING__LEVEL": "warning"}
        tokens = home / "tokens"
        steps = [["measure"]]
        if not (tokens / SEEDED).exists():
            tokens.mkdir(parents=True)
            steps.insert(0, ["seed", str(tokens)])
        for words in steps:
            done = subprocess.run([sys.executable, "-m", "tests.bench.pages", *words], env=env, cwd=ROOT)
            if done.returncode:
                raise SystemExit(done.returncode)


if __name__ == "__main__":
    child(sys.argv[1:])
