"""Several gateways share limits and budgets through Redis by leases (GW-34): no request asks Redis by itself.

One task talks to Redis: for requests that wait because a lease is used up, all in one call, and every quarter of a
second to report, renew and give back. While Redis cannot be reached, this process enforces with what it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmgw.core.ending import end
from routing import measures
from routing.leases import LEASE_S, SHORT_S, TICK_S, Answer, Lease, Said
from routing.limits import Account, Hold, Limiter, Meter

if TYPE_CHECKING:
    import redis.asyncio
    from redis.commands.core import AsyncScript

# Redis's client is imported where it is used: it takes a third of a second, and most installations have no Redis.

log = logging.getLogger(__name__)

PREFIX = "llmgw:limit:"
SCRIPT = Path(__file__).with_name("leases.lua").read_text()
CALL_S = 0.4
"""How long Redis may take for one call."""
MORE_S = 0.7
"""How long a request waits for more of what all gateways share: twice as long as idle leases take to come back."""
AGAIN_S = 0.1
RETRY_S = 1.0
QUIET_S = 2.0
"""With nothing to say, Redis is asked so often whether it is there."""
SWEEP_S = 30.0
FORGET_S = 600
"""Redis forgets a gateway that has held nothing for so long."""
METERS_A_CALL = 100


class Share:
    """`away`: whether each gateway enforces alone because Redis cannot be reached."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = f"g:{secrets.token_hex(6)}"
        self._limiter = Limiter()
        self._leases: dict[Meter, Lease] = {}
        self._active: set[Lease] = set()
        self._asking: set[Lease] = set()
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._client: redis.asyncio.Redis | None = None
        self._script: AsyncScript | None = None
        self._unreachable: tuple[type[Exception], ...] = (OSError,)
        self._joined = False
        self.away = False
        self._ticked_at = self._heard_at = self._swept_at = time.monotonic()

    async def start(self, limiter: Limiter) -> None:
        """From now on `limiter` shares, as soon as Redis answers; waits a moment for that."""
        import redis
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._limiter = limiter
        self._unreachable = (redis.RedisError, OSError)
        self._client = redis.asyncio.Redis.from_url(
            self._url, socket_timeout=CALL_S, socket_connect_timeout=CALL_S, retry=Retry(NoBackoff(), 1)
        )
        self._script = self._client.register_script(SCRIPT)
        measures.LIMITS_ALONE.source = lambda: [((), float(self.away))]
        await self._round()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Give back what is not in use. Bounded by CALL_S a call."""
        if self._task is not None:
            await end([self._task])
        if self._joined:
            with contextlib.suppress(*self._unreachable):
                await self._say(self._active, leaving=True)
        self._limiter.share(False)
        if self._client is not None:
            await self._client.aclose()

    async def reserve(self, account: Account, tokens: int, cost: int) -> Hold:
        """After `try_reserve` gave None: ask for more of what all share and reserve that, or raise Over."""
        now = time.monotonic()
        end = now + MORE_S
        again = False
        while True:
            hold = account.try_reserve(tokens, cost, now)
            if hold is not None:
                return hold
            lacking = account.lacking(tokens, cost, now)
            if now >= end:
                for meter, _ in lacking:  # others would have given back by now what they do not use
                    meter.short_until = now + SHORT_S
                continue
            if again:
                await asyncio.sleep(AGAIN_S)
            again = True
            for meter, need in lacking:
                lease = self._lease(meter, now)
                lease.need(need)
                self._asking.add(lease)
            self._wake.set()
            try:
                async with asyncio.timeout(MORE_S):
                    await self._answered.wait()
            except TimeoutError:
                self._lost("it does not answer in time")
            now = time.monotonic()

    # --- the task ----------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self._joined else RETRY_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._round()
            except Exception:
                log.exception("Sharing limits among gateways failed; each enforces them for itself until it works")
                self._lost("sharing failed")

    async def _round(self) -> None:
        """The boundary to Redis: whatever fails there, requests are decided here."""
        waiting, self._answered = self._answered, asyncio.Event()
        try:
            if not self._joined:
                await self._join()
            await self._talk()
        except self._unreachable as error:
            self._lost(" ".join(str(error).split())[:200] or type(error).__name__)
        finally:
            waiting.set()

    async def _join(self) -> None:
        await self._ping()
        self._joined = True
        now = time.monotonic()
        for lease in self._leases.values():
            lease.rejoin()
        self._limiter.share(True)
        self._sweep(now)
        if self.away:
            log.info("Redis answers again: limits and budgets are shared among gateways")
        self.away = False

    async def _talk(self) -> None:
        now = time.monotonic()
        due, self._asking = self._asking, set()
        if now - self._ticked_at >= TICK_S / 2:
            self._ticked_at = now
            if now - self._swept_at >= SWEEP_S:
                self._sweep(now)
            self._active = {lease for lease in self._active if not lease.over}
            due |= {lease for lease in self._active if lease.due(now)}
        while due:
            await self._say(due)
            due = {lease for lease in due if lease.gives_back(now)}
        if now - self._heard_at >= QUIET_S:
            await self._ping()

    async def _say(self, leases: Iterable[Lease], *, leaving: bool = False) -> None:
        assert self._script is not None
        everything = list(leases)
        for first in range(0, len(everything), METERS_A_CALL):
            some = everything[first : first + METERS_A_CALL]
            now = time.monotonic()
            said: list[Said] = [self._name, LEASE_S, FORGET_S]
            for lease in some:
                said += lease.report(now, leaving=leaving)
            answers = await self._script(keys=[lease.key(PREFIX) for lease in some], args=said)
            self._heard_at = now = time.monotonic()
            for lease, answer in zip(some, cast("list[Answer]", answers), strict=True):
                lease.answered(answer, now)

    async def _ping(self) -> None:
        assert self._client is not None
        await self._client.ping()
        self._heard_at = time.monotonic()

    def _lost(self, why: str) -> None:
        self._joined = False
        self._limiter.share(False)
        if not self.away:
            self.away = True
            log.warning("Redis does not share limits and budgets (%s); each gateway enforces them for itself", why)

    def _lease(self, meter: Meter, now: float) -> Lease:
        lease = self._leases.get(meter)
        if lease is None:
            lease = self._leases[meter] = Lease(meter, self._limiter.ledger, now)
        self._active.add(lease)
        return lease

    def _sweep(self, now: float) -> None:
        """Find what was used without a lease, and forget meters that are gone."""
        self._swept_at = now
        meters = self._limiter.meters
        self._leases = {
            meter: lease
            for meter, lease in self._leases.items()
            if lease in self._active or meters.get(meter.name) is meter
        }
        for meter in meters.values():
            lease = self._leases.get(meter)
            if meter.reserved or meter.taken != (0 if lease is None else lease.said):
                self._lease(meter, now)
