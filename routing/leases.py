"""What one gateway says about a meter that several share, and what it makes of the answer. Pure; see leases.lua.

A lease is as much as this gateway expects to need in the next half second. What lies idle for a second goes back, and
at once where another gateway goes short.
"""

from __future__ import annotations

from math import ceil

from routing.ledger import Ledger
from routing.limits import Meter
from routing.over import QUOTA, SLOTS

LEASE_S = 5.0
"""What a gateway holds that says nothing for so long is everybody's again."""
MARGIN_S = 0.5
"""A lease ends here before it ends in Redis."""
TICK_S = 0.25
REPORT_S = 1.0
IDLE_S = 1.0
AHEAD_S = 0.5
SHORT_S = 0.5
"""For so long nobody asks again for what everybody together has used up."""
SETTLED_S = 3.0
"""What the store had counted so long ago every gateway has told Redis of since."""
KEPT_S = 3600
BUDGET_KEPT_S = 86400

Said = bytes | str | int | float
Answer = tuple[bytes, bytes, bytes, bytes, int, bytes]


class Lease:
    """`ask`: what requests wait for now, `least` of them the smallest. `hold`: what Redis last granted."""

    __slots__ = (
        "_again",
        "_asked",
        "_counted",
        "_drawn",
        "_drawn_at",
        "_keep",
        "_pace",
        "_paced_at",
        "_pending",
        "_pending_at",
        "_sent",
        "_sent_at",
        "_typical",
        "_wanted",
        "ask",
        "born",
        "hold",
        "least",
        "ledger",
        "meter",
        "said",
        "starts_at",
    )

    def __init__(self, meter: Meter, ledger: Ledger[Meter], now: float) -> None:
        self.meter, self.ledger = meter, ledger
        self.ask = self.least = self.hold = 0
        self._drawn, self._drawn_at = meter.drawn, now
        self._pace, self._paced_at, self._typical = 0.0, now, 0
        self._sent_at = now - REPORT_S
        self._begin()

    def _begin(self) -> None:
        """Nothing was ever said about the meter in this period."""
        self.starts_at = self.meter.starts_at
        self.said = self._sent = self._keep = self._asked = self.hold = 0
        self.born = b""
        self._wanted = self._again = False
        self._counted = 0
        self._pending: int | None = None
        self._pending_at = 0.0

    def key(self, prefix: str) -> str:
        unit, subject, number = self.meter.name
        return f"{prefix}{unit}:{subject}:{number}:{self.starts_at:.0f}"

    def need(self, amount: int) -> None:
        """A request waits for so much."""
        self.least = min(self.least, amount) if self.ask else amount
        self.ask += amount
        self._typical = amount

    def slack(self, now: float) -> int:
        meter = self.meter
        return max(meter.allowed - meter.taken - meter.reserved, 0) if now < meter.until else 0

    def due(self, now: float) -> bool:
        silent_s = now - self._sent_at
        if silent_s >= REPORT_S:
            return True
        return silent_s >= TICK_S / 2 and self.slack(now) > 0

    def gives_back(self, now: float) -> bool:
        """Another gateway goes short of what lies idle here."""
        return self._wanted and not (self.ask or self._asked) and self.slack(now) > 0

    @property
    def over(self) -> bool:
        """Nothing to say and nothing held."""
        meter = self.meter
        return not (self.ask or self.hold or meter.reserved or meter.taken != self.said)

    def rejoin(self) -> None:
        """Redis is there again, and may or may not have heard what was last said."""
        self._again = True
        self.meter.until = 0.0

    def report(self, now: float, *, leaving: bool = False) -> tuple[Said, ...]:
        """What the script is told, in its order. What is given back is out of use from here on."""
        meter = self.meter
        if meter.starts_at != self.starts_at:
            self._begin()
        slack, goal = self.slack(now), self._goal(now)
        if leaving or (self._wanted and not self.ask):
            goal = 0
        kept = slack if self.ask else min(slack, goal)
        if self.ask:
            goal = max(goal, 2 * self._typical)
        meter.allowed = meter.taken + meter.reserved + kept
        self._sent, self._sent_at, self._keep = meter.taken, now, meter.reserved + kept
        self._asked, least = max(self.ask - kept, 0), max(self.least - kept, 1)
        self.ask = self.least = 0
        budget = meter.unit >= QUOTA
        # Of what was used while Redis was away, only what has not drained or been counted by the store is news.
        news = self.ledger.uncounted(meter) if budget else ceil(meter.used_at(now))
        unsaid = min(meter.taken - self.said, news)
        return (
            self.born,
            meter.amount,
            meter.rate,
            meter.stored,
            self._settled(now),
            meter.taken,
            unsaid,
            news if budget else unsaid,
            self._keep,
            meter.reserved,
            self._asked,
            least,
            max(goal - kept, 0),
            BUDGET_KEPT_S if budget else KEPT_S,
            int(self._again),
        )

    def answered(self, answer: Answer, now: float) -> None:
        meter = self.meter
        if meter.starts_at != self.starts_at:
            return  # of a period that has ended meanwhile
        hold, used, busy, others = (float(each) for each in answer[:4])
        self._wanted, self.born, self.said, self.hold = bool(answer[4]), answer[5], self._sent, int(hold)
        self._again = False
        meter.allowed = self._sent + self.hold
        meter.until = self._sent_at + LEASE_S - MARGIN_S
        meter.others = int(busy)
        if meter.unit != SLOTS:
            known = max(used + meter.taken - self._sent, 0.0)
            meter.used, meter.at = (int(known) if meter.unit >= QUOTA else known), now
        if self.hold - self._keep < self._asked and others <= 0:
            meter.short_until = now + SHORT_S

    def _goal(self, now: float) -> int:
        """What is likely to be drawn before the next report but one."""
        meter, passed_s = self.meter, now - self._paced_at
        drawn = meter.drawn - self._drawn
        if drawn:
            self._drawn_at = now
        elif now - self._drawn_at >= IDLE_S:
            self._pace = 0.0
            return 0
        if passed_s >= TICK_S / 2:
            self._pace = (self._pace + drawn / passed_s) / 2
            self._drawn, self._paced_at = meter.drawn, now
        return max(ceil(self._pace * AHEAD_S), self._typical)

    def _settled(self, now: float) -> int:
        """What the store is known to have counted, old enough that nothing of it is news to Redis."""
        if self._pending is None:
            self._pending, self._pending_at = self.meter.stored, now
        elif now - self._pending_at >= SETTLED_S:
            self._counted, self._pending = self._pending, None
        return self._counted
