"""What a gateway process does beside its requests: watch them, keep its table, scrape engines, move usage to the store.

Each loop runs on a period and goes on after any failure; the store is asked in two threads, so that a slow write does
not delay a revoked key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from django.db import Error as StoreError

from llmgw.core.doorbell import TABLE, Listener
from llmgw.core.ending import end
from routing import measures
from routing.journal import Batch
from routing.plane import Plane
from routing.scrape import scrape_all
from routing.store import LoadRow, Store, gateway_name
from routing.table import Contents, Table, build, settle
from tenants.keys import Grant

log = logging.getLogger(__name__)

T = TypeVar("T")

WATCH_S = 0.1
LOADS_S = 3.0
LOADS_AT_LEAST_S = 10.0
"""A replica's load row is written this often even when nothing changed, so that readers know it is alive."""
KEY_USE_S = 10.0
ORPHANS_S = 10.0
SPENT_S = 30.0
"""How often it is read what budgets have used, besides at each change of keys or catalog."""
DEMAND_S = 5.0
COLD_AGAIN_S = 0.5
"""Many who ask for one cold model are one message to the store."""
FLUSH_ROUNDS = 5
SILENT_S = 5.0
"""A look at the store that takes longer than this is said, as a failed one is."""
STORE_AWAY = (StoreError, OSError)
MEANWHILE = {
    "table": "requests are served with what is known",
    "usage": "finished requests wait in the journal",
    "load": "replicas' load is not shown meanwhile",
}


