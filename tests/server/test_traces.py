"""Tests of traces with OpenTelemetry's in-memory exporter: spans, their parents and their times."""

import itertools
import time

import pytest

from helpers.fresh_process import in_fresh_process
from helpers.server.live_servers import serving
from kvboost_edge.errors import BackendUnavailable, ConfigError
from kvboost_edge.server import traces
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.server.traces import open_traces

ENDPOINT = "http://127.0.0.1:4318"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SECRET = "An unmistakable secret of the prompt. "
BODY = {"prompt": SECRET * 8, "max_tokens": 6, "ignore_eos": True}
PHASES = ["queue", "cache", "prefill", "decode"]


@pytest.fixture
def kept_spans(monkeypatch):
    """Exporter that receives the spans of this test's servers."""
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter",
        reason="opentelemetry-sdk is not installed (extra [otel])",
    )
    exporter = memory.InMemorySpanExporter()
    monkeypatch.setattr(traces, "_exporter", lambda endpoint: exporter)
    return exporter


@pytest.fixture
def traced(kept_spans, tiny_engine):
    """Function `traced(*requests)` that sends (path, body, headers) and returns the spans grouped
    by server span.
    """

    def call(*requests):
        kept_spans.clear()
        with serving(tiny_engine, otel_endpoint=ENDPOINT) as server, server.client() as client:
            for path, body, headers in requests:
                assert client.post(path, json=body, headers=headers).status_code < 500
            assert server.kv.shared.traces is not None
        spans = kept_spans.get_finished_spans()  # the end of the block sends the last ones
        roots = [span for span in spans if span.kind.name == "SERVER"]
        return [
            (root, [span for span in spans if parent_of(span) == root.context.span_id])
            for root in sorted(roots, key=lambda span: span.start_time)
        ]

    return call


def parent_of(span):
    return None if span.parent is None else span.parent.span_id


def from_caller(flags="01"):
    return {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}


def test_a_request_is_a_span_below_the_callers(traced):
    ((root, children),) = traced(("/v1/completions", BODY, from_caller()))
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{parent_of(root):016x}" == CALLER
    assert root.name == "POST /v1/completions"
    assert root.attributes["http.route"] == "/v1/completions"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert [span.name for span in children] == ["tokenize", *PHASES]
    assert {span.context.trace_id for span in children} == {root.context.trace_id}


def test_phases_follow_one_another_inside_the_request(traced):
    before = time.time_ns()
    ((root, children),) = traced(("/v1/completions", BODY, {}))
    assert root.parent is None
    assert before <= root.start_time <= children[0].start_time
    assert root.end_time <= time.time_ns()
    for earlier, later in itertools.pairwise(children):
        assert earlier.start_time <= earlier.end_time == later.start_time
    assert children[-1].end_time <= root.end_time
    lengths = {span.name: span.end_time - span.start_time for span in children}
    assert lengths["prefill"] > 0
    assert lengths["decode"] > 0


def test_spans_report_cache_hits_by_tier(traced):
    body = {**BODY, "prompt": "No other test begins with these words. " * 4}
    (_, first), (_, second) = traced(*2 * [("/v1/completions", body, {})])
    cold, warm = (
        next(dict(span.attributes) for span in spans if span.name == "cache")
        for spans in (first, second)
    )
    assert cold["kvboost.cached_tokens"] == 0
    assert cold["kvboost.miss_reason"] == "first_seen"
    assert warm["kvboost.cached_tokens"] == warm["kvboost.hit_tokens.pool"] > 0
    (computed,) = [
        span.attributes["kvboost.computed_tokens"] for span in second if span.name == "prefill"
    ]
    assert computed == warm["kvboost.prompt_tokens"] - warm["kvboost.cached_tokens"]


def test_each_sequence_has_its_phases(traced):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    (two, of_two), (streamed, of_stream) = traced(
        ("/v1/completions", {**BODY, "n": 2}, {}), ("/v1/chat/completions", chat, {})
    )
    assert [span.attributes["kvboost.sequence"] for span in of_two] == [0] * 5 + [1] * 5
    assert two.attributes["gen_ai.usage.output_tokens"] == 12
    assert len(of_stream) == 5
    assert streamed.attributes["gen_ai.usage.output_tokens"] == sum(
        span.attributes["kvboost.generated_tokens"] for span in of_stream if span.name == "decode"
    )


