"""The block checks of `debug_checks=True`. They are slow."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvboost_edge.backends.base import Backend
from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.manager import BLOCK_CACHED, BLOCK_SHARED, KVCacheManager

__all__ = ["BlockWatch", "Unwatched"]


class Unwatched:
    """Checks nothing."""

    def idle(self) -> None:
        """Nothing runs now."""

    def before(self, new_blocks: Iterable[int], sources: Set[int]) -> None:
        """A pass is about to run; `new_blocks` hold nothing yet, of `sources` copies are about to
        be made.
        """

    def after(self) -> None:
        """The pass is over."""


class BlockWatch(Unwatched):
    """New blocks are filled with NaN, so that reading what was never written shows; those that
    nobody may write (shared and idle cached ones) are compared before and after a pass; an idle
    engine's bookkeeping is recomputed. The same of slots of states, where there are some: snapshots
    may not be written. What drafts bring to states is forgotten before each pass.
    """

    def __init__(self, manager: KVCacheManager, backend: Backend) -> None:
        self._manager = manager
        self._backend = backend
        self._checksums: dict[int, int] = {}
        self._snapshots: dict[tuple[int, int], int] = {}  # (block, slot) -> checksum of the state

    def idle(self) -> None:
        """CacheCorruption where blocks are held although nothing runs."""
        self._manager.check_invariants([])

    def before(self, new_blocks: Iterable[int], sources: Set[int]) -> None:
        """Poison and remember."""
        self._backend.poison_blocks([block for block in new_blocks if block not in sources])
        states = self._manager.block_states()
        blocks = [
            block for block, state in enumerate(states) if state in (BLOCK_CACHED, BLOCK_SHARED)
        ]
        self._checksums = dict(zip(blocks, self._backend.checksum_blocks(blocks), strict=True))
        if self._manager.states is not None and self._backend.states is not None:
            self._backend.states.poison(self._manager.states.unwritten())
            self._backend.states.poison_drafts()
            self._snapshots = self._states_now()

    def _states_now(self) -> dict[tuple[int, int], int]:
        if self._manager.states is None or self._backend.states is None:
            return {}
        kept = self._manager.states.slots.snapshots()
        return dict(
            zip(kept.items(), self._backend.states.checksums(list(kept.values())), strict=True)
        )

    def after(self) -> None:
        """CacheCorruption where a block was written that was not to be."""
        found = self._backend.checksum_blocks(list(self._checksums))
        for (block, old), new in zip(self._checksums.items(), found, strict=True):
            if old != new:
                raise CacheCorruption(f"block {block} was written while it was shared or cached")
        for (block, slot), checksum in self._states_now().items():
            if self._snapshots.get((block, slot), checksum) != checksum:
                raise CacheCorruption(
                    f"the state behind block {block}, in slot {slot}, was written while it was kept"
                )
