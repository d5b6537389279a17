"""One of two that want a lease, in a process of its own that a test may stop in the middle of what it does.

`act HOLDER`: takes the lease, begins to act under it, says so, waits for a line, writes, says how that ended.
`take HOLDER`: takes the lease as soon as that can be done, and says under which fence.
"""

from __future__ import annotations

import sys
import threading

from llmgw.ops.prepare import django_setup

NAME = "of a test"
TTL_S = 2.0


def act(holder: str) -> None:
    from django.db import DatabaseError, transaction
    from django.utils import timezone

    from llmgw.core import lease
    from nodes import timeline

    held = lease.acquire(NAME, ttl_s=TTL_S, holder=holder)
    assert held is not None
    try:
        with transaction.atomic():
            assert lease.advance(held)
            print("acting", flush=True)
            sys.stdin.readline()
            timeline.note("acted", f"{holder} acted", at=timezone.now())
        print("written", flush=True)
    except DatabaseError as error:
        print(f"refused: {str(error).splitlines()[0]}", flush=True)


def take(holder: str) -> None:
    from llmgw.core import lease

    pause = threading.Event()
    while not (held := lease.acquire(NAME, ttl_s=60, holder=holder)):
        pause.wait(0.2)
    print(held.fence, flush=True)


if __name__ == "__main__":
    django_setup()
    {"act": act, "take": take}[sys.argv[1]](sys.argv[2])
