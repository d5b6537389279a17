"""What a shard needs before it can start, brought here: weights and adapters, each looked at (AG-14, CAT-30)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from agent import launching, runs
from agent.engines import ENGINES
from agent.engines.base import is_repository
from agent.host import Host
from agent.protocol import Progress
from agent.runs import Run
from agent.weights import FetchError, Told, Weights

log = logging.getLogger(__name__)


async def fetch(run: Run, weights: Weights, host: Host, told: Told) -> str | None:
    """Fill in where the run's weights and adapters are; why it cannot be served, if not. Raises FetchError."""
    spec = run.shard.spec
    run.weights = await _bring(spec.engine, spec.source, weights, _logging(run, told))
    cards = tuple(card for uuid in spec.gpus if (card := host.card(uuid)))
    if not _is_elsewhere(spec.engine, spec.source):
        reason = await asyncio.to_thread(launching.look_at_weights, spec.engine, run.weights, cards)
        if reason:
            return reason
    for adapter in () if spec.max_loaded_adapters is not None else spec.adapters:
        try:
            path = await _bring(spec.engine, adapter.source, weights, told)
        except FetchError as error:
            raise FetchError(f"adapter {adapter.name}: {error}") from None
        if not _is_elsewhere(spec.engine, adapter.source):
            look = launching.look_at_adapter
            reason = await asyncio.to_thread(look, spec.engine, adapter.name, path, run.weights)
            if reason:
                return reason
        run.adapters.append(path)
    return None


async def _bring(engine: str, source: str, weights: Weights, told: Told) -> Path:
    return Path(source) if _is_elsewhere(engine, source) else await weights.ensure(source, told)


def _is_elsewhere(engine: str, source: str) -> bool:
    """Whether the engine brings it by itself."""
    return ENGINES[engine].repositories and is_repository(source)


def _logging(run: Run, told: Told) -> Callable[[Progress], None]:
    """`told`, and every tenth part of the way in the log (CAT-31)."""

    def progressed(progress: Progress) -> None:
        told(progress)
        if progress.done_bytes is not None and progress.total_bytes:
            percent = 100 * progress.done_bytes // progress.total_bytes
            if percent >= run.logged_percent + 10:
                run.logged_percent = percent
                log.info("%s: %d %% of the weights fetched", runs.name(run), percent)

    return progressed
