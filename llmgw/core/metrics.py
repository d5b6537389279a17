"""Prometheus metrics of this process, cheap enough for the data plane: plain numbers, turned into text when scraped.

Every metric is declared once at import, so that it is published (with its help) before its first value. Each process
counts for itself, on one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from llmgw.core import compiled

compiled.use()  # whoever imports this first decides what the cells are

from llmgw.core.cells import Buckets, Cell  # noqa: E402

REGISTRY = CollectorRegistry(auto_describe=False)
CONTENT_TYPE = exposition.CONTENT_TYPE_PLAIN_0_0_4
MAX_SERIES = 2000
"""Label sets a metric may have; what comes after is counted under `other`."""
OTHER = "other"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

declared: list[Family[Cell] | Family[Buckets] | Computed] = []
"""Every metric that exists, in order of declaration."""


T = TypeVar("T", Cell, Buckets)


class Family(Collector, Generic[T]):
    """A metric with its label sets, whose number is bounded."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...], make: Callable[[], T]) -> None:
        self.name, self.help_text, self.label_names = name, help_text, labels
        self._make: Callable[[], T] = make
        self._series: dict[tuple[str, ...], T] = {}
        if not labels:
            self._series[()] = make()
        declared.append(self)  # type: ignore[arg-type]
        REGISTRY.register(self)

    def of(self, *labels: str) -> T:
        """The series of these label values; keep it where it is used often."""
        found = self._series.get(labels)
        if found is None:
            assert len(labels) == len(self.label_names), f"{self.name} has the labels {self.label_names}"
            if len(self._series) >= MAX_SERIES:
                labels = (OTHER,) * len(labels)
            found = self._series.setdefault(labels, self._make())
        return found

    def drop(self, *labels: str) -> None:
        """Forget a series whose subject is gone."""
        self._series.pop(labels, None)

    def series(self) -> list[tuple[tuple[str, ...], T]]:
        return list(self._series.items())


class Counter(Family[Cell]):
    """Grows only. Its name ends in `_total`."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        assert name.endswith("_total"), name
        super().__init__(name, help_text, labels, Cell)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self.name, self.help_text, labels=self.label_names)
        for labels, cell in self.series():
            family.add_metric(labels, cell.value)
        yield family


class Gauge(Family[Cell]):
    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        super().__init__(name, help_text, labels, Cell)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self.name, self.help_text, labels=self.label_names)
        for labels, cell in self.series():
            family.add_metric(labels, cell.value)
        yield family


class Histogram(Family[Buckets]):
    def __init__(
        self, name: str, help_text: str, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = SECONDS
    ) -> None:
        super().__init__(name, help_text, labels, lambda: Buckets(bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.help_text, labels=self.label_names)
        for labels, buckets in self.series():
            running, pairs = 0, []
            for bound, count in zip((*map(str, buckets.bounds), "+Inf"), buckets.counts, strict=True):
                running += count
                pairs.append((bound, running))
            family.add_metric(labels, pairs, buckets.total)
        yield family


Rows = Iterable[tuple[tuple[str, ...], float]]


class Computed(Collector):
    """A gauge whose values are asked for when scraped; `source` gives (labels, value) pairs, unknown ones left out."""

    def __init__(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> None:
        self.name, self.help_text, self.label_names = name, help_text, labels
        self.source: Callable[[], Rows] = tuple
        declared.append(self)
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self.name, self.help_text, labels=self.label_names)
        for labels, value in self.source():
            family.add_metric(labels, value)
        yield family


for _own in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
    REGISTRY.register(_own)


def text() -> bytes:
    """Everything, in Prometheus' text format."""
    return exposition.generate_latest(REGISTRY)
