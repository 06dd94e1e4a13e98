"""Spans at other positions through scheduler, tables and batches.

The fake runner reads each token back where it must be stored, so wrong sharing shows as an error or
as other tokens.
"""

import pytest

from helpers.engine.documents import BARE, BLEND, QUERY, REUSE, SEAMS, document
from helpers.engine.fake_runner import Bench
from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.stats import (
    BLOCK_SPAN,
    StepTimes,
    block_details,
    block_map,
    cache_stats,
    paged_stats,
)
from kvboost_edge.errors import KVBoostError


def served():
    """Build a bench that has answered a head with two documents."""
    bench = Bench()
    head = document(0, 32)
    one = document(1, 64)
    two = document(2, 64)
    bench.ask(head + one + two, 1)
    return bench, head, one, two


def joined(documents):
    return [token for tokens in documents for token in tokens]


@pytest.mark.parametrize(
    "repair", [BARE, SEAMS, BLEND, QUERY], ids=lambda repair: repair.strategy.value
)
@pytest.mark.parametrize("budget", [1, 7, 16, 64, 512])
@pytest.mark.some(3)
def test_reordered_documents_are_reused_at_their_positions(repair, budget):
    bench = Bench(max_batch_tokens=budget)
    head = document(0, 20)
    (one, two, three) = (document(n, 53 + n) for n in (1, 2, 3))
    bench.ask(head + one + two + three, 1)
    computed = bench.runner.computed
    prompt = head + three + one + two + document(9, 40)
    result = bench.ask(prompt, 20, REUSE, repair=repair)
    assert result.mode is REUSE
    assert result.approximate
    assert result.exact_cached_tokens == 16
    assert result.cached_tokens == 16 + result.reused_span_tokens
    assert result.kv_reuse_ratio == result.cached_tokens / len(prompt)
    assert result.reused_span_tokens > {BARE: 100, SEAMS: 60, BLEND: 40, QUERY: 40}[repair]
    assert (bench.runner.probed > 0) == (repair in (BLEND, QUERY))
    assert bench.runner.asked == (32 if repair is QUERY else 0)
    assert sum(result.phases.values()) == pytest.approx(result.total_ms)
    assert result.cached_tokens + bench.runner.computed - computed == len(prompt) + 19
    assert bench.manager.used_block_count == 0
    bench.manager.check_invariants([])


def test_approximate_blocks_are_never_published():
    bench, head, one, two = served()
    before = bench.manager.published_block_count
    prompt = head + two + one
    result = bench.ask(prompt, 40, REUSE, repair=BARE)
    assert result.approximate
    assert bench.manager.published_block_count == before
    again = bench.ask(prompt, 40)
    assert again.cached_tokens == 32
    assert again.mode is GenerationMode.PREFIX_CACHE


def test_a_reuse_request_without_a_match_is_exact_and_published():
    bench = Bench()
    prompt = document(0, 70)
    handle = bench.ask(prompt, 2, REUSE, repair=BARE)
    result = handle
    assert (result.mode, result.approximate, result.recomputed_tokens) == (
        GenerationMode.PREFIX_CACHE,
        False,
        0,
    )
    assert bench.manager.peek(prompt, bench.parts.root) == 64


def test_a_span_block_is_not_freed_while_shared():
    """Blocks that are shared at another position are not allocated to other requests meanwhile."""
    bench = Bench(14, max_num_seqs=4, max_batch_tokens=16)
    head = document(0, 17)
    one = document(1, 80)
    bench.ask(one, 1)
    reusing = bench.submit(head + one + [3], 30, REUSE, repair=BARE)
    for _ in range(3):
        bench.step()
    others = [bench.submit(document(number, 60), 20) for number in (5, 6, 7)]
    bench.run()
    bench.answer(reusing)
    assert reusing.result(0).approximate
    for handle in others:
        bench.answer(handle)


@pytest.mark.parametrize("when", ["probe", "query", "repair"])
def test_a_failure_in_probe_or_repair_ends_only_its_request(when):
    bench = Bench(max_batch_tokens=32)
    docs = [document(number, 70) for number in (1, 2)]
    bench.ask(joined(docs), 1)
    other = bench.submit([9, 8, 7], 30)
    prompt = document(4, 20) + docs[1] + docs[0] + [1, 2]
    handle = bench.submit(
        prompt, 3, REUSE, repair={"probe": BLEND, "query": QUERY, "repair": BARE}[when]
    )
    if when != "repair":
        bench.runner.deviations = bench.runner.masses = lambda *arguments: 1 / 0
    else:
        bench.runner.nan_for = {prompt[31]}  # the end of the first stretch
    bench.run()
    with pytest.raises(KVBoostError if when == "repair" else ZeroDivisionError):
        handle.result(0)
    bench.answer(other)
    assert bench.manager.used_block_count == 0