class Loops:
    def __init__(self, plane: Plane, store: Store) -> None:
        self.plane, self.store = plane, store
        self.gateway = gateway_name(os.getpid())
        self._reading = ThreadPoolExecutor(1, "gateway-read")
        self._writing = ThreadPoolExecutor(1, "gateway-write")
        self._tasks: list[asyncio.Task[None]] = []
        self._loads: dict[str, tuple[LoadRow, float]] = {}
        self._used: dict[int, float] = {}
        self._used_written_at = 0.0
        self._orphans_at = 0.0
        self._flushing = asyncio.Lock()
        self._grants: tuple[Grant, ...] = ()
        self._spent_at = float("-inf")
        self._away: set[str] = set()
        """What the store last refused. A full disk, say, takes no usage and still tells what a key may do."""

    async def start(self) -> None:
        """Read the table once, so that the first request finds it, then start every loop."""
        settings = self.plane.settings
        if self.plane.static:  # served before the store has said anything, and without it
            self._adopt(Contents(-1, (), (), (), b""))
        await self._guard("table", self.reload())
        self._every(WATCH_S, "watch", self.watch)
        self._every(settings.gateway.scrape_s, "scrape", lambda: scrape_all(self.plane))
        self._every(settings.usage.flush_s, "usage", self.flush)
        self._every(LOADS_S, "load", self.report_loads)
        if self.plane.share is not None:
            await self.plane.share.start(self.plane.limiter)
        self._tasks.append(asyncio.create_task(self._follow_table()))
        self._tasks.append(asyncio.create_task(self._follow_demand()))

    async def stop(self) -> None:
        """End the loops, hand over what the journal holds, close every connection. Bounded by the store's timeouts."""
        await end(self._tasks)
        await self._guard("usage", self.flush(last=True))
        if self.plane.share is not None:
            await self.plane.share.stop()
        await self._guard("load", self._write(self.store.forget_loads, self.gateway))
        await self.plane.adapters.close()
        await self.plane.pools.close()
        self.plane.journal.close()
        for executor in (self._reading, self._writing):
            with contextlib.suppress(*STORE_AWAY):
                await asyncio.get_running_loop().run_in_executor(executor, self.store.close)
            executor.shutdown(wait=False)

    # --- the loops ---------------------------------------------------------------------------------------------------
    async def watch(self) -> None:
        """Requests whose wait is over, and those old enough to be worth a task that sees their client leave."""
        now = time.monotonic()
        for exchange in tuple(self.plane.active):
            if exchange.deadline is not None and exchange.deadline <= now:
                exchange.overdue()
            elif exchange.news is not None and exchange.look_at is not None and exchange.look_at <= now:
                exchange.news.set()
            elif (
                not exchange.client.direct
                and exchange.watcher is None
                and exchange.body_read
                and now - exchange.started >= WATCH_S / 2
            ):
                exchange.watcher = asyncio.create_task(exchange.watch_client())
        self._notice_silence(now)
        self.plane.pools.prune(time.monotonic())

    def _notice_silence(self, now: float) -> None:
        """A database that hangs fails nothing, and no more is heard of it than of one that refuses."""
        confirmed_at = self.plane.confirmed_at
        if confirmed_at is None or "table" in self._away:
            return
        silent_s = now - confirmed_at
        if silent_s > SILENT_S + self.plane.settings.gateway.poll_s:
            self._away.add("table")
            measures.STORE_FAILURES.of("table").value += 1
            log.warning("The store has been silent for %.0f s; %s", silent_s, MEANWHILE["table"])

    async def _follow_table(self) -> None:
        bell = Listener([TABLE])
        try:
            while True:
                await bell.wait(self.plane.settings.gateway.poll_s)
                await self._guard("table", self.reload())
        finally:
            bell.close()

    async def reload(self) -> None:
        """Look whether something changed; if so, replace the table as a whole. What budgets have used is read again
        with it, and once in a while without."""
        plane = self.plane
        asked_at = time.monotonic()
        revision = await self._read(self.store.revision)
        changed = revision != plane.table.revision
        if changed:
            contents = await self._read(self.store.contents)
            self._adopt(contents)
            self._grants = contents.grants
            plane.pools.keep(plane.table.targets)
            measures.RELOADS.of().value += 1
        plane.confirmed_at = asked_at
        if changed or asked_at - self._spent_at >= SPENT_S:
            self._spent_at = asked_at
            await self._count_spent()

    def _adopt(self, contents: Contents) -> None:
        plane = self.plane
        contents = replace(contents, outside=plane.places(contents.models))
        plane.table = build(contents, plane.table, plane.rules)
        settle(plane.table, time.monotonic())

    async def _count_spent(self) -> None:
        grants, limiter = self._grants, self.plane.limiter
        budgets = {budget.budget_id: budget for grant in grants for budget in grant.budgets}
        ticket = limiter.ledger.asked()
        spent = await self._read(self.store.spent, tuple(budgets.values())) if budgets else {}
        limiter.adopt(grants, spent, ticket, time.monotonic(), time.time())

    async def flush(self, *, last: bool = False) -> None:
        """Move finished requests to the store; what it does not take stays in the journal."""
        async with self._flushing:
            now = time.monotonic()
            ledger = self.plane.limiter.ledger
            for _ in range(FLUSH_ROUNDS if last else 1):
                batches = self.plane.journal.batches()
                ledger.mark()
                for batch in batches:
                    await self._hand_over(batch)
                ledger.flushed()
                if not batches:
                    break
            if last or now - self._orphans_at >= ORPHANS_S:
                self._orphans_at = now
                for batch in self.plane.journal.orphans():
                    await self._hand_over(batch)
            if self._used and (last or now - self._used_written_at >= KEY_USE_S):
                used, self._used, self._used_written_at = self._used, {}, now
                await self._write(self.store.save_key_use, used)

    async def _hand_over(self, batch: Batch) -> None:
        try:
            records = await self._write(batch.records)
            if records:
                await self._write(self.store.save_usage, records)
        except BaseException:
            batch.give_up()
            raise
        batch.done()
        for record in records:
            if record.key is not None:
                self._used[record.key] = max(record.at, self._used.get(record.key, 0.0))

    async def _follow_demand(self) -> None:
        """Tell the store which on-demand models are asked for: at once when nothing serves one, else now and then, and
        as long as somebody waits for one or gets an answer from it."""
        plane = self.plane
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(plane.cold.wait(), DEMAND_S)
            cold = plane.cold.is_set()
            plane.cold.clear()
            models, plane.demand = plane.demand | _in_use(plane.table), set()
            if models:
                await self._guard("demand", self._write(self.store.save_demand, sorted(models), cold))
            if cold:
                await asyncio.sleep(COLD_AGAIN_S)

    async def report_loads(self) -> None:
        """Tell the control plane what this gateway sees of each replica, where that changed; of one that is drained
        each time, since its end waits for it. While the store is away all are news, so that it is asked whether it
        is back."""
        now = time.monotonic()
        table = self.plane.table
        rows = [LoadRow(target.replica, target.in_flight, None, None, None) for target in table.leaving]
        known = {target.replica: target for target in table.targets if target.outside is None}
        self._loads = {replica: kept for replica, kept in self._loads.items() if replica in known}
        for target in known.values():
            row = LoadRow(target.replica, target.in_flight, target.running, target.waiting, target.kv_used)
            kept = self._loads.get(target.replica)
            if kept is None or kept[0] != row or now - kept[1] >= LOADS_AT_LEAST_S or "load" in self._away:
                rows.append(row)
        if rows:
            await self._write(self.store.save_loads, self.gateway, rows)
            self._loads.update((row.replica, (row, now)) for row in rows if row.replica in known)

    # --- how they run ------------------------------------------------------------------------------------------------
    def _every(self, period_s: float, what: str, work: Callable[[], Awaitable[None]]) -> None:
        async def loop() -> None:
            while True:
                await asyncio.sleep(period_s)
                await self._guard(what, work())

        self._tasks.append(asyncio.create_task(loop()))

    async def _guard(self, what: str, work: Awaitable[None]) -> None:
        """The loops' boundary: a failure is said and counted, and the next round tries again."""
        try:
            await work
        except STORE_AWAY as error:
            measures.STORE_FAILURES.of(what).value += 1
            if what not in self._away:
                self._away.add(what)
                log.warning(
                    "The store does not answer (%s: %s); %s",
                    what,
                    _one_line(error),
                    MEANWHILE.get(what, "it is tried again"),
                )
        except Exception:
            log.exception("A loop of the gateway failed (%s); it goes on", what)
        else:
            if what in self._away:
                self._away.discard(what)
                log.info("The store answers again (%s)", what)
        self.plane.store_away = "table" in self._away

    async def _read(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reading, work, *args)

    async def _write(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, work, *args)


def _in_use(table: Table) -> set[str]:
    """On-demand models that somebody waits for or is answered by."""
    places = ((served, served.standing.admission) for served in table.names.values() if served.on_demand)
    return {served.name for served, admission in places if admission.waiting or admission.in_flight}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
