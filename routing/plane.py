"""What the requests and loops of one gateway process share."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from catalog import spec
from llmgw.config import Settings
from routing import measures, media, outside
from routing.adapters import Adapters
from routing.admission import Band
from routing.bounds import Bounds
from routing.journal import Journal
from routing.limits import Limiter
from routing.now import monotonic
from routing.openai import Refusal
from routing.pools import Pools
from routing.sharing import Share
from routing.table import EMPTY, Rules, Table

if TYPE_CHECKING:
    from routing.exchange import Exchange

STORE_RETRY_S: Final = 5
LOW_BITS: Final = 12
LOW: Final = (1 << LOW_BITS) - 1
_DIGITS: Final = [f"{number:03x}" for number in range(LOW + 1)]
"""Made once: to format a number costs more than most steps of a request."""


class Plane:
    __slots__ = (
        "_mark",
        "_number",
        "_series",
        "active",
        "adapters",
        "bands",
        "bounds",
        "cold",
        "confirmed_at",
        "cors",
        "default_band",
        "default_index",
        "demand",
        "journal",
        "limiter",
        "media",
        "pools",
        "router",
        "rules",
        "settings",
        "share",
        "static",
        "store_away",
        "table",
        "waiting_bytes",
    )

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bounds = Bounds(settings.gateway)
        self.table: Table = EMPTY
        self.confirmed_at: float | None = None
        """When the store last said that the table is current, monotonic; None before the first time."""
        self.store_away = False
        self.active: set[Exchange] = set()
        self.pools = Pools()
        self.adapters = Adapters(self.pools)
        self.journal = Journal(settings.data_dir / "journal")
        bands = settings.gateway.bands
        self.rules = Rules(tuple(Band(*each) for each in bands.items()), settings.gateway.queue_limit)
        self.bands = {name: index for index, name in enumerate(bands)}
        self.default_band = settings.gateway.default_band
        self.default_index = self.bands[self.default_band]
        self.limiter = Limiter()
        self.share = Share(settings.redis.url) if settings.redis.url else None
        self.waiting_bytes = 0
        """Of bodies whose requests wait for a place, or that come in."""
        self.demand: set[str] = set()
        """On-demand models that were asked for since the store was last told."""
        self.cold = asyncio.Event()
        """Set when one of them has no replica, so that the store hears of it at once."""
        self.cors = frozenset(origin.encode() for origin in settings.gateway.cors_origins)
        self.media = media.policy(settings.gateway.media_urls)
        self.static = _static(settings)
        """Endpoints that an operator listed."""
        self.router = bool(self.static) and not settings.gateway.auth
        """Whether it serves with no store at all: nobody's key is looked at, and where to send is in the settings."""
        self._mark = secrets.token_hex(8)
        self._number = 0
        self._series = f"req-{self._mark}-{0:05x}"
        """What ids have in common until the last digits of their count have come round."""

    def next_id(self) -> str:
        """Unique among all gateways, ever: 64 random bits of this process and a count, in an order that keeps what the
        store's index writes together."""
        self._number += 1
        low = self._number & LOW
        if low == 0:
            self._series = f"req-{self._mark}-{self._number >> LOW_BITS:05x}"
        return self._series + _DIGITS[low]

    def wanted(self, model: str, *, cold: bool) -> None:
        """Somebody asks for an on-demand model; `cold`: nothing serves it."""
        self.demand.add(model)
        if cold:
            self.cold.set()

    def places(self, models: Iterable[spec.Model]) -> tuple[outside.Outside, ...]:
        """The endpoints that llmgw does not run: those of the settings, and the catalog's external models."""
        limits = self.settings.gateway
        return self.static + outside.external(
            models,
            weight=limits.external_concurrency,
            private=limits.external_private,
            ca_file=_text(limits.external_ca_file),
        )

    def check_fresh(self, now: float) -> None:
        """Refuse (503) when there is no table yet, or none that may still be served from (GW-21)."""
        if self.router:
            return
        if self.confirmed_at is None:
            raise Refusal(
                "store_unreachable",
                "This gateway has just started and does not know any key yet. Try again in a few seconds.",
                retry_after_s=STORE_RETRY_S,
            )
        if now - self.confirmed_at > self.bounds.stale_for_s:
            raise Refusal(
                "store_unreachable",
                f"This gateway lost its store {now - self.confirmed_at:.0f} s ago and serves no longer. Try another.",
                retry_after_s=STORE_RETRY_S,
            )

    def ready(self, now: float) -> bool:
        """Whether a request has somewhere to go (GW-5)."""
        fresh = self.confirmed_at is not None and now - self.confirmed_at <= self.bounds.stale_for_s
        return (fresh or self.router) and bool(self.table.targets)

    def publish(self) -> None:
        """Make this process's figures the ones that a scrape shows."""
        measures.JOURNAL_LOST.source = lambda: [((), float(self.journal.lost))]
        measures.JOURNAL_MEMORY.source = lambda: [((), float(self.journal.in_memory))]
        measures.JOURNAL_BYTES.source = lambda: [((), float(self.journal.pending_bytes()))]
        measures.STALE.source = lambda: [((), float(self.store_away))]
        measures.IN_FLIGHT.source = lambda: [((), float(len(self.active)))]
        measures.QUEUED.source = lambda: [
            ((name,), float(standing.admission.waiting)) for name, standing in self.table.standings.items()
        ]
        measures.CAPACITY.source = lambda: [
            ((name,), float(standing.admission.capacity)) for name, standing in self.table.standings.items()
        ]
        measures.TABLE_AGE.source = self._age
        measures.ENDPOINTS.source = self._endpoints
        measures.ENDPOINT_IN_FLIGHT.source = lambda: [
            ((target.model, target.replica), float(target.in_flight)) for target in self.table.targets
        ]
        for metric, name in (
            (measures.ENDPOINT_RUNNING, "running"),
            (measures.ENDPOINT_WAITING, "waiting"),
            (measures.ENDPOINT_KV, "kv_used"),
        ):
            metric.source = lambda name=name: self._known(name)  # type: ignore[misc]

    def _age(self) -> list[tuple[tuple[str, ...], float]]:
        return [] if self.confirmed_at is None else [((), monotonic() - self.confirmed_at)]

    def _endpoints(self) -> list[tuple[tuple[str, ...], float]]:
        counts: dict[tuple[str, ...], float] = {}
        for target in self.table.targets:
            key = (target.model, "ready" if target.health.until is None else "ejected")
            counts[key] = counts.get(key, 0.0) + 1
        return list(counts.items())

    def _known(self, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
        for target in self.table.targets:
            value = getattr(target, name)
            if value is not None:
                yield (target.model, target.replica), float(value)


def _static(settings: Settings) -> tuple[outside.Outside, ...]:
    return tuple(
        place
        for each in settings.endpoints
        for place in outside.static(
            name=each.label,
            url=each.url,
            models=each.models,
            engine=each.engine,
            weight=each.weight,
            key_file=_text(each.key_file),
            ca_file=_text(settings.gateway.external_ca_file),
        )
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