def test_spans_are_not_shared_between_tenants():
    bench = Bench()
    doc = document(1, 80)
    bench.ask(doc, 1, tenant="a")
    prompt = document(2, 20) + doc + [1]
    foreign = bench.submit(prompt, 2, REUSE, repair=BARE, tenant="b")
    own = bench.ask(prompt, 2, REUSE, repair=BARE, tenant="a")
    assert not foreign.result(0).approximate
    assert own.reused_span_tokens > 60


def test_a_repeated_document_uses_one_set_of_blocks():
    bench = Bench()
    doc = document(1, 96)
    bench.ask(doc, 1)
    prompt = document(2, 16) + doc + document(3, 5) + doc + [1]
    handle = bench.submit(prompt, 12, REUSE, repair=BARE)
    bench.step()
    (table,) = (sequence.blocks for sequence in bench.scheduler.running)
    assert len(table.spans) == 2
    assert set(table.spans[0].block_ids) & set(table.spans[1].block_ids)
    bench.run()
    bench.answer(handle)


def test_a_prompt_that_does_not_fit_with_spans_runs_exactly():
    """Spans begin and end inside blocks, so with them the prompt needs more blocks than its tokens
    fill.
    """
    bench = Bench(9)
    docs = [document(number, 41) for number in (1, 2, 3)]
    bench.ask(joined(docs), 1)
    prompt = [7] * 16 + docs[2] + docs[0] + docs[1][:40] + [1]
    assert not bench.ask(prompt, 5, REUSE, repair=BARE).approximate


@pytest.mark.parametrize("repair", [SEAMS, BLEND], ids=["seams", "blend"])
@pytest.mark.parametrize("preempted", [False, True], ids=["undisturbed", "preempted"])
def test_hit_reused_and_computed_tokens_add_up_to_the_prompt(repair, preempted):
    """Each token counts once, also for a preempted sequence that shares its spans again."""
    bench = Bench()
    head = document(0, 20)
    one = document(1, 105)
    two = document(2, 104)
    bench.ask(head + one + two, 1)
    prompts = [head + two + one, head + one[:40] + document(5, 20)]
    handles = [bench.submit(prompt, 70, REUSE, repair=repair) for prompt in prompts]
    if preempted:
        for _ in range(9):
            bench.step()
        [sharing] = [sequence for sequence in bench.scheduler.running if sequence.blocks.spans]
        bench.scheduler._preempt(sharing)
        bench.step()
        assert sharing.blocks.spans, "the sequence must reuse spans again after preemption"
    bench.run()
    results = [handle.result(0) for handle in handles]
    assert sum(result.preemptions for result in results) == preempted
    paged = paged_stats(
        bench.parts, bench.scheduler, EngineConfig(), bench.core.tiering, StepTimes(), 0
    )
    cache = cache_stats(bench.parts, bench.core.tiering)
    assert paged["span_tokens"] > 0
    assert paged["hit_tokens"] == sum(result.exact_cached_tokens for result in results)
    total = len(head + one + two) + sum(map(len, prompts))
    assert paged["hit_tokens"] + paged["span_tokens"] + paged["miss_tokens"] == total
    assert cache["approximate_hits"] == paged["span_tokens"] // 16
    assert cache["hit_rate"] == (paged["hit_tokens"] + paged["span_tokens"]) / total
    assert cache["exact_hit_rate"] == paged["hit_tokens"] / total
    if not preempted:
        assert paged["span_tokens"] == sum(result.reused_span_tokens for result in results)
        first = results[0]
        assert first.computed_prompt_tokens == 229 - first.cached_tokens
        assert first.cached_tokens == first.exact_cached_tokens + first.reused_span_tokens
        others = sum(
            first.phases[name] for name in ("tokenize", "queue", "lookup", "load", "decode")
        )
        assert first.prompt_ms == pytest.approx(first.total_ms - others, abs=1e-3)


def test_cached_tokens_never_exceed_the_prompt():
    """A preempted sequence finds its former prefix only at another position."""
    bench = Bench(max_batch_tokens=16)
    one, two = document(1, 96), document(2, 96)
    bench.ask(one, 1)
    bench.ask(document(7, 16) + one + two, 1)
    prompt = one + two + document(3, 40)
    handle = bench.submit(prompt, 2, REUSE, repair=BARE)
    bench.step()
    [sequence] = bench.scheduler.running
    prefix = sequence.blocks.block_ids[:6]
    bench.scheduler._preempt(sequence)
    assert bench.manager.reset(prefix) == 6
    bench.step()
    assert sum(span.stop - span.start for span in sequence.blocks.spans) > 160
    bench.run()
    result = handle.result(0)
    assert (result.exact_cached_tokens, result.approximate) == (96, True)
    assert result.cached_tokens == result.exact_cached_tokens + result.reused_span_tokens
    assert result.cached_tokens <= result.prompt_tokens
    assert result.computed_prompt_tokens >= 0
    assert result.recomputed_tokens >= 0


def test_the_block_map_marks_span_blocks():
    bench, head, one, two = served()
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
