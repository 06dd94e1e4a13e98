"""Prometheus metrics, under the names of vLLM and llama.cpp where they exist there.

Dashboards made for vLLM or llama.cpp therefore work. Request metrics are counted when requests end.
Engine metrics (pool, memory, queue) are read when Prometheus scrapes. Every model has a separate
registry, and models/exposition.py merges them into one text.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvboost_edge.config import GenerationMode
from kvboost_edge.errors import KVBoostError
from kvboost_edge.server.api_errors import ApiError
from kvboost_edge.server.engines import replicas_of
from kvboost_edge.server.recent_throughput import Speeds
from kvboost_edge.server.response_types import Throughput

if TYPE_CHECKING:
    from kvboost_edge.engine.request.results import GenerationResult
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.work.admission import AdmissionQueue

__all__ = ["Metrics"]

# VLLM's buckets, in seconds.
_FIRST_TOKEN: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
_FIRST_TOKEN += (7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_PER_TOKEN = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
)
_REQUEST += (120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# Metric name and help text of each field of TierStats.
_TIER_GAUGES = {
    "blocks": ("blocks", "Blocks in the tier."),
    "bytes": ("bytes", "Bytes in the tier."),
    "max_bytes": ("max_bytes", "Limit of the bytes in the tier."),
    "writable": ("writable", "1 if the tier stores blocks."),
}
_TIER_COUNTERS = {
    "read_blocks": ("read_blocks", "Blocks read from the tier and verified."),
    "read_bytes": ("read_bytes", "Bytes read from the tier and verified."),
    "written_blocks": ("written_blocks", "Blocks stored in the tier."),
    "written_bytes": ("written_bytes", "Bytes stored in the tier."),
    "missing": ("missing_blocks", "Blocks requested from the tier and not found."),
    "refused": (
        "refused_blocks",
        "Blocks that were damaged or did not match, and were dropped.",
    ),
    "evicted": ("evicted_blocks", "Blocks evicted from the tier."),
    "not_written": ("unstored_blocks", "Blocks that could not be stored in the tier."),
    "errors": ("errors", "Failed operations of the tier's device or connection."),
}
_IN_USE = "Share of blocks used by requests or pins; cached blocks count as free"

# VLLM's names of our finish reasons.
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "abort"}


class Metrics:
    """All metrics of one model, labelled with its name.

    `observe` is cheap. A scrape reads statistics from the engine if the model is loaded.
    """

    def __init__(self, engine: Engine, model_name: str, admission: AdmissionQueue) -> None:
        self.registry = CollectorRegistry()
        self._vllm = _RequestMetrics(self.registry, model_name, engine.runner_info.max_context)
        self._speeds = Speeds()
        self._hits = Counter(
            "kvboost:hit_tokens",
            "Prompt tokens found in the pool or a tier.",
            ["model_name", "tier"],
            registry=self.registry,
        )
        self._misses = Counter(
            "kvboost:misses",
            "Requests by the reason why prompt tokens were computed.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._causes = Counter(
            "kvboost:prompt_causes",
            "Requests by cause of the cache miss.",
            ["model_name", "cause"],
            registry=self.registry,
        )
        self._reuse = _ReuseMetrics(self.registry, model_name)
        self._model_name = model_name
        self._collector = _EngineCollector(engine, model_name, admission, self._speeds)
        self.registry.register(self._collector)

    def follow(self, engine: Engine | None, admission: AdmissionQueue | None) -> None:
        """Set the engine to read at a scrape; None if the model is not loaded."""
        self._collector.read = None if engine is None or admission is None else (engine, admission)

    def observe(self, result: GenerationResult) -> None:
        """Count a finished sequence."""
        self._vllm.observe(result)
        self._speeds.observe(result)
        self._reuse.observe(result)
        for tier, tokens in result.hit_tokens.items():
            self._hits.labels(self._model_name, tier).inc(tokens)
        if result.miss_reason:
            self._misses.labels(self._model_name, result.miss_reason).inc()

    def observe_cause(self, cause: str) -> None:
        """Count the cause of a request's cache miss, see cache_report/diagnosis.py."""
        self._causes.labels(self._model_name, cause).inc()

    def observe_aborted(self, num_sequences: int) -> None:
        """Count sequences that were aborted by a disconnect, a deadline or the shutdown."""
        self._vllm.count("cancelled", num_sequences)

    def throughput(self) -> Throughput:
        """Return token totals since the start, and mean speeds over the last minute.

        The speeds are tokens per second of one request.
        """
        speeds = self._speeds
        prompt, generated = speeds.recent()
        return {
            "prompt_tokens_total": speeds.prompt_tokens,
            "generated_tokens_total": speeds.output_tokens,
            "prompt_tokens_per_second": round(prompt, 3),
            "generated_tokens_per_second": round(generated, 3),
        }

    def recent_prompts(self) -> tuple[Mapping[str, int], int, int]:
        """Return the prompt tokens of the last minute: hits by tier, reused at other positions, and
        computed.
        """
        return self._speeds.recent_prompts()


