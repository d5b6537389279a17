"""Uses a store in all the ways that a control plane's processes do, at once: `python -m tests.nodes.many_writers NAME`.

Agents register and beat, passes act, a page reads for long, something writes for long, a copy is made. Says `ready`,
waits for a line, and says in the end how often the store refused.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Callable

from llmgw.ops.prepare import django_setup

AGENTS, BEATS = 6, 25
LONG_S = 3.0


def main(name: str) -> int:
    django_setup()
    from django.conf import settings
    from django.db import Error, connection, transaction
    from django.utils import timezone

    from agent import protocol
    from llmgw.core import lease
    from nodes import actions, passes, timeline
    from tenants.audit import SYSTEM
    from tests.factories import inventory

    refused: list[str] = []
    pause = threading.Event()

    def agent(number: int) -> None:
        node, _ = actions.make_node(name=f"{name}-{number}", actor=SYSTEM)
        register = protocol.Register(
            node=node.name, agent_version="1", machine_id=node.name, address="127.0.0.1", inventory=inventory()
        )
        for turn in range(BEATS):
            if turn % 10 == 0:
                answer = actions.register_node(node=node, register=register, connection=node.name, now=timezone.now())
                assert isinstance(answer, protocol.Welcome)
            beat = {"load": protocol.NodeLoad(), "changed": (), "now": timezone.now()}
            assert actions.heartbeat(node=node.name, connection=node.name, **beat) == "ok"  # type: ignore[arg-type]

    def lead() -> None:
        for _ in range(BEATS):
            held = lease.acquire(lease.LEADER, ttl_s=5) or lease.current(lease.LEADER)
            if held:
                passes.run_pass(held.at, held=held)
            pause.wait(0.1)

    def read_for_long() -> None:
        with connection.cursor() as cursor:
            numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 1000)"
            cursor.execute(f"{numbers} SELECT i FROM core_lease, n")
            for _ in range(10):
                assert cursor.fetchone()
                pause.wait(LONG_S / 10)

    def write_for_long() -> None:
        with transaction.atomic():
            timeline.note("long", f"{name} begins", at=timezone.now())
            pause.wait(LONG_S)
            timeline.note("long", f"{name} ends", at=timezone.now())

    def copy() -> None:
        copied = settings.LLMGW.data_dir / f"{name}.copy"
        own = sqlite3.connect(settings.LLMGW.data_dir / "llmgw.sqlite3", timeout=20)
        own.execute("VACUUM INTO ?", [str(copied)])
        own.close()

    def watched(work: Callable[[], None]) -> None:
        try:
            work()
        except Error as error:
            refused.append(str(error))
        finally:
            connection.close()

    lease.acquire(lease.LEADER, ttl_s=5)
    connection.close()
    work: list[Callable[[], None]] = [lead, read_for_long, write_for_long, copy]
    work += [lambda number=number: agent(number) for number in range(AGENTS)]  # type: ignore[misc]
    threads = [threading.Thread(target=watched, args=(each,)) for each in work]
    print("ready", flush=True)
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(refused)} refused {refused[:2]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
