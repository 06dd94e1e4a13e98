"""Tests of /metrics: all documented names exist, values match the requests, and the dashboard uses
existing metrics.
"""

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.server.live_servers import serving, wait_until

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "docs" / "grafana" / "kvboost-edge.json"
MODEL = "kvboost-edge/demo"
VLLM = """num_requests_running num_requests_waiting kv_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total
prompt_tokens_cached_total num_preemptions_total request_success_total time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket prompt_tokens_total generation_tokens_total
request_prompt_tokens_bucket request_generation_tokens_bucket request_queue_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket cache_config_info""".split()
LLAMACPP = """prompt_tokens_total tokens_predicted_total prompt_seconds_total tokens_predicted_seconds_total
prompt_tokens_seconds predicted_tokens_seconds requests_processing requests_deferred kv_cache_usage_ratio
kv_cache_tokens""".split()
OURS = """memory_bytes process_resident_bytes process_peak_bytes bytes_per_block blocks evictions_total cow_copies_total
engine_alive requests_total reused_span_tokens_total recomputed_tokens_total probe_seconds_total sequences_in_flight
tokens_in_flight requests_refused_total batch_window_held_total http_requests_total
http_request_seconds_bucket hit_tokens_total misses_total step_seconds_bucket step_seconds_count
step_seconds_sum draft_restored_blocks_total draft_failed""".split()