def test_no_span_holds_text(traced):
    for root, children in traced(("/v1/completions", {**BODY, "echo": True}, {})):
        for span in (root, *children):
            assert "secret" not in span.to_json()


@pytest.mark.parametrize("header", ["", "00-0-0-01", f"00-{'0' * 32}-{CALLER}-01", "x" * 5000])
def test_a_malformed_parent_starts_a_new_trace(traced, header):
    ((root, _),) = traced(("/v1/completions", BODY, {"traceparent": header}))
    assert root.parent is None


def test_the_callers_sampling_is_followed(traced):
    assert traced(("/v1/completions", BODY, from_caller("00"))) == []


def test_only_generating_routes_are_traced(traced, kept_spans):
    ((root, children),) = traced(("/v1/completions", {"max_tokens": 1}, {}))
    assert root.attributes["http.response.status_code"] == 400
    assert not children
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert traced(("/no-such-route", {}, {})) == []


def test_the_log_line_names_the_trace(traced, caplog):
    with caplog.at_level("INFO", "kvboost_edge"):
        traced(("/v1/completions", BODY, from_caller()))
    assert TRACE in caplog.text or any(TRACE in str(vars(record)) for record in caplog.records)


def test_tracing_off_imports_and_starts_nothing(tiny_engine, monkeypatch):
    def begun(*given):
        raise AssertionError("a trace was started")

    monkeypatch.setattr(traces.Traces, "begin", begun)
    with serving(tiny_engine) as server, server.client() as client:
        assert server.kv.shared.traces is None
        assert client.post("/v1/completions", json=BODY, headers=from_caller()).status_code == 200
    # FastAPI itself imports opentelemetry-api if that is installed.
    code = """import sys, kvboost_edge.server.app
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])"""
    assert in_fresh_process(code).strip() == "[]"


def test_the_standard_variables_turn_traces_on(kept_spans):
    on = {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}
    for environment in (on, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{ENDPOINT}/v1/traces"}):
        found = open_traces(None, environment)
        assert found is not None
        found.close()
    for off in (
        {},
        {**on, "OTEL_TRACES_EXPORTER": "none"},
        {**on, "OTEL_SDK_DISABLED": "true"},
    ):
        assert open_traces(None, off) is None
    with pytest.raises(ConfigError, match="not as 'grpc'"):
        open_traces(None, {**on, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_the_service_name_follows_the_standard_variables(kept_spans, monkeypatch):
    for variables, name in (
        ({}, "kvboost-edge"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,a=b"}, "ours"),
    ):
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            found = open_traces(ENDPOINT)
            assert found._provider.resource.attributes["service.name"] == name
            found.close()


def test_a_missing_exporter_is_an_error_only_if_tracing_was_requested(monkeypatch, caplog):
    def missing(endpoint):
        raise ModuleNotFoundError("no exporter", name="opentelemetry.exporter")

    monkeypatch.setattr(traces, "_exporter", missing)
    with pytest.raises(BackendUnavailable, match=r"'opentelemetry.exporter'.*\[otel\]"):
        open_traces(ENDPOINT)
    with caplog.at_level("WARNING", "kvboost_edge"):
        assert open_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}) is None
    assert caplog.records


def test_the_endpoint_is_a_url():
    for text in ("127.0.0.1:4318", "grpc://x:4317", "http://x y"):
        with pytest.raises(ConfigError, match="otel_endpoint="):
            ServerSettings(otel_endpoint=text)
    assert ServerSettings(otel_endpoint="https://collector.example/v1/traces").otel_endpoint


def test_the_exporter_completes_the_path():
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        reason="opentelemetry-exporter-otlp-proto-http is not installed (extra [otel])",
    )
    for given in (ENDPOINT, f"{ENDPOINT}/", f"{ENDPOINT}/v1/traces"):
        exporter = traces._exporter(given)
        assert exporter._endpoint == f"{ENDPOINT}/v1/traces"
        exporter.shutdown()
