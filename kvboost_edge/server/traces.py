"""OpenTelemetry traces of generating requests (extra [otel]).

A request is one server span. Its children are the phases of each sequence, which are created when
the sequence ends, from the durations in its result. Nothing is therefore measured twice, and
without traces a request costs one comparison. The packages are imported only if traces are on.
Spans contain no prompt and no answer.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from kvboost_edge import __version__
from kvboost_edge.errors import BackendUnavailable, ConfigError, install_extra
from kvboost_edge.server.logs import log_facts

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer
    from starlette.types import Scope

    from kvboost_edge.engine.request.results import GenerationResult

__all__ = ["TRACE_FACT", "RequestTrace", "Traces", "open_traces"]

TRACE_FACT = "trace"
"""Key of a request's trace in its facts. Removed when the request ends."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PATH = "/v1/traces"
_SERVICE = "kvboost-edge"
_NANOSECONDS = 1_000_000  # per millisecond


class _Phase(NamedTuple):
    """A phase of a sequence, in milliseconds since the request's arrival."""

    name: str
    start_ms: float
    end_ms: float
    attributes: Mapping[str, Any]


class RequestTrace:
    """Server span of one request.

    Args:
        tracer: tracer that creates the spans.
        span: the server span.
    """

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._reasons: list[str] = []
        self._num_input = 0
        self._num_output = 0

    @property
    def trace_id(self) -> str:
        """Id of the trace, in 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def observe(self, result: GenerationResult, arrived_at: float) -> None:
        """Add the spans of a finished sequence.

        Args:
            result: result of the sequence.
            arrived_at: start of the times in `result`, in seconds of `time.perf_counter`.
        """
        if not self._span.is_recording():  # the sampler left the request out
            return
        from opentelemetry.trace import set_span_in_context

        now = time.perf_counter()
        zero = time.time_ns() - round((now - arrived_at) * 1e9)
        parent = set_span_in_context(self._span)
        sequence = {"kvboost.sequence": len(self._reasons)}
        for phase in _phases(result):
            self._tracer.start_span(
                phase.name,
                context=parent,
                start_time=zero + round(phase.start_ms * _NANOSECONDS),
                attributes={**sequence, **phase.attributes},
            ).end(zero + round(phase.end_ms * _NANOSECONDS))
        self._reasons.append(result.finish_reason)
        self._num_input += result.prompt_tokens
        self._num_output += result.generated_tokens

    def end(self, route: str, status: int) -> None:
        """End the span.

        Args:
            route: route of the request.
            status: status of the response, 499 if the client disconnected before it.
        """
        from opentelemetry.trace import StatusCode

        span = self._span
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        if self._reasons:
            span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
            span.set_attribute("gen_ai.usage.input_tokens", self._num_input)
            span.set_attribute("gen_ai.usage.output_tokens", self._num_output)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()


class Traces:
    """Traces of a server, which a background thread sends.

    Args:
        exporter: receiver of finished spans.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        own = {} if _names_service() else {"service.name": _SERVICE}
        self._provider = TracerProvider(resource=Resource.create(own))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvboost_edge", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Scope, request_id: str) -> RequestTrace:
        """Start the span of a request, below the span that its `traceparent` header names."""
        from opentelemetry.trace import SpanKind

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "kvboost.request_id": request_id,
            },
        )
        return RequestTrace(self._tracer, span)

    def close(self) -> None:
        """Send the remaining spans, which takes up to the exporter's timeout."""
        self._provider.shutdown()


def open_traces(
    endpoint: str | None, environment: Mapping[str, str] | None = None
) -> Traces | None:
    """Return the traces, or None if they are off.

    They are on if an endpoint is given here or in the standard variables. The variables also set
    headers, timeouts, sampling and resource attributes.

    Args:
        endpoint: value of `--otel-endpoint`.
        environment: environment variables; None for those of the process.

    Raises:
        BackendUnavailable: `endpoint` is given, and the extra is not installed.
        ConfigError: the environment asks for a protocol other than OTLP over HTTP.
    """
    environment = os.environ if environment is None else environment
    if endpoint is None and (
        not any(environment.get(name) for name in _ENDPOINTS)
        or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
        or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    ):
        return None
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), None)
    if protocol not in (None, "http/protobuf"):
        raise ConfigError(
            f"traces are sent as http/protobuf, not as {protocol!r}; unset "
            f"{' and '.join(_PROTOCOLS)}, or set OTEL_TRACES_EXPORTER=none"
        )
    try:
        return Traces(_exporter(endpoint))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("opentelemetry", "requests"):
            raise
        missing = (
            f"traces need the package {error.name!r}; install the extra: {install_extra('otel')}"
        )
        if endpoint is not None:
            raise BackendUnavailable(missing) from error
        # The variables may concern other programs too, so the server starts without traces.
        log_facts(logging.WARNING, "no traces", reason=missing)
        return None


def _exporter(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is not None and not urlsplit(endpoint).path.strip("/"):
        endpoint = endpoint.rstrip("/") + _PATH
    exporter: SpanExporter = OTLPSpanExporter(endpoint)
    return exporter


def _names_service() -> bool:
    """Return whether the environment names the service."""
    return bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )


def _phases(result: GenerationResult) -> Iterator[_Phase]:
    """Yield the phases of a sequence in order. They cover its whole time."""
    hits = {f"kvboost.hit_tokens.{tier}": count for tier, count in result.hit_tokens.items()}
    lengths: dict[str, tuple[float, dict[str, Any]]] = {
        "tokenize": (result.tokenize_ms, {}),
        "queue": (result.queue_ms, {}),
        "cache": (
            result.load_ms + result.lookup_ms,
            {
                "kvboost.prompt_tokens": result.prompt_tokens,
                "kvboost.cached_tokens": result.exact_cached_tokens,
                "kvboost.reused_span_tokens": result.reused_span_tokens,
                "kvboost.miss_reason": result.miss_reason,
                **hits,
            },
        ),
        "prefill": (
            result.prompt_ms,
            {"kvboost.computed_tokens": result.computed_prompt_tokens},
        ),
        "decode": (result.decode_ms, {"kvboost.generated_tokens": result.generated_tokens}),
    }
    start = 0.0
    for name, (length, attributes) in lengths.items():
        yield _Phase(name, start, start + length, attributes)
        start += length
