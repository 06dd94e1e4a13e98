"""Blocks that are pinned: requests are told, and an idle engine counts them."""

from __future__ import annotations

import pytest

from engine.fake_runner import Bench
from kvboost_edge.errors import CapacityError


def hold(bench: Bench, count: int) -> None:
    for block_id in bench.manager._pool.free_ids()[:count]:
        bench.manager._pool.hold(block_id)


def test_a_request_larger_than_what_is_left_is_refused_at_once() -> None:
    bench = Bench(8)
    hold(bench, 5)
    with pytest.raises(CapacityError, match=r"the pool has 3 of 8 that are not pinned; lower max_new_tokens, unpin"):
        bench.submit([1] * 60)
    handle = bench.submit([1] * 40)
    bench.run()
    assert handle.result(0).generated_tokens == 8
    bench.core._watch.idle()


def test_a_request_that_fitted_when_it_was_queued_is_refused_and_not_a_contradiction() -> None:
    """The pool shrank while it waited: nothing else runs, so nothing would ever free what it needs."""
    bench = Bench(8)
    handle = bench.submit([1] * 100)
    hold(bench, 5)
    bench.run()
    with pytest.raises(CapacityError, match="the pool has 3 of 8"):
        handle.result(0)
    later = bench.submit([2] * 20)
    bench.run()
    assert later.result(0).generated_tokens == 8
