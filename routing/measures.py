"""The gateway's own metrics (OBS-1). Labels are bounded: names of published models, known routes, fixed words."""

from __future__ import annotations

from typing import Final

from llmgw.core.cells import Cell
from llmgw.core.metrics import Computed, Counter, Histogram
from routing.shapes import Tokens

TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

REQUESTS = Counter(
    "llmgw_requests_total",
    "Finished requests by model, route and HTTP status (499: the client left).",
    ("model", "route", "status"),
)
ERRORS = Counter("llmgw_request_errors_total", "Requests that ended with an error of the gateway, by code.", ("code",))
DURATION = Histogram("llmgw_request_seconds", "Time from a request's headers to the end of its answer.", ("model",))
FIRST_TOKEN = Histogram(
    "llmgw_first_token_seconds", "Time from a streamed request's headers to its first byte (TTFT).", ("model",)
)
PER_TOKEN = Histogram(
    "llmgw_token_seconds", "Mean time per output token of a stream after its first (TPOT).", ("model",), TOKEN_SECONDS
)
TOKENS = Counter(
    "llmgw_tokens_total", "Tokens by model and kind: prompt, cached (part of prompt), completion.", ("model", "kind")
)
ESTIMATED = Counter("llmgw_usage_estimated_total", "Requests whose usage the engine did not say, by model.", ("model",))
ODD = Counter("llmgw_usage_odd_total", "Requests whose usage was impossible and was clamped, by model.", ("model",))
RETRIES = Counter(
    "llmgw_retries_total",
    "Attempts made again elsewhere because one failed before the first byte, by model.",
    ("model",),
)
FALLBACKS = Counter(
    "llmgw_fallbacks_total", "Times a model could not serve and its next fallback was tried, by model.", ("model",)
)
REOPENED = Counter(
    "llmgw_connections_reopened_total", "Kept-alive connections that an engine had closed, opened again for a request."
)
EJECTIONS = Counter(
    "llmgw_ejections_total", "Times an endpoint was left alone because it kept failing, by replica.", ("replica",)
)
SCRAPE_FAILURES = Counter(
    "llmgw_scrape_failures_total", "Times an engine's metrics could not be read, by replica.", ("replica",)
)
STORE_FAILURES = Counter(
    "llmgw_store_failures_total", "Times the store could not be reached, by what for: table, usage, load.", ("what",)
)
RELOADS = Counter("llmgw_table_reloads_total", "Times keys, catalog and endpoints were read anew.")
JOURNAL_LOST = Computed("llmgw_journal_lost_records", "Usage records that neither disk nor memory could take.")
JOURNAL_MEMORY = Computed("llmgw_journal_memory_records", "Usage records kept in memory because the disk takes none.")
JOURNAL_BYTES = Computed("llmgw_journal_pending_bytes", "Size of the journal on disk that the store does not have yet.")
TABLE_AGE = Computed(
    "llmgw_table_age_seconds", "Time since the store last confirmed what this gateway knows; grows while it is away."
)
LIMITS_ALONE = Computed(
    "llmgw_limits_alone",
    "1 while Redis cannot be reached and each gateway enforces limits and budgets by itself; absent without Redis.",
)
STALE = Computed("llmgw_table_stale", "1 while the store cannot be reached and requests are served with what is known.")
IN_FLIGHT = Computed("llmgw_requests_in_flight", "Requests that are being read, tried or answered now.")
QUEUED = Computed("llmgw_requests_waiting", "Requests that wait for room or for a replica, by model.", ("model",))
CAPACITY = Computed("llmgw_model_capacity", "Requests of a model that may be in flight at once.", ("model",))
ENDPOINTS = Computed(
    "llmgw_endpoints", "Endpoints in this gateway's table by model and state: ready or ejected.", ("model", "state")
)
ENDPOINT_IN_FLIGHT = Computed(
    "llmgw_endpoint_in_flight", "Requests of this gateway that an endpoint works on.", ("model", "replica")
)
ENDPOINT_RUNNING = Computed(
    "llmgw_endpoint_running",
    "Requests running as the engine says; absent when unknown.",
    ("model", "replica"),
)
ENDPOINT_WAITING = Computed(
    "llmgw_endpoint_waiting", "Requests waiting in an engine; absent when unknown.", ("model", "replica")
)
ENDPOINT_KV = Computed(
    "llmgw_endpoint_kv_used_ratio", "Used part of an engine's KV cache; absent when unknown.", ("model", "replica")
)


class Meters:
    """The series of one model, found once instead of at each request."""

    __slots__ = ("_cached", "_completion", "_duration", "_finished", "_model", "_prompt")

    def __init__(self, model: str) -> None:
        self._model = model
        self._finished: dict[tuple[str, int], Cell] = {}
        self._duration = DURATION.of(model)
        self._prompt, self._cached = TOKENS.of(model, "prompt"), TOKENS.of(model, "cached")
        self._completion = TOKENS.of(model, "completion")

    def finished(self, route: str, status: int, seconds: float) -> None:
        cell = self._finished.get((route, status))
        if cell is None:
            cell = self._finished[route, status] = REQUESTS.of(self._model, route, str(status))
        cell.value += 1
        self._duration.observe(seconds)

    def used(self, tokens: Tokens, first_s: float | None, total_s: float) -> None:
        """`first_s`: of a stream, when its first byte came; None for others."""
        self._prompt.value += tokens.prompt or 0
        self._cached.value += tokens.cached or 0
        self._completion.value += tokens.completion or 0
        if tokens.estimated:
            ESTIMATED.of(self._model).value += 1
        if tokens.odd:
            ODD.of(self._model).value += 1
        if first_s is not None:
            FIRST_TOKEN.of(self._model).observe(first_s)
            if tokens.completion and tokens.completion > 1:
                PER_TOKEN.of(self._model).observe((total_s - first_s) / (tokens.completion - 1))


_meters: Final[dict[str, Meters]] = {}


def of_model(model: str) -> Meters:
    """`model`: a published name, or empty where none was found."""
    found = _meters.get(model)
    if found is None:
        found = _meters[model] = Meters(model)
    return found