class _RequestMetrics:
    """Counters and histograms of requests, under vLLM's names."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_context: int) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name"], registry=registry).labels(
                model_name
            )

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=registry
            )
            return made.labels(model_name)

        counts = tuple(_one_two_five(max_context))
        self._success = Counter(
            "vllm:request_success",
            "Finished requests.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._by_reason = {
            ours: self._success.labels(model_name, theirs) for ours, theirs in _FINISHED.items()
        }
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of finished requests, cached ones included."
        )
        self._cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens whose KV came from the cache."
        )
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._first_token = histogram(
            "time_to_first_token_seconds", "Time to first token (TTFT).", _FIRST_TOKEN
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Time between consecutive tokens.", _PER_TOKEN
        )
        self._total = histogram(
            "e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST
        )
        self._queue = histogram("request_queue_time_seconds", "Time in the queue.", _REQUEST)
        self._prefill = histogram(
            "request_prefill_time_seconds", "Time spent on the prompt.", _REQUEST
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Time spent on the output.", _REQUEST
        )
        self._prompt_size = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", counts
        )
        self._output_size = histogram(
            "request_generation_tokens", "Generated tokens of a request.", counts
        )

    def count(self, finish_reason: str, num_sequences: int = 1) -> None:
        self._by_reason[finish_reason].inc(num_sequences)

    def observe(self, result: GenerationResult) -> None:
        self.count(result.finish_reason)
        self._prompt_tokens.inc(result.prompt_tokens)
        self._cached_tokens.inc(result.exact_cached_tokens)
        self._generation_tokens.inc(result.generated_tokens)
        if result.generated_tokens:
            self._first_token.observe(result.ttft_ms / 1e3)
        for earlier, later in itertools.pairwise(result.token_times_ms):
            self._between.observe((later - earlier) / 1e3)
        self._total.observe(result.total_ms / 1e3)
        self._queue.observe(result.queue_ms / 1e3)
        self._prefill.observe(result.prompt_ms / 1e3)
        self._decode.observe(result.decode_ms / 1e3)
        self._prompt_size.observe(result.prompt_tokens)
        self._output_size.observe(result.generated_tokens)


class _ReuseMetrics:
    """Counters of cache modes and of non-prefix KV reuse."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"kvboost:{name}", text, ["model_name"], registry=registry).labels(
                model_name
            )

        requests = Counter(
            "kvboost:requests", "Requests by mode.", ["model_name", "mode"], registry=registry
        )
        self._requests = {mode: requests.labels(model_name, mode.value) for mode in GenerationMode}
        self._span_tokens = counter(
            "reused_span_tokens", "Prompt tokens reused at other positions (approximate)."
        )
        self._recomputed = counter(
            "recomputed_tokens", "Prompt tokens found at other positions and recomputed."
        )
        self._probe_seconds = counter(
            "probe_seconds", "Time spent on choosing tokens to recompute (deviation scoring)."
        )

    def observe(self, result: GenerationResult) -> None:
        self._requests[result.mode].inc()
        self._span_tokens.inc(result.reused_span_tokens)
        self._recomputed.inc(result.recomputed_tokens)
        self._probe_seconds.inc(result.probe_ms / 1e3)


