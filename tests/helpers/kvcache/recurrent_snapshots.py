"""Shared by the tests of tables with states: a small manager, one pass, a whole prompt."""

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
    """What a pass did, and between which positions."""

    plan: PassSlots
    start: int
    stop: int

    @property
    def slots(self) -> dict[int, int]:
        """Of each state that is kept, by how many rows it is behind."""
        inside = dict(self.plan.saves)
        return {**inside, self.stop - self.start: self.plan.write} if self.plan.keeps else inside


def run_pass(
    manager: KVCacheManager, table: BlockTable, tokens: list[int], stop: int | None = None
) -> Kept:
    """One pass up to `stop`, all there are without one."""
    stop = len(tokens) if stop is None else stop
    manager.extend(table, stop)
    start = table.num_computed_tokens
    plan = states_of(manager).plan(table, start, stop)
    manager.commit(table, tokens, stop)
    return Kept(plan, start, stop)


def cold(
    manager: KVCacheManager, tokens: list[int], *others: BlockTable, hints: tuple[int, ...] = ()
) -> Kept:
    """A whole prompt in one pass, and its table freed; `others` are live."""
    table = manager.open_table(tokens, ROOT, hints=hints)
    plan = run_pass(manager, table, tokens)
    manager.free(table)
    manager.check_invariants(others)
    return plan


def rows(kept: Kept) -> list[int]:
    return list(kept.slots)
