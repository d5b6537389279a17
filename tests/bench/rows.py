"""The rows that a measured gateway works with, and what must be there after it.

`python -m tests.bench.rows seed PORT [KEYS PROJECTS MODELS ENDPOINTS LIMITED]` prints a key and its engine's key, then,
where there are more, lines of keys and their models. LIMITED: 0 nothing, 1 projects have budgets and models prices,
2 keys and projects have rates too. `… verify REQUESTS LIMITED` fails unless each request left all that it should.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime

import django

CALLERS = 100
"""Keys that are printed at most, each with a model of its own as far as there are some."""
PER_MINUTE, TOKENS_PER_MINUTE, AT_ONCE = 2_000_000_000, 10**12, 100_000
BUDGET = 10**15
INPUT, OUTPUT = 50_000_000, 150_000_000
"""0.50 and 1.50 a million tokens."""
SLOTS = 2048
RATES = {"requests_per_minute": PER_MINUTE, "tokens_per_minute": TOKENS_PER_MINUTE, "max_concurrent": AT_ONCE}


def seed(
    port: int, keys: int = 1, projects: int = 1, models: int = 1, endpoints: int = 1, limited: int = 1
) -> list[str]:
    """Budgets and prices, and limits if so, that are all counted and never reached. Every endpoint is the engine at
    `port`."""
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    from catalog.models import Model
    from llmgw.core.models import Secret
    from nodes.engine_keys import SECRET_NAME, engine_key
    from nodes.models import Node, NodeState, Replica, Shard
    from tenants import actions
    from tenants.audit import SYSTEM
    from tenants.keys import new_secret
    from tenants.models import Budget, Key, Price, Project

    owner = actions.make_operator(username="bench", password="bench", actor=SYSTEM)
    project = actions.make_default_tree(owner=owner, actor=SYSTEM)
    key, secret = actions.make_key(project=project, name="bench", actor=SYSTEM)
    rates = RATES if limited > 1 else {}
    for subject in (key, project) if limited > 1 else ():
        actions.set_limits(subject=subject, values=RATES, actor=SYSTEM)
    since = datetime(2020, 1, 1, tzinfo=UTC)
    if limited:
        actions.make_budget(subject=project, unit="money", amount=BUDGET, period="month", actor=SYSTEM)
        actions.set_price(model="m", valid_from=since, input=INPUT, output=OUTPUT, actor=SYSTEM)

    made = [Project(team=project.team, name=f"p{number}", slug=f"p{number}", **rates) for number in range(1, projects)]
    every = [project, *Project.objects.bulk_create(made)]
    Budget.objects.bulk_create(Budget(project=each, unit="money", amount=BUDGET, period="month") for each in every[1:])
    secrets = [new_secret() for _ in range(1, keys)]
    Key.objects.bulk_create(
        Key(project=every[number % projects], name=f"k{number}", prefix=one.prefix, digest=one.digest, **rates)
        for number, one in enumerate(secrets, 1)
    )
    names = ["m", *(f"m{number}" for number in range(1, models))]
    Model.objects.bulk_create(Model(name=name) for name in names)
    Price.objects.bulk_create(Price(model=name, valid_from=since, input=INPUT, output=OUTPUT) for name in names[1:])
    node = Node.objects.create(name="bench", state=NodeState.READY, address="127.0.0.1")
    replicas = [
        Replica(
            name=f"{names[number % models]}-{number // models + 1}",
            model=names[number % models],
            profile="cpu",
            engine="vllm",
            weight=SLOTS,
            state="ready",
        )
        for number in range(endpoints)
    ]
    Replica.objects.bulk_create(replicas)
    Shard.objects.bulk_create(Shard(replica=each, node=node, state="ready", port=port) for each in replicas)
    callers = [f"{one.text} {names[number % models]}" for number, one in enumerate(secrets[: CALLERS - 1], 1)]
    return [f"{secret} {engine_key(Secret.named(SECRET_NAME), 'm-1')}", *callers]


def verify(requests: int, limited: int = 2) -> None:
    from django.db.models import Count, Sum

    from tenants.models import Usage, UsageSlot

    rows = Usage.objects.filter(status=200).aggregate(count=Count("pk"), priced=Count("cost"), cost=Sum("cost"))
    told = Usage.objects.filter(status=200, explained__isnull=False).count()
    slots = UsageSlot.objects.aggregate(count=Sum("requests"), cost=Sum("cost"), failed=Sum("failed"))
    count = slots["count"] - slots["failed"]
    expected = requests if limited else 0
    if (
        not requests == rows["count"] == count
        or not expected == rows["priced"] == told
        or (rows["cost"] or 0) != slots["cost"]
    ):
        sys.exit(f"{requests} requests were answered; rows {rows}, explained {told}, slots {slots}")


def main(words: list[str]) -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    django.setup(set_prefix=False)
    match words:
        case ["seed", *numbers]:
            print("\n".join(seed(*map(int, numbers))))
        case ["verify", *numbers]:
            verify(*map(int, numbers))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
