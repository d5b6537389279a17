"""When an endpoint that fails is left alone, for how long, and how it comes back. Pure, fed with outcomes.

    well --3 failures in a row--> ejected until T --T passes--> one probe --ok--> well
                                      ^                             |
                                      +------- failed: longer ------+

A soft failure (the engine answered 5xx) ejects only while another endpoint can serve: one bad request must not take
the last replica of a model away from everybody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FAILURES = 3
FIRST_COOLING_S = 2.0
LONGEST_COOLING_S = 60.0


@dataclass(frozen=True, slots=True)
class Health:
    """`failures` in a row; `ejections` since it last was well; `until`, monotonic, None while it is not ejected."""

    failures: int = 0
    ejections: int = 0
    until: float | None = None
    probing: bool = False
    soft: bool = True


WELL = Health()


def failed(health: Health, now: float, *, soft: bool) -> Health:
    """After one more failure. The outcome of a request sent before the ejection changes nothing."""
    if health.until is not None and not health.probing:
        return health if soft or not health.soft else replace(health, soft=False)
    failures = health.failures + 1
    softly = soft and health.soft
    if failures < FAILURES and health.ejections == 0:
        return Health(failures=failures, soft=softly)
    cooling = min(FIRST_COOLING_S * 2**health.ejections, LONGEST_COOLING_S)
    return Health(failures=failures, ejections=health.ejections + 1, until=now + cooling, soft=softly)


def abandoned(health: Health) -> Health:
    """The probe ended without saying anything about the endpoint (its client left): the next request probes."""
    return replace(health, probing=False)


def may_try(health: Health, now: float) -> bool:
    return health.until is None or (not health.probing and now >= health.until)


def tried(health: Health) -> Health:
    """A request is on its way: for an ejected endpoint this is the probe, and others wait for it."""
    return health if health.until is None else replace(health, probing=True)