class _EngineCollector(Collector):
    """Collector that reads the engine's statistics at a scrape.

    For a stopped engine, it yields only `kvboost:engine_alive 0` and the server's own values. For a
    model that is not loaded, it yields nothing.
    """

    def __init__(
        self, engine: Engine, model_name: str, admission: AdmissionQueue, speeds: Speeds
    ) -> None:
        self.read: tuple[Engine, AdmissionQueue] | None = (engine, admission)
        self._since = time.time()
        self._model_name = model_name
        self._speeds = speeds

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if (read := self.read) is None:
            return
        engine, admission = read
        yield from self._of_server(engine, admission)
        yield from self._by_llamacpp_of_server()
        try:
            read_each = [
                (name, figures.paged_stats()) for name, figures in replicas_of(engine).items()
            ]
        except (KVBoostError, ApiError):
            return
        cache_dtype = f"kv_bits_{engine.config.kv_cache_bits}"
        yield from _by_replica(
            (
                name,
                itertools.chain(
                    self._of_engine(stats, cache_dtype), self._of_process(stats) if name else ()
                ),
            )
            for name, stats in read_each
        )

    def _of_process(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """Yield the memory of a replica's process; models/exposition.py has the server's own."""
        yield self._gauge(
            "kvboost:process_resident_bytes", "Resident memory.", stats["process_rss_bytes"]
        )
        yield self._gauge(
            "kvboost:process_peak_bytes", "Peak resident memory.", stats["process_peak_bytes"]
        )

    def _of_engine(self, stats: dict[str, Any], cache_dtype: str) -> Iterator[Metric]:
        yield from self._by_vllm(stats, cache_dtype)
        yield from self._by_llamacpp(stats)
        yield self._of_steps(stats)
        yield from self._of_pool(stats)
        yield from self._of_drafts(stats)
        yield from self._of_tiers(stats)

    def _of_server(self, engine: Engine, admission: AdmissionQueue) -> Iterator[Metric]:
        alive = float(engine.is_alive())
        yield self._gauge("kvboost:engine_alive", "1 while the engine runs.", alive)
        yield self._gauge(
            "kvboost:sequences_in_flight", "Sequences in flight.", admission.sequences
        )
        yield self._gauge(
            "kvboost:tokens_in_flight",
            "Tokens of the sequences in flight, estimated at admission.",
            admission.tokens,
        )
        refused = admission.refused
        held = admission.groups.held
        yield self._counter(
            "kvboost:requests_refused", "Requests refused because the queue was full.", refused
        )
        yield self._counter("kvboost:batch_window_held", "Requests held by the batch window.", held)

    def _by_vllm(self, stats: dict[str, Any], cache_dtype: str) -> Iterator[Metric]:
        gauges = {
            "num_requests_running": ("Running requests.", stats["num_running"]),
            "num_requests_waiting": ("Waiting requests.", stats["num_waiting"]),
            "kv_cache_usage_perc": (
                f"{_IN_USE}. 1 means all.",
                stats["block_utilization"],
            ),
        }
        queries = stats["hit_tokens"] + stats["span_tokens"] + stats["miss_tokens"]
        counters = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats["hit_tokens"]),
            "spec_decode_num_draft_tokens": ("Proposed draft tokens.", stats["drafted_tokens"]),
            "spec_decode_num_accepted_tokens": ("Accepted draft tokens.", stats["accepted_tokens"]),
            "spec_decode_num_drafts": (
                "Verified drafts.",
                sum(one["num_drafts"] for one in stats["drafts"].values()),
            ),
            "num_preemptions": (
                "Requests that lost their blocks and were recomputed.",
                stats["preemptions"],
            ),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(f"vllm:{name}", text, value)
        for name, (text, value) in counters.items():
            yield self._counter(f"vllm:{name}", text, value)
        yield self._gauge(
            "vllm:cache_config_info",
            "Constants of the pool.",
            1,
            block_size=str(stats["block_size"]),
            num_gpu_blocks=str(stats["num_blocks"]),
            num_cpu_blocks=str(stats["num_blocks"]),
            cache_dtype=cache_dtype,
            enable_prefix_caching="True",
        )
        # No model has LoRA adapters. The value is the time of the last change.
        yield self._gauge(
            "vllm:lora_requests_info",
            "LoRA adapters of running and waiting requests, of which there are none.",
            self._since,
            max_lora="0",
            running_lora_adapters="",
            waiting_lora_adapters="",
        )

    def _by_llamacpp_of_server(self) -> Iterator[Metric]:
        speeds = self._speeds
        prompt_speed, output_speed = speeds.recent()
        counters = {
            "prompt_tokens": ("Prompt tokens computed.", speeds.prompt_tokens),
            "prompt_seconds": ("Time spent on prompts.", speeds.prompt_seconds),
            "tokens_predicted": ("Generated tokens.", speeds.output_tokens),
            "tokens_predicted_seconds": ("Time spent on outputs.", speeds.output_seconds),
        }
        gauges = {
            "prompt_tokens_seconds": (
                "Prompt tokens per second, over the last minute.",
                prompt_speed,
            ),
            "predicted_tokens_seconds": (
                "Generated tokens per second of one request, over the last minute.",
                output_speed,
            ),
        }
        for name, (text, value) in counters.items():
            yield self._counter(f"llamacpp:{name}", text, value)
        for name, (text, value) in gauges.items():
            yield self._gauge(f"llamacpp:{name}", text, value)

    def _by_llamacpp(self, stats: dict[str, Any]) -> Iterator[Metric]:
        gauges = {
            "requests_processing": ("Running requests.", stats["num_running"]),
            "requests_deferred": ("Waiting requests.", stats["num_waiting"]),
            "kv_cache_usage_ratio": (f"{_IN_USE}.", stats["block_utilization"]),
            "kv_cache_tokens": ("Tokens whose KV is in the pool.", stats["tokens_held"]),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(f"llamacpp:{name}", text, value)

    def _of_steps(self, stats: dict[str, Any]) -> Metric:
        family = HistogramMetricFamily(
            "kvboost:step_seconds",
            "Time of an engine step, which computes tokens of all running requests.",
            labels=["model_name"],
        )
        buckets = list(stats["step_counts"].items())
        family.add_metric([self._model_name], buckets, stats["step_seconds"])
        return family

    def _of_pool(self, stats: dict[str, Any]) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "kvboost:memory_bytes", "Memory by owner.", labels=["model_name", "owner"]
        )
        for owner in ("weight", "pool", "state", "copied", "other"):
            memory.add_metric([self._model_name, owner], stats[f"{owner}_bytes"])
        yield memory
        yield self._gauge(
            "kvboost:bytes_per_block", "Bytes of a block in all layers.", stats["bytes_per_block"]
        )
        yield self._gauge(
            "kvboost:cache_utilization",
            "Share of blocks that hold KV: used by requests or pins, or cached.",
            stats["cache_utilization"],
        )
        blocks = GaugeMetricFamily(
            "kvboost:blocks", "Blocks by state.", labels=["model_name", "state"]
        )
        for state, count in (
            ("free", stats["free_blocks"] - stats["cached_blocks"]),
            ("cached", stats["cached_blocks"]),
            ("used", stats["used_blocks"] - stats["shared_blocks"]),
            ("shared", stats["shared_blocks"]),
        ):
            blocks.add_metric([self._model_name, state], count)
        yield blocks
        yield self._gauge("kvboost:pinned_blocks", "Pinned blocks.", stats["pinned_blocks"])
        yield self._gauge(
            "kvboost:retained_blocks",
            "Retained blocks, which are evicted last.",
            stats["retained_blocks"],
        )
        slots = GaugeMetricFamily(
            "kvboost:state_slots", "Slots for recurrent state.", labels=["model_name", "state"]
        )
        kept = sum(stats["state_snapshots"].values())
        for state, count in (
            ("free", stats["state_slots"] - stats["state_slots_used"]),
            ("running", stats["state_slots_used"] - kept),
            *stats["state_snapshots"].items(),
        ):
            slots.add_metric([self._model_name, state], count)
        yield slots
        replayed = "Prompt tokens recomputed because their recurrent state was not cached."
        yield self._counter("kvboost:replayed_tokens", replayed, stats["replayed_tokens"])
        yield self._counter("kvboost:evictions", "Evicted blocks.", stats["evictions"])
        yield self._counter(
            "kvboost:cow_copies",
            "Blocks copied before a write (copy-on-write).",
            stats["cow_copies"],
        )

    def _of_drafts(self, stats: dict[str, Any]) -> Iterator[Metric]:
        drafts = CounterMetricFamily(
            "kvboost:drafts", "Verified drafts by source.", labels=["model_name", "source"]
        )
        drafted = CounterMetricFamily(
            "kvboost:draft_tokens", "Draft tokens by source.", labels=["model_name", "source"]
        )
        accepted = CounterMetricFamily(
            "kvboost:draft_tokens_accepted",
            "Accepted draft tokens by source and position in the draft, from 0.",
            labels=["model_name", "source", "position"],
        )
        for source, counts in stats["drafts"].items():
            drafts.add_metric([self._model_name, source], counts["num_drafts"])
            drafted.add_metric([self._model_name, source], counts["drafted_tokens"])
            for position, count in enumerate(counts["accepted_by_position"]):
                accepted.add_metric([self._model_name, source, str(position)], count)
        yield from (drafts, drafted, accepted)
        yield self._counter(
            "kvboost:draft_restored_blocks",
            "Blocks whose KV of the draft model or MTP head came from a tier.",
            stats["draft_restored_blocks"],
        )
        yield self._gauge(
            "kvboost:draft_failed",
            "1 if an error has turned the draft model or MTP head off, else 0.",
            int(stats["draft_failed"]),
        )

    def _of_tiers(self, stats: dict[str, Any]) -> Iterator[Metric]:
        yield self._gauge(
            "kvboost:staging_bytes",
            "Bytes of blocks in transfer to and from tiers.",
            stats["staging_bytes"],
        )
        yield self._counter(
            "kvboost:lost_blocks",
            "Blocks evicted before a tier could take them.",
            stats["lost_blocks"],
        )
        for kind, fields in (
            (GaugeMetricFamily, _TIER_GAUGES),
            (CounterMetricFamily, _TIER_COUNTERS),
        ):
            for field, (name, text) in fields.items():
                family = kind(f"kvboost:tier_{name}", text, labels=["model_name", "tier"])
                for tier, stat in stats["tiers"].items():
                    if stat[field] is not None:
                        family.add_metric([self._model_name, tier], float(stat[field]))
                yield family

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        family.add_metric([self._model_name, *labels.values()], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def _by_replica(engines: Iterable[tuple[str, Iterable[Metric]]]) -> Iterator[Metric]:
    """Merge the metrics of several engines, and label each value with its replica's name.

    Metrics of an engine with the name "" get no label.
    """
    merged: dict[str, Metric] = {}
    for replica, metrics in engines:
        for metric in metrics:
            if replica:
                metric.samples = [
                    one._replace(labels={**one.labels, "replica": replica})
                    for one in metric.samples
                ]
            known = merged.setdefault(metric.name, metric)
            if known is not metric:
                known.samples += metric.samples
    yield from merged.values()


def _one_two_five(highest: int) -> Iterator[float]:
    """Yield 1, 2, 5, 10, 20, 50 … up to `highest`. These are vLLM's buckets for token counts."""
    for exponent in itertools.count():
        for mantissa in (1, 2, 5):
            if mantissa * 10**exponent > highest:
                return
            yield float(mantissa * 10**exponent)
