"""Spans at other positions through scheduler, tables and batches: the fake runner reads every token back where it must
be, so what is shared wrongly shows as an error or as other tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.fake_runner import ROOT, Bench, expected_tokens, token_logits
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.kvcache.hashing import LoneRoot
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


def test_of_chains_computed_alone_only_what_follows_the_context_is_offered() -> None:
    bench = Bench()
    behind, text = document(5, 48), document(1, 64)
    lone = LoneRoot.of(ROOT, 3)
    assert lone == LoneRoot.of(ROOT, 3) != LoneRoot.of(ROOT, 2)
    bench.submit(behind + text, 1, terms={"root": lone})
    bench.run()
    content, harvest = bench.manager.content, bench.scheduler.sharing.harvest
    assert (len(content.under(lone)), len(content.under(ROOT))) == (3, 4)
    assert harvest.context_of(text, ROOT) == 48
    assert harvest.context_of(text, lone) is None
    assert [harvest.context_of(behind, root) for root in (ROOT, lone)] == [None, None]
    assert bench.manager.peek(behind + text, ROOT) == 0
    # Blocks stay shared when those before them are gone, and when those come back.
    assert bench.manager.reset(content.under(lone)) == 3
    bench.check()
    assert harvest.context_of(text, ROOT) == 48
    bench.submit(behind + text, 1, terms={"root": lone})
    bench.run()
    assert (len(content.under(lone)), len(content.under(ROOT))) == (3, 8)
    assert harvest.context_of(text, ROOT) == 48
    prompt = document(0, 20) + text + document(9, 9)
    handle = bench.submit(prompt, 20, REUSE, repair=BARE)
    assert bench.manager.reset(content.under(ROOT)) == 8
    bench.run()
    assert list(handle.result(0).output_token_ids) == expected_tokens(prompt, 20)
    assert not handle.result(0).approximate


@pytest.mark.parametrize("repair", [BARE, SEAMS, BLEND], ids=lambda repair: repair.strategy.value)
@pytest.mark.parametrize("start", [75, 99, 120, 130])
def test_logits_behind_spans_are_those_of_the_tokens(repair: Repair, start: int) -> None:
    """No row that is asked for is ever shared: what is found ends before the first of them."""
    bench = Bench()
    text = document(1, 90)
    bench.submit(document(0, 32) + text, 1)
    bench.run()
    ids = document(3, 20) + text + document(9, 21)
    handle, rows = bench.submit_logits(ids, start, terms={"mode": REUSE, "repair": repair})
    bench.run()
    logits = np.concatenate(rows)
    assert np.array_equal(logits, np.stack([token_logits(ids[: i + 1]) for i in range(start, len(ids))]))
    assert handle.result(0).reused_span_tokens > 0
