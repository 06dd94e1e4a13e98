"""Parts shared by the models of a pool: tables, prompts that often share a prefix, and an observer
of its events.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.hashing import chain_hash, state_hash
from kvboost_edge.kvcache.manager import KVCacheManager

Prefix = tuple[bytes, tuple[int, ...]]
POISON: Prefix = (b"poison", ())
ROOTS = [b"A" * 32, b"B" * 32]

# Prompts that often share a prefix: a stretch of one of two texts, then up to three other tokens.
TEXTS = [[0] * 16, [0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1]]
tokens_lists = st.builds(
    lambda text, length, tail: text[:length] + tail,
    st.sampled_from(TEXTS),
    st.integers(1, 14),
    st.lists(st.integers(0, 1), max_size=3),
)
picks = st.integers(0, 1000)


@dataclasses.dataclass(eq=False)
class Live:
    """Model of one live table.

    Attributes:
        node: identity of the prefix that its chain has reached.
        withdrawn: blocks that it rewrites in place, by index.
        copied: blocks that were replaced by copies to write into, by index.
        lacks_some: it was forked while the other table rewrote such a block, which may never be
            published again.
    """

    table: BlockTable
    tokens: list[int]
    root: bytes
    computed: int = 0
    extended: int = 0
    chained: int = 0
    node: Any = None
    uncounted: tuple[int, int] = (0, 0)
    withdrawn: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)
    uses_cache: bool = True
    copied: dict[int, tuple[Any, int]] = dataclasses.field(default_factory=dict)
    lacks_some: bool = False


def go_over(
    seq: Live,
    cached: dict[tuple[Any, tuple[int, ...]], tuple[int, int]],
    before: list[int],
    num_full: int,
    size: int,
) -> None:
    """Check the full blocks of a caching table after a commit. They are the blocks that lookups
    find, its own or duplicates of other tables. A block that it had copied is republished by the
    copy if it was evicted meanwhile.
    """
    for index in sorted(index for index in seq.copied if index < num_full):
        key, node = seq.copied.pop(index)
        _, node = cached.setdefault(key, (before[index], node))
        if index == seq.chained - 1:
            seq.node = node
    published = {block_id: tokens for (_, tokens), (block_id, _) in cached.items()}
    held = [published.get(block_id) for block_id in seq.table.block_ids[:num_full]]
    full = [tuple(seq.tokens[index * size : (index + 1) * size]) for index in range(num_full)]
    assert seq.lacks_some or held == full
    assert seq.table.block_ids[num_full:] == before[num_full:]


def cut_hash(bits: int) -> Any:
    """Return a hash function with so few bits that collisions are frequent."""

    def cut(parent: bytes, tokens: bytes) -> bytes:
        return bytes([chain_hash(parent, tokens)[0] & ((1 << bits) - 1)])

    return cut


def held(manager: KVCacheManager) -> set[bytes]:
    """Return the hashes of all published blocks, read block by block, and of their snapshots, read
    slot by slot.
    """
    keys = [manager.content.address(block_id) for block_id in range(manager.num_blocks)]
    kept = () if manager.states is None else manager.states.slots.snapshots()
    states = {
        state_hash(key.prefix_hash) for block_id in kept if (key := keys[block_id]) is not None
    }
    return states | {key.prefix_hash for key in keys if key is not None}


class Asking(RuleBasedStateMachine):
    """A machine of random operations that sometimes takes the events and accumulates them."""

    manager: KVCacheManager

    @initialize()
    def know_nothing(self) -> None:
        self.told: set[bytes] = set()
        self.asked = False

    @rule(whole=st.booleans())
    def ask(self, whole: bool) -> None:
        events = self.manager.events.take(whole)
        assert len(set(events.published)) == len(events.published)
        assert not set(events.published) & set(events.evicted)
        assert events.is_whole or self.asked
        assert events.is_whole or not whole
        self.told = set(events.published) | (
            set() if events.is_whole else self.told - set(events.evicted)
        )
        self.asked = True
        assert self.told == held(self.manager)
