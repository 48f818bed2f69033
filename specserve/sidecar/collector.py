"""Readings -> Prometheus text. Yields a family only when something of it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve.metric_families import FAMILIES, Readings

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The one format that is served, whatever is asked for: every Prometheus reads it, and names stay
as they are."""


class ReadingsCollector(Collector):
    """Turns the readings of the moment into metric families, in the order of the table."""

    def __init__(self, readings: Callable[[], Readings], *, model_name: str) -> None:
        self._readings, self._model_name = readings, model_name

    def describe(self) -> list[Metric]:
        """Empty: what is exported depends on what is known."""
        return []

    def collect(self) -> Iterator[Metric]:
        """A family with at least one reading; readings that the table does not know are a mistake
        and left out."""
        by_family: dict[str, list[tuple[dict[str, str], float]]] = {}
        for reading, value in self._readings().items():
            by_family.setdefault(reading.family, []).append((dict(reading.labels), value))
        for name, family in FAMILIES.items():
            known = [s for s in by_family.get(name, ()) if s[0].keys() == set(family.labels)]
            if not known:
                continue
            metric = _KINDS[family.kind](name, family.help, labels=(*family.labels, "model_name"))
            for labels, value in known:
                metric.add_metric(
                    [*(labels[label] for label in family.labels), self._model_name], value
                )
            yield metric


def exposition(readings: Callable[[], Readings], *, model_name: str) -> Callable[[], bytes]:
    """A function that renders the readings of the moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReadingsCollector(readings, model_name=model_name))
    return lambda: generate_latest(registry)