@pytest.fixture(scope="module")
def server(demo_engine):
    """Separate server, so that its counters start at zero, after two equal requests."""
    with serving(demo_engine) as server, server.client() as client:
        demo_engine.reset_cache()
        body = {
            "model": MODEL,
            "prompt": "Counted words of a prompt. " * 6,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        for _ in range(2):
            assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/no-such-route").status_code == 404
        yield server


def scrape(server):
    """Return {(name, labels as sorted pairs): value}."""
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(samples, name, **labels):
    wanted = set(labels.items())
    found = [
        value
        for (sample, pairs), value in samples.items()
        if sample == name and wanted <= set(pairs)
    ]
    assert found, name
    return sum(found)


@pytest.mark.parametrize(
    ("prefix", "names"), [("vllm", VLLM), ("llamacpp", LLAMACPP), ("kvboost", OURS)]
)
def test_every_documented_metric_exists(server, prefix, names):
    present = {name for name, _ in scrape(server)}
    assert {f"{prefix}:{name}" for name in names} <= present


def test_vllm_series_carry_the_model_name(server):
    for name, labels in scrape(server):
        if name.startswith("vllm:"):
            assert dict(labels)["model_name"] == MODEL, name


# The model server protocol of the Gateway API inference extension, whose endpoint picker reads
# these names by default.
GATEWAY = {
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_running": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
    "vllm:lora_requests_info": {
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    },
}


@pytest.mark.parametrize("name", GATEWAY)
def test_metrics_of_the_gateway_api_inference_extension_exist(server, name):
    with server.client() as client:
        text = client.get("/metrics").text
    (family,) = [one for one in text_string_to_metric_families(text) if one.name == name]
    (sample,) = family.samples
    assert family.type == "gauge"
    assert GATEWAY[name] <= set(sample.labels)
    assert sample.value >= 0


def test_gateway_metrics_have_the_expected_values(server, demo_engine):
    samples = scrape(server)
    stats = demo_engine.paged_stats()
    total(
        samples,
        "vllm:cache_config_info",
        block_size=str(stats["block_size"]),
        num_gpu_blocks=str(stats["num_blocks"]),
    )
    assert 0 <= total(samples, "vllm:kv_cache_usage_perc") <= 1
    # Without adapters the value is the time of the last change.
    changed = total(
        samples,
        "vllm:lora_requests_info",
        max_lora="0",
        running_lora_adapters="",
        waiting_lora_adapters="",
    )
    assert 1.7e9 < changed <= time.time()


def test_values_agree_with_the_requests(server):
    samples = scrape(server)
    prompt = total(samples, "vllm:prompt_tokens_total")
    cached = total(samples, "vllm:prompt_tokens_cached_total")
    assert total(samples, "vllm:generation_tokens_total") == 16
    assert total(samples, "vllm:request_success_total", finished_reason="length") == 2
    assert cached > 0
    assert total(samples, "kvboost:hit_tokens_total") == cached
    assert total(samples, "llamacpp:prompt_tokens_total") == prompt - cached
    assert total(samples, "llamacpp:tokens_predicted_total") == 16
    assert total(samples, "vllm:time_to_first_token_seconds_count") == 2
    assert total(samples, "vllm:inter_token_latency_seconds_count") == 14
    assert total(samples, "vllm:request_prompt_tokens_sum") == prompt
    assert total(samples, "kvboost:http_requests_total", route="/v1/completions", status="200") == 2
    assert total(samples, "kvboost:http_requests_total", route="unmatched", status="404") == 1
    whole = total(samples, "vllm:e2e_request_latency_seconds_sum")
    assert 0 < total(samples, "vllm:time_to_first_token_seconds_sum") <= whole
    for name in ("queue", "prefill", "decode"):
        assert total(samples, f"vllm:request_{name}_time_seconds_count") == 2
        assert total(samples, f"vllm:request_{name}_time_seconds_sum") <= whole
    assert total(samples, "llamacpp:predicted_tokens_seconds") > 0


def test_pool_metrics_equal_the_engines(server, demo_engine):
    samples = scrape(server)
    stats = demo_engine.paged_stats()
    assert total(samples, "kvboost:blocks") == stats["num_blocks"]
    assert total(samples, "kvboost:blocks", state="cached") == stats["cached_blocks"]
    assert total(samples, "kvboost:cache_utilization") == stats["cache_utilization"] > 0
    pinned = stats["pinned_blocks"] / stats["num_blocks"]  # other tests may leave pins
    assert total(samples, "vllm:kv_cache_usage_perc") == stats["block_utilization"] == pinned
    assert total(samples, "kvboost:memory_bytes", owner="pool") == stats["pool_bytes"]
    assert total(samples, "kvboost:memory_bytes", owner="weight") == stats["weight_bytes"]
    assert total(samples, "vllm:prefix_cache_hits_total") == stats["hit_tokens"]
    assert total(samples, "vllm:num_requests_running") == 0
    assert total(samples, "kvboost:engine_alive") == 1


def test_draft_metrics_equal_the_engines(server, demo_engine, monkeypatch):
    text = "a b c d e f g h " * 6
    with server.client() as client:
        body = {"model": MODEL, "prompt": text, "max_tokens": 24, "temperature": 0}
        client.post("/v1/completions", json={**body, "kvboost": {"speculation": "on"}})
    samples = scrape(server)
    stats = demo_engine.paged_stats()
    lookup = stats["drafts"]["lookup"]
    assert total(samples, "kvboost:drafts_total", source="lookup") == lookup["num_drafts"] > 0
    drafted = total(samples, "kvboost:draft_tokens_total", source="lookup")
    assert drafted == lookup["drafted_tokens"]
    assert total(samples, "kvboost:draft_tokens_accepted_total") == stats["accepted_tokens"]
    assert total(samples, "vllm:spec_decode_num_drafts_total") == sum(
        one["num_drafts"] for one in stats["drafts"].values()
    )
    assert total(samples, "kvboost:draft_failed") == 0
    changed = {**stats, "draft_restored_blocks": 3, "draft_failed": True}
    monkeypatch.setattr(type(demo_engine), "paged_stats", lambda engine: changed)
    samples = scrape(server)
    assert total(samples, "kvboost:draft_restored_blocks_total") == 3
    assert total(samples, "kvboost:draft_failed") == 1


def test_the_step_histogram_equals_the_engines(server, demo_engine):
    def agrees():  # the last step ends after its response
        samples = scrape(server)
        stats = demo_engine.paged_stats()
        found = {
            dict(pairs)["le"]: value
            for (name, pairs), value in samples.items()
            if name == "kvboost:step_seconds_bucket"
        }
        count = total(samples, "kvboost:step_seconds_count", model_name=MODEL)
        seconds = total(samples, "kvboost:step_seconds_sum", model_name=MODEL)
        return (found, count, seconds) == (
            stats["step_counts"],
            stats["step_counts"]["+Inf"],
            stats["step_seconds"],
        )

    wait_until(agrees, "the figures of the last step")
    stats = demo_engine.paged_stats()
    assert stats["step_counts"]["+Inf"] > 2
    assert stats["step_seconds"] > 0


def test_counters_only_rise(server):
    before = scrape(server)
    with server.client() as client:
        client.post("/v1/completions", json={"model": MODEL, "prompt": "one more", "max_tokens": 1})
    after = scrape(server)
    counters = {key for key in before if key[0].endswith(("_total", "_bucket", "_count", "_sum"))}
    assert counters <= set(after)
    assert all(after[key] >= before[key] for key in counters)


def test_each_server_has_its_own_counters(server, demo_engine):
    with serving(demo_engine, model_name="another") as other:
        samples = scrape(other)
    assert total(samples, "vllm:prompt_tokens_total", model_name="another") == 0


def test_the_dashboard_uses_existing_metrics(server):
    samples = scrape(server)
    present = {name for name, _ in samples}
    of_models = {name for name, labels in samples if "model_name" in dict(labels)}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) >= 12
    assert all(panel["targets"] and panel["title"] and panel["gridPos"] for panel in panels)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for expression in expressions:
        names = re.findall(r"(?:vllm|llamacpp|kvboost):\w+", expression)
        assert names, expression
        assert set(names) <= present, (expression, set(names) - present)
        assert expression.count("(") == expression.count(")")
        # The dashboard's variable selects the models.
        chosen = re.findall(r'((?:vllm|llamacpp|kvboost):\w+)\{model_name=~"\$model"', expression)
        assert chosen == [name for name in names if name in of_models], expression
