"""Helpers for the tests of tables with recurrent state: a small manager, one pass, and a whole
prompt.
"""

from __future__ import annotations

from typing import NamedTuple

from helpers.kvcache.manager_cases import ROOT, B
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import PassSlots, StateSizes, TableStates


def manager_of(
    num_blocks: int = 40, num_slots: int = 12, interval: int = 1024, every_block: bool = False
) -> KVCacheManager:
    return KVCacheManager(num_blocks, B, state_sizes=StateSizes(num_slots, interval, every_block))


def states_of(manager: KVCacheManager) -> TableStates:
    assert manager.states is not None
    return manager.states


class Kept(NamedTuple):
    """The slots of a pass and the positions between which it computed."""

    plan: PassSlots
    start: int
    stop: int

    @property
    def slots(self) -> dict[int, int]:
        """Return the slot of each snapshot, by the number of the pass's rows before it."""
        inside = dict(self.plan.saves)
        return {**inside, self.stop - self.start: self.plan.write} if self.plan.keeps else inside


def run_pass(
    manager: KVCacheManager, table: BlockTable, tokens: list[int], stop: int | None = None
) -> Kept:
    """Run one pass up to `stop`, or over all tokens if it is None."""
    stop = len(tokens) if stop is None else stop
    manager.extend(table, stop)
    start = table.num_computed_tokens
    plan = states_of(manager).plan(table, start, stop)
    manager.commit(table, tokens, stop)
    return Kept(plan, start, stop)


def cold(
    manager: KVCacheManager, tokens: list[int], *others: BlockTable, hints: tuple[int, ...] = ()
) -> Kept:
    """Compute a whole prompt in one pass and free its table. `others` are live tables."""
    table = manager.open_table(tokens, ROOT, hints=hints)
    plan = run_pass(manager, table, tokens)
    manager.free(table)
    manager.check_invariants(others)
    return plan


def rows(kept: Kept) -> list[int]:
    return list(kept.slots)
