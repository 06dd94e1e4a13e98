"""Slow consistency checks of KV blocks, enabled by `debug_checks=True`."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvboost_edge.backends.base import Backend
from kvboost_edge.errors import CacheCorruption
from kvboost_edge.kvcache.manager import BLOCK_CACHED, BLOCK_SHARED, KVCacheManager

__all__ = ["BlockWatch", "NoChecks"]


class NoChecks:
    """A null implementation that checks nothing."""

    def idle(self) -> None:
        """Check the bookkeeping of an idle engine."""

    def before(self, new_blocks: Iterable[int], sources: Set[int]) -> None:
        """Prepare the checks of a forward pass.

        Args:
            new_blocks: newly allocated blocks that hold no KV yet.
            sources: blocks that are about to be copied.
        """

    def after(self) -> None:
        """Check the blocks after a forward pass."""


class BlockWatch(NoChecks):
    """Checks that detect wrong reads and writes of blocks and recurrent state slots.

    - New blocks and the draft slots of recurrent state are filled with NaN before each pass, so
      reads of unwritten KV become visible.
    - Checksums of shared blocks, cached blocks and snapshots are compared before and after a pass.
    - The block manager's bookkeeping is recomputed whenever the engine is idle.
    """

    def __init__(self, manager: KVCacheManager, backend: Backend) -> None:
        self._manager = manager
        self._backend = backend
        self._checksums: dict[int, int] = {}
        self._snapshots: dict[tuple[int, int], int] = {}  # (block, slot) -> checksum of the state

    def idle(self) -> None:
        """Check that an idle engine holds no blocks.

        Raises:
            CacheCorruption: blocks are held, or the bookkeeping is inconsistent.
        """
        self._manager.check_invariants([])

    def before(self, new_blocks: Iterable[int], sources: Set[int]) -> None:
        """Fill new blocks with NaN and record checksums of shared and cached blocks."""
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
        """Check that the forward pass wrote to no shared or cached block.

        Raises:
            CacheCorruption: a shared or cached block, or a snapshot, was overwritten.
        """
        found = self._backend.checksum_blocks(list(self._checksums))
        for (block, old), new in zip(self._checksums.items(), found, strict=True):
            if old != new:
                raise CacheCorruption(f"block {block} was written while it was shared or cached")
        for (block, slot), checksum in self._states_now().items():
            if self._snapshots.get((block, slot), checksum) != checksum:
                raise CacheCorruption(
                    f"the snapshot after block {block}, in slot {slot}, was overwritten"
                )
