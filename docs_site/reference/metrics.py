"""Page of all metrics, docs/reference/metrics.md."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import Metric

from docs_site.reference.tables import table
from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.results import DraftCounts
from kvboost_edge.server.metrics import Metrics
from kvboost_edge.server.models.exposition import ServerMetrics
from kvboost_edge.tiers.base import TierStats

__all__ = ["families", "metrics_page"]

_HEAD = """# Metrics

`GET /metrics` returns these metrics in Prometheus' text format. Names that begin with `vllm:` and
`llamacpp:` are those of vLLM and llama.cpp, so that their dashboards work. Counters and histograms
count since the start of the server. [Run the server](../deploy/README.md) has a Grafana dashboard.
With replicas, metrics of an engine also have the label `replica`. The memory of each replica's
process has the labels `model_name` and `replica`, and that of the server's process has neither.
"""
_GROUPS = (
    ("kvboost:", "kvboost_edge"),
    ("vllm:", "vLLM's names"),
    ("llamacpp:", "llama.cpp's names"),
)


class _Zeros(SimpleNamespace):
    """An object with the given attributes. Every other attribute is 0."""

    def __getattr__(self, name: str) -> int:
        return 0


class _Figures(dict[str, Any]):
    """Statistics of an idle engine, which are 0 for every name."""

    def __missing__(self, name: str) -> int:
        return 0


def families() -> list[Metric]:
    """Return the metrics of a server with one model, one offload tier and one finished request."""
    figures = _Figures(
        tiers={"disk": dataclasses.asdict(TierStats(max_bytes=0))},
        state_snapshots={},
        step_counts={"+Inf": 0},
        drafts={"lookup": DraftCounts(1, 1, (1,))._asdict()},
    )
    engine: Any = SimpleNamespace(
        config=SimpleNamespace(kv_cache_bits=16),
        is_alive=lambda: True,
        paged_stats=lambda: figures,
        runner_info=SimpleNamespace(max_context=1),
    )
    admission: Any = SimpleNamespace(
        sequences=0, tokens=0, refused=0, groups=SimpleNamespace(held=0)
    )
    metrics = Metrics(engine, "model", admission)
    result: Any = _Zeros(
        finish_reason="stop",
        hit_tokens={"disk": 0},
        miss_reason="cold",
        mode=GenerationMode.PREFIX_CACHE,
        token_times_ms=(),
    )
    metrics.observe(result)
    metrics.observe_cause("none")
    models: Any = SimpleNamespace(
        all=[_Zeros(name="model", metrics=None)],
        loader=SimpleNamespace(budget=0),
        num_waiting=0,
        num_refused=0,
    )
    bodies: Any = SimpleNamespace(num_bytes=0, refused=0)
    server = ServerMetrics(models, bodies)
    server.observe_http("/", 200, 0.0)
    registries = (metrics.registry, server.registry)
    found = {one.name: one for registry in registries for one in registry.collect()}
    return [found[name] for name in sorted(found)]


def metrics_page() -> str:
    """Return the page, with a table for each prefix of metric names."""
    found = families()
    parts = [_HEAD]
    for prefix, title in _GROUPS:
        rows = [_row(one) for one in found if one.name.startswith(prefix)]
        parts.append(f"\n## {title}\n\n{table(('metric', 'type', 'labels', 'meaning'), rows)}")
    return "".join(parts)


def _row(one: Metric) -> tuple[str, str, str, str]:
    name = one.name + ("_total" if one.type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in _labels(one))
    return f"`{name}`", one.type, labels, one.documentation


def _labels(one: Metric) -> list[str]:
    samples = {label: None for sample in one.samples for label in sample.labels if label != "le"}
    return list(samples)
