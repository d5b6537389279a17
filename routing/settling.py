"""(8) The end of a request: one record in the journal, the counts, and what was reserved given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from routing import measures, openai
from routing.explain import Explained
from routing.now import epoch, monotonic
from routing.shapes import Record, Tokens
from tenants import money

if TYPE_CHECKING:
    from routing.exchange import Exchange

SHOWN: Final = 10
"""Attempts, and models passed over, in an explanation."""
LONGEST_NAME: Final = 200
LONGEST_ROUTE: Final = 60


def settle(exchange: Exchange, status: int, code: str, tokens: Tokens, streamed: bool) -> None:
    """Called once a request, before the last byte of its answer is sent. Without a key nothing is recorded."""
    now = monotonic()
    served, target, grant = exchange.served, exchange.target, exchange.grant
    model = served.name if served is not None else ""
    path, started, first = exchange.path, exchange.started, exchange.first_byte_at
    route = path if path in openai.KNOWN_ROUTES else "other"
    total = now - started
    meters = measures.of_model(model)
    meters.finished(route, status, total)
    meters.used(tokens, None if first is None or not streamed else first - started, total)
    if grant is None:
        return
    shown = target if target is not None and target.model == model else None  # perhaps another's of the chain
    wall = epoch()
    prompt, cached, completion = tokens.prompt, tokens.cached, tokens.completion
    cost = _cost(exchange, prompt, cached, completion, wall)
    try:
        exchange.plane.journal.append(
            Record(
                request_id=exchange.request_id,
                at=wall,
                project=grant.project_id,
                key=grant.key_id,
                user=grant.user_id,
                route=path[:LONGEST_ROUTE] if route == "other" and path.isprintable() else route,
                model=model,
                replica=shown.replica if shown is not None else "",
                node=shown.node if shown is not None else "",
                status=status,
                error_code=code,
                streamed=streamed,
                prompt_tokens=prompt,
                cached_tokens=cached,
                completion_tokens=completion,
                reasoning_tokens=tokens.reasoning,
                estimated=tokens.estimated,
                queue_ms=exchange.queue_ms,
                first_token_ms=None if first is None else _ms(first - started),
                total_ms=_ms(total),
                adapter=served.adapter if served is not None else "",
                cost=cost,
                band=exchange.band,
                explained=_explained(exchange),
            )
        )
    finally:
        hold = exchange.hold
        if hold is not None:
            if target is None:
                hold.release(now)
            else:
                hold.settle((prompt or 0) + (completion or 0), cost, now)


def _ms(seconds: float) -> float:
    """To the microsecond. `round` writes and reads a decimal to say the same."""
    return int(seconds * 1e6 + 0.5) / 1e3


def _cost(
    exchange: Exchange, prompt: int | None, cached: int | None, completion: int | None, wall: float
) -> int | None:
    """None without a price, or without any count to price."""
    served = exchange.served
    if served is None or not served.prices or prompt is completion is None:
        return None
    price = served.price(wall)
    if price is None:
        return None
    return money.cost(price, prompt=prompt or 0, cached=cached or 0, completion=completion or 0)


def _explained(exchange: Exchange) -> Explained | None:
    """Nothing where nothing was decided: its own name, one endpoint, no wait, no failure."""
    served = exchange.served
    if served is None:
        return Explained(asked=exchange.name[:LONGEST_NAME]) if exchange.name else None
    asked = exchange.name if exchange.name != served.allowed_as else ""
    if not (asked or exchange.considered or exchange.failures or exchange.skipped or exchange.position):
        return None
    return Explained(
        asked=asked[:LONGEST_NAME],
        band=exchange.band,
        routing_profile=served.standing.chooser.profile,
        queued=exchange.position > 0,
        position=exchange.position,
        loading=exchange.loaded,
        reserved_tokens=exchange.reserved_tokens,
        affinity=exchange.affinity,
        considered=exchange.considered,
        attempts=exchange.failures[:SHOWN],
        skipped=exchange.skipped[:SHOWN],
    )
