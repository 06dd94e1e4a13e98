"""Spans at other positions through scheduler, tables and batches: the fake runner reads every token back where it must
be, so what is shared wrongly shows as an error or as other tokens."""

from __future__ import annotations

import random

import pytest

from engine.fake_runner import Bench, expected_tokens
from kvboost_edge.config import EngineConfig, GenerationMode, RecomputeStrategy
from kvboost_edge.engine.stats import BLOCK_SPAN, block_details, block_map, cache_stats, paged_stats
from kvboost_edge.reuse.repair import Repair

BARE = Repair(strategy=RecomputeStrategy.NONE)
SEAMS = Repair(strategy=RecomputeStrategy.SELECTIVE, overlap=16)
BLEND = Repair(strategy=RecomputeStrategy.CACHEBLEND, overlap=16, ratio=0.25)
REUSE = GenerationMode.CHUNK_KV_REUSE


def document(number: int, length: int) -> list[int]:
    return random.Random(number).choices(range(256), k=length)


@pytest.mark.parametrize("repair", [BARE, SEAMS, BLEND], ids=lambda repair: repair.strategy.value)
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 512])
def test_documents_in_another_order_are_shared_and_read_where_they_are(repair: Repair, budget: int) -> None:
    bench = Bench(max_batch_tokens=budget)
    head, (one, two, three) = document(0, 20), (document(n, 53 + n) for n in (1, 2, 3))
    bench.submit(head + one + two + three, 1)
    bench.run()
    computed = bench.runner.computed
    prompt = head + three + one + two + document(9, 10)
    handle = bench.submit(prompt, 20, REUSE, repair=repair)
    bench.run()
    result = handle.result(0)
    assert list(result.output_token_ids) == expected_tokens(prompt, 20)
    assert result.mode is REUSE
    assert result.approximate
    assert result.cached_tokens == 16
    assert result.reused_span_tokens > {BARE: 100, SEAMS: 60, BLEND: 40}[repair]
    assert (bench.runner.probed > 0) == (repair is BLEND)
    assert sum(result.phases.values()) == pytest.approx(result.total_ms)
    assert result.cached_tokens + result.reused_span_tokens + bench.runner.computed - computed == len(prompt) + 19
    assert bench.manager.used_block_count == 0
    bench.manager.check_invariants([])


def test_nothing_approximate_is_found_by_others() -> None:
    bench = Bench()
    head, one, two = document(0, 32), document(1, 64), document(2, 64)
    bench.submit(head + one + two, 1)
    bench.run()
    before = bench.manager.published_block_count
    prompt = head + two + one
    handle = bench.submit(prompt, 40, REUSE, repair=BARE)
    bench.run()
    assert handle.result(0).approximate
    assert bench.manager.published_block_count == before
    again = bench.submit(prompt, 40)
    bench.run()
    assert again.result(0).cached_tokens == 32
    assert again.result(0).mode is GenerationMode.PREFIX_CACHE


def test_without_a_run_what_was_asked_for_as_approximate_is_exact_and_published() -> None:
    bench = Bench()
    prompt = document(0, 70)
    handle = bench.submit(prompt, 2, REUSE, repair=BARE)
    bench.run()
    result = handle.result(0)
    assert (result.mode, result.approximate, result.recomputed_tokens) == (GenerationMode.PREFIX_CACHE, False, 0)
    assert bench.manager.peek(prompt, bench.parts.root) == 64


@pytest.mark.parametrize(("repair", "room"), [(SEAMS, 64), (BLEND, 64), (BLEND, 15)], ids=["seams", "blend", "crowded"])
def test_what_was_found_shared_and_computed_adds_up_to_the_prompts(repair: Repair, room: int) -> None:
    """Once each, also of sequences that lost their blocks meanwhile."""
    bench = Bench(num_blocks=room)
    head, one, two = document(0, 20), document(1, 53), document(2, 54)
    bench.submit(head + one + two, 1)
    bench.run()
    prompts = [head + two + one, head + one[:40] + document(5, 20)]
    handles = [bench.submit(prompt, 70, REUSE, repair=repair) for prompt in prompts]
    bench.run()
    results = [handle.result(0) for handle in handles]
    assert any(result.preemptions for result in results) == (room < 64)
    paged = paged_stats(bench.parts, bench.scheduler, EngineConfig(), bench.core.tiering)
    cache = cache_stats(bench.parts, bench.core.tiering)
    assert paged["span_tokens"] > 0
    assert paged["hit_tokens"] == sum(result.cached_tokens for result in results)
    total = len(head + one + two) + sum(map(len, prompts))
    assert paged["hit_tokens"] + paged["span_tokens"] + paged["miss_tokens"] == total
    assert cache["approximate_hits"] == paged["span_tokens"] // 16
    assert cache["hit_rate"] == (paged["hit_tokens"] + paged["span_tokens"]) / total
    assert cache["exact_hit_rate"] == paged["hit_tokens"] / total
    if room == 64:
        assert paged["span_tokens"] == sum(result.reused_span_tokens for result in results)
        first = results[0]
        assert first.computed_prompt_tokens == 127 - first.cached_tokens - first.reused_span_tokens
        others = sum(first.phases[name] for name in ("tokenize", "queue", "lookup", "load", "decode"))
        assert first.prompt_ms == pytest.approx(first.total_ms - others, abs=1e-3)


def test_the_block_map_tells_which_blocks_are_used_at_another_position() -> None:
    bench = Bench()
    head, one, two = document(0, 32), document(1, 64), document(2, 64)
    bench.submit(head + one + two, 1)
    bench.run()
    assert BLOCK_SPAN not in block_map(bench.parts, bench.scheduler)
    bench.submit(head + two + one, 20, REUSE, repair=BARE)
    bench.step()
    [sequence] = bench.scheduler.running
    shared = {block_id for span in sequence.blocks.spans for block_id in span.block_ids}
    states = block_map(bench.parts, bench.scheduler)
    assert {block_id for block_id, state in enumerate(states) if state == BLOCK_SPAN} == shared
    assert len(shared) > 6
    assert [detail.state for detail in block_details(bench.parts, bench.scheduler, 64)] == states
    bench.run()
    assert BLOCK_SPAN not in block_map(bench.parts, bench.scheduler)
