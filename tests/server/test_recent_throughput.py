"""Tests of the throughput over the last minute: counted requests, expiry, and the bound on memory."""

from types import SimpleNamespace

import pytest

from kvboost_edge.server import recent_throughput as speeds_module
from kvboost_edge.server.recent_throughput import Speeds


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(speeds_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def result(prompt=30, cached=10, prompt_ms=100.0, generated=8, decode_ms=200.0, hits=None, spans=0):
    return SimpleNamespace(
        computed_prompt_tokens=prompt - cached - spans,
        reused_span_tokens=spans,
        prompt_ms=prompt_ms,
        generated_tokens=generated,
        decode_ms=decode_ms,
        hit_tokens={"pool": cached, "disk": 0} if hits is None else hits,
    )


def test_memory_does_not_grow_with_requests(clock):
    """A hundred requests per second are counted for ten minutes while no client reads the metrics."""
    speeds = Speeds()
    for _ in range(60_000):
        speeds.observe(result())
        clock.now += 0.01
    assert len(speeds._recent) <= 60
    assert speeds.output_tokens == 60_000 * 8


def test_throughput_excludes_cached_tokens(clock):
    speeds = Speeds()
    assert speeds.recent() == (0.0, 0.0)
    speeds.observe(result())
    clock.now += 30
    speeds.observe(result(prompt=50, cached=10, prompt_ms=100.0, generated=2, decode_ms=50.0))
    assert speeds.recent() == (pytest.approx(60 / 0.2), pytest.approx(10 / 0.25))
    assert (speeds.prompt_tokens, speeds.output_tokens) == (60, 10)
    assert (speeds.prompt_seconds, speeds.output_seconds) == (
        pytest.approx(0.2),
        pytest.approx(0.25),
    )


def test_requests_older_than_a_minute_count_in_totals_only(clock):
    speeds = Speeds()
    speeds.observe(result(generated=100))
    clock.now += 59
    assert speeds.recent()[1] == pytest.approx(100 / 0.2)
    speeds.observe(result(generated=4))
    clock.now += 1
    assert speeds.recent()[1] == pytest.approx(4 / 0.2)
    clock.now += 60
    assert speeds.recent() == (0.0, 0.0)
    assert speeds.output_tokens == 104


def test_a_request_without_output_divides_by_nothing(clock):
    speeds = Speeds()
    speeds.observe(result(generated=0, decode_ms=0.0, prompt_ms=0.0))
    assert speeds.recent() == (0.0, 0.0)


def test_prompt_tokens_by_tier_cover_the_last_minute(clock):
    speeds = Speeds()
    assert speeds.recent_prompts() == ({}, 0, 0)
    speeds.observe(result(hits={"pool": 4, "disk": 6}))
    clock.now += 30
    speeds.observe(result(prompt=50, cached=10, hits={"disk": 3, "redis": 7}, spans=16))
    assert speeds.recent_prompts() == ({"pool": 4, "disk": 9, "redis": 7}, 16, 44)
    clock.now += 30
    assert speeds.recent_prompts() == ({"disk": 3, "redis": 7}, 16, 24)
