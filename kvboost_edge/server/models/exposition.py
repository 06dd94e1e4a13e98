"""Prometheus exposition of the metrics of all models, HTTP requests and the process."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvboost_edge.host.memory import process_peak, process_rss
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.work.admission import Bodies

__all__ = ["CONTENT_TYPE", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HTTP = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)

_GAUGES = {
    "model_loaded": "1 while the model is loaded.",
    "model_bytes": "Memory of the weights, pool and recurrent state.",
    "model_in_use": "Requests that use the model or wait for it.",
}
_COUNTERS = {
    "model_loads": "Times the model was loaded on demand.",
    "model_load_failures": "Times loading the model failed.",
    "model_unloads": "Times the model was unloaded.",
}


class ServerMetrics:
    """All metrics of a server.

    `observe_http` is cheap. `render` reads statistics from the engines.
    """

    def __init__(self, models: Models, bodies: Bodies) -> None:
        self._models = models
        self.registry = CollectorRegistry()
        self._http = Counter(
            "kvboost:http_requests", "HTTP responses.", ["route", "status"], registry=self.registry
        )
        self._http_seconds = Histogram(
            "kvboost:http_request_seconds",
            "Duration of HTTP requests.",
            ["route"],
            buckets=_HTTP,
            registry=self.registry,
        )
        self.registry.register(_ModelsCollector(models, bodies))

    def observe_http(self, route: str, status: int, seconds: float) -> None:
        """Count one HTTP response. The status is 499 if the client disconnected before the
        response.
        """
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        registries = [
            self.registry,
            *(one.metrics.registry for one in self._models.all if one.metrics is not None),
        ]
        merged = CollectorRegistry()
        merged.register(_Merged(registries))
        return generate_latest(merged)


class _Merged(Collector):
    """Collector that merges metric families of the same name from several registries.

    The samples of the registries differ in their labels.
    """

    def __init__(self, registries: list[CollectorRegistry]) -> None:
        self._registries = registries

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


class _ModelsCollector(Collector):
    """Collector of metrics about the process and each model."""

    def __init__(self, models: Models, bodies: Bodies) -> None:
        self._models = models
        self._bodies = bodies

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        models = self._models
        figures = {
            "kvboost:process_resident_bytes": ("Resident memory.", process_rss()),
            "kvboost:process_peak_bytes": ("Peak resident memory.", process_peak()),
            "kvboost:body_bytes": (
                "Bytes of request bodies in memory.",
                self._bodies.num_bytes,
            ),
            "kvboost:models_max_bytes": (
                "Memory limit of all models.",
                models.loader.budget,
            ),
            "kvboost:models_waiting": (
                "Requests waiting for a model to load.",
                models.num_waiting,
            ),
        }
        for name, (text, value) in figures.items():
            yield GaugeMetricFamily(name, text, value=value)
        refused = models.num_refused + self._bodies.refused
        yield CounterMetricFamily(
            "kvboost:server_refused", "Requests refused before they reached a model.", value=refused
        )
        for name, text in _GAUGES.items():
            yield _by_model(
                GaugeMetricFamily(f"kvboost:{name}", text, labels=["model_name"]), models, name
            )
        for name, text in _COUNTERS.items():
            yield _by_model(
                CounterMetricFamily(f"kvboost:{name}", text, labels=["model_name"]), models, name
            )


def _by_model(family: GaugeMetricFamily | CounterMetricFamily, models: Models, name: str) -> Metric:
    for one in models.all:
        figures = {
            "model_loaded": one.state is not None,
            "model_bytes": one.num_bytes,
            "model_in_use": one.in_use,
            "model_loads": one.num_loads,
            "model_load_failures": one.num_failures,
            "model_unloads": one.num_unloads,
        }
        family.add_metric([one.name], float(figures[name]))
    return family
