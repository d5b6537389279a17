from __future__ import annotations

import importlib
import pkgutil

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import routing
from llmgw.core import metrics
from llmgw.core.metrics import OTHER, Computed, Counter, Gauge, Histogram
from tests.routing.gateways import Running


def scrape(response: httpx.Response) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        found.setdefault(family.name, {})
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def test_every_metric_defined_in_code_is_in_a_real_scrape_with_its_help(gateway: Running) -> None:
    for module in pkgutil.iter_modules(routing.__path__):
        importlib.import_module(f"routing.{module.name}")
    text = (await gateway.http.get("/metrics")).text
    for each in metrics.declared:
        if not each.name.startswith("llmgw_"):
            continue  # made by a test of this module
        assert f"# HELP {each.name} {each.help_text}" in text, each.name
    names = [each.name for each in metrics.declared if each.name.startswith("llmgw_")]
    assert len(set(names)) == len(names) > 20


async def test_requests_tokens_times_and_errors_are_counted(gateway: Running) -> None:
    def of(name: str, **labels: str) -> float:
        return before_after.get(name, {}).get(tuple(sorted(labels.items())), 0.0)

    before_after = scrape(await gateway.http.get("/metrics"))
    labels = {"model": "m", "route": "/v1/chat/completions", "status": "200"}
    requests = of("llmgw_requests_total", **labels)
    completion = of("llmgw_tokens_total", model="m", kind="completion")
    unknown = of("llmgw_request_errors_total", code="model_unknown")
    streams = of("llmgw_first_token_seconds_count", model="m")
    await gateway.chat()
    await gateway.chat({"stream": True, "max_tokens": 5})
    await gateway.chat({"model": "q"})
    before_after = scrape(await gateway.http.get("/metrics"))
    assert of("llmgw_requests_total", **labels) == requests + 2
    assert of("llmgw_tokens_total", model="m", kind="completion") == completion + 45
    assert of("llmgw_request_errors_total", code="model_unknown") == unknown + 1
    assert of("llmgw_first_token_seconds_count", model="m") == streams + 1
    assert of("llmgw_endpoints", model="m", state="ready") == 1
    assert of("llmgw_endpoint_in_flight", model="m", replica="m-1") == 0
    assert of("llmgw_requests_in_flight") == 0


async def test_names_that_clients_make_up_are_no_labels(gateway: Running) -> None:
    for number in range(5):
        await gateway.chat({"model": f"made-up-{number}"}, path=f"/v1/invented/{number}")
    text = (await gateway.http.get("/metrics")).text
    assert "made-up" not in text
    assert "invented" not in text


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> str:
    return f"test_{request.node.name}"


def test_label_sets_are_bounded(fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_SERIES", 2)
    counter = Counter(f"{fresh}_total", "A test's.", ("name",))
    for name in ("a", "b", "c", "d", "a"):
        counter.of(name).value += 1
    assert {labels: cell.value for labels, cell in counter.series()} == {("a",): 2, ("b",): 1, (OTHER,): 2}
    counter.drop("a")
    assert len(counter.series()) == 2


def test_each_kind_is_shown_as_prometheus_wants_it(fresh: str) -> None:
    gauge = Gauge(f"{fresh}_gauge", "A test's.")
    gauge.of().value = 7
    histogram = Histogram(f"{fresh}_seconds", "A test's.", bounds=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 3.0):
        histogram.of().observe(value)
    computed = Computed(f"{fresh}_computed", "A test's.", ("name",))
    computed.source = lambda: [(("x",), 2.0)]
    text = metrics.text().decode()
    for line in (
        f"{fresh}_gauge 7.0",
        f'{fresh}_seconds_bucket{{le="0.1"}} 2.0',
        f'{fresh}_seconds_bucket{{le="1.0"}} 3.0',
        f'{fresh}_seconds_bucket{{le="+Inf"}} 4.0',
        f"{fresh}_seconds_count 4.0",
        f"{fresh}_seconds_sum 3.65",
        f'{fresh}_computed{{name="x"}} 2.0',
    ):
        assert line in text
