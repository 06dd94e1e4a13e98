"""Blocks that the eviction policy holds, as pins will: requests are told, and an idle engine counts them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from engine.fake_runner import Bench
from kvboost_edge.errors import CapacityError
from kvboost_edge.kvcache.block_pool import BlockPool
from kvboost_edge.kvcache.eviction import LeastRecentlyUsed


class Holder(LeastRecentlyUsed):
    """Holds what it is given."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        super().__init__(block_ids)
        self.blocks: list[int] = []

    def held(self) -> Collection[int]:
        return self.blocks


def bench_with_holder(num_blocks: int) -> tuple[Bench, Holder]:
    bench = Bench(num_blocks)
    bench.manager._pool = BlockPool(num_blocks, Holder)
    holder = bench.manager._pool._free
    assert isinstance(holder, Holder)
    return bench, holder


def hold(bench: Bench, holder: Holder, count: int) -> None:
    holder.blocks += bench.manager._pool.take(count)


def test_a_request_larger_than_what_is_left_is_refused_at_once() -> None:
    bench, holder = bench_with_holder(8)
    hold(bench, holder, 5)
    with pytest.raises(CapacityError, match=r"the pool has 3 of 8 that are not pinned; lower max_new_tokens, unpin"):
        bench.submit([1] * 60)
    handle = bench.submit([1] * 40)
    bench.run()
    assert handle.result(0).generated_tokens == 8
    bench.core._watch.idle()


def test_a_request_that_fitted_when_it_was_queued_is_refused_and_not_a_contradiction() -> None:
    """The pool shrank while it waited: nothing else runs, so nothing would ever free what it needs."""
    bench, holder = bench_with_holder(8)
    handle = bench.submit([1] * 100)
    hold(bench, holder, 5)
    bench.run()
    with pytest.raises(CapacityError, match="the pool has 3 of 8"):
        handle.result(0)
    later = bench.submit([2] * 20)
    bench.run()
    assert later.result(0).generated_tokens == 8
