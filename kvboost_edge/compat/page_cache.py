"""llmds' page cache on top of the integer block pool, with prefix sharing and copy-on-write.

Payloads may be of any type. Sequences are attached and detached as a whole, and `get` returns their
payloads. Pages with equal prefix tokens and payloads are stored once. `KVCacheManager` does the
bookkeeping, and the payloads are kept in a separate list by page.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from kvboost_edge.errors import CapacityError, ConfigError, RequestError
from kvboost_edge.kvcache.block_table import BlockTable
from kvboost_edge.kvcache.hashing import prefix_hashes
from kvboost_edge.kvcache.manager import BLOCK_FREE, KVCacheManager

__all__ = ["Draft", "KVCache", "PageAllocator", "PageStats"]

# Pads the key of a partly covered page. A prefix that really ends with this id finds the same page.
# That is harmless, because payloads are compared before a page is shared.
_FILLER = 2**32 - 1
_ROOT = b"llmds"
_NOT_OFFERED = {
    "alloc": "the cache allocates pages when a sequence is attached; use KVCache.attach",
    "free": "the cache frees pages with the last sequence that holds them; use KVCache.detach",
    "defragment": "any free page can be used for any sequence, so there is nothing to compact",
    "allocation_count": "allocations are not counted; use allocated_pages",
    "free_count": "freed pages are not counted; use free_pages",
}


class KVCache:
    """Payloads of sequences in `max_pages` pages of `page_size` payloads each. Not thread-safe.

    Example with page_size 4: attach("a", [k0 .. k5], prefix_tokens=[7, 8, 9, 10]) takes two pages,
    and the four tokens are the key of the first one. Then attach("b", [k0 .. k3, x],
    prefix_tokens=[7, 8, 9, 10]) shares the first page and takes one more.

    Payloads are deep-copied when they are stored and returned, so callers cannot change payloads of
    other sequences. Objects that Python cannot copy (a lock, a generator) are kept by reference.

    Payloads are equal if `==`, their types and the signs of their numbers agree, at every level of
    nesting. For arrays and tensors, the shape, dtype and all elements must be equal. Payloads that
    cannot be compared count as different and are not shared.

    The prefix pages of a detached sequence become free, but they can still be matched until they
    are reused.
    """

    def __init__(
        self, page_size: int = 512, max_pages: int = 10000, enable_prefix_sharing: bool = True
    ) -> None:
        page_size = _size("page_size", page_size)
        max_pages = _size("max_pages", max_pages)
        if not isinstance(enable_prefix_sharing, bool):
            raise ConfigError(
                f"enable_prefix_sharing={enable_prefix_sharing!r} must be True or False"
            )
        self._page_size = page_size
        self._enable_prefix_sharing = enable_prefix_sharing
        self._manager = KVCacheManager(max_pages, page_size)
        self._manager.duplicates.keep_apart()  # Payloads of equal tokens may differ.
        self._payloads: list[list[Any]] = [[] for _ in range(max_pages)]
        self._sequences: dict[Hashable, BlockTable] = {}
        self._drafts: dict[Hashable, list[Draft]] = {}
        self._prefix_shares = 0
        # Hash of the last page of each attached prefix. Some of these pages may have been evicted.
        self._prefixes: dict[bytes, None] = {}

    @property
    def page_size(self) -> int:
        """Number of payloads per page."""
        return self._page_size

    @property
    def allocator(self) -> PageAllocator:
        """A read-only view of the pages."""
        return PageAllocator(self._manager)

    def attach(
        self, seq_id: Hashable, kv_tokens: Sequence[Any], prefix_tokens: Sequence[int] | None = None
    ) -> None:
        """Store the payloads of a sequence, replacing a sequence with the same id.

        Open drafts of a replaced sequence are rejected.

        Args:
            seq_id: id of the sequence, hashable.
            kv_tokens: the payloads.
            prefix_tokens: token ids of the first payloads. Ids beyond the last payload are ignored.
                Pages are shared with sequences that have the same prefix and payloads, up to the
                first page whose payloads differ.

        Raises:
            CapacityError: too few pages are free, even without the replaced sequence. The cache is
                unchanged.
            RequestError: prefix_tokens are not token ids. The cache is unchanged.
        """
        _check_hashable(seq_id)
        payloads = _copies("kv_tokens", kv_tokens)
        key = self._key(prefix_tokens, len(payloads))
        table = self._manager.open_table(key, _ROOT, use_cache=bool(key))
        num_shared = self._num_equal_pages(table, payloads)
        num_pages = self._num_pages(len(payloads))
        available = self._available_for(seq_id, table, num_shared)
        if num_pages - num_shared > available:
            self._free(table)
            raise CapacityError(
                f"{len(payloads)} payloads need {num_pages} pages of {self._page_size} "
                f"({num_shared} of them shared), but only {available} of "
                f"{self._manager.num_blocks} pages are available; enlarge max_pages or detach "
                "sequences"
            )
        self.detach(seq_id)
        for index in range(num_shared, len(table)):
            # The whole page is overwritten with other payloads, so its content is not copied.
            self._manager.make_writable(table, index)
        self._manager.commit(
            table, key, max(num_shared * self._page_size, table.num_computed_tokens)
        )
        self._manager.extend(table, num_pages * self._page_size)
        self._write(table, num_shared * self._page_size, payloads[num_shared * self._page_size :])
        self._manager.commit(table, key, len(key))
        self._seal(table)
        self._sequences[seq_id] = table
        self._prefix_shares += num_shared > 0
        self._note_prefix(key)

    def detach(self, seq_id: Hashable) -> None:
        """Release the pages of a sequence and reject its open drafts. An unknown id is ignored."""
        table = self._sequences.pop(seq_id, None)
        if table is not None:
            self._close_drafts(seq_id)
            self._free(table)

    def get(self, seq_id: Hashable) -> list[Any] | None:
        """Return copies of the sequence's payloads, in order; None for an unknown id."""
        table = self._sequences.get(seq_id)
        return None if table is None else self._read(table)

    def stats(self) -> dict[str, int]:
        """Return the current statistics by name.

        - total_sequences: attached sequences.
        - total_pages: `max_pages`.
        - allocated_pages: pages held by sequences and open drafts.
        - free_pages: all other pages, including free ones that can still be matched.
        - prefix_shares: number of attaches so far that shared at least one page.
        - prefix_map_size: attached prefixes whose last page can still be matched.
        - shared_pages_count: pages with more than one reference.
        - total_page_refs: references to all pages.
        """
        return {
            "total_sequences": len(self._sequences),
            "total_pages": self._manager.num_blocks,
            "allocated_pages": self._manager.used_block_count,
            "free_pages": self._manager.free_block_count,
            "prefix_shares": self._prefix_shares,
            "prefix_map_size": sum(map(self._manager.is_published, self._prefixes)),
            "shared_pages_count": self._manager.shared_block_count,
            "total_page_refs": self._manager.reference_count,
        }

    def hook_speculative_decode(
        self, seq_id: Hashable, draft_tokens: Sequence[Any]
    ) -> Draft | None:
        """Open a draft: payloads appended to a sequence, copy-on-write.

        The sequence is unchanged until the draft is accepted. Several drafts of a sequence may be
        open at the same time.

        Returns:
            The draft, with methods to accept or reject it; None for an unknown id.

        Raises:
            CapacityError: too few pages are free. The cache is unchanged.
        """
        table = self._sequences.get(seq_id)
        if table is None:
            return None
        payloads = _copies("draft_tokens", draft_tokens)
        fork = self._manager.fork(table)
        try:
            self._append(fork, payloads)
        except CapacityError:
            self._free(fork)
            raise
        draft = Draft(self, seq_id, fork, payloads)
        self._drafts.setdefault(seq_id, []).append(draft)
        return draft

    def check_invariants(self) -> None:
        """Recompute the bookkeeping and compare it with the current one.

        Raises:
            CacheCorruption: the bookkeeping is inconsistent.
        """
        drafts = [draft._table for drafts in self._drafts.values() for draft in drafts]
        self._manager.check_invariants([*self._sequences.values(), *drafts])

    # ---- drafts

    def _accept(self, draft: Draft, payloads: list[Any]) -> None:
        # Dropping the drafts first frees enough pages for the new payloads, so this cannot fail
        # halfway.
        self._close_drafts(draft._seq_id)
        self._append(self._sequences[draft._seq_id], payloads)

    def _close_drafts(self, seq_id: Hashable) -> None:
        for draft in self._drafts.pop(seq_id, []):
            draft._open = False
            self._free(draft._table)

    def _reject(self, draft: Draft) -> None:
        drafts = self._drafts[draft._seq_id]
        drafts.remove(draft)
        if not drafts:
            del self._drafts[draft._seq_id]
        draft._open = False
        self._free(draft._table)

    # ---- pages

    def _num_pages(self, num_payloads: int) -> int:
        return -(-num_payloads // self._page_size)

    def _key(self, prefix_tokens: Sequence[int] | None, num_payloads: int) -> list[int]:
        """Return the prefix's token ids, padded to whole pages; [] if no page can be shared."""
        if not self._enable_prefix_sharing or prefix_tokens is None:
            return []
        if isinstance(prefix_tokens, (str, bytes)) or not hasattr(prefix_tokens, "__getitem__"):
            raise RequestError(
                f"prefix_tokens={prefix_tokens!r} must be a list of token ids or None"
            )
        key: list[int] = []
        for token_id in prefix_tokens[:num_payloads]:
            number = _integer(token_id)
            if number is None:
                raise RequestError(f"prefix_tokens must be token ids, not {token_id!r}")
            key.append(number)
        return key + [_FILLER] * (-len(key) % self._page_size)

    def _note_prefix(self, key: Sequence[int]) -> None:
        """Remember a prefix. If there are many, forget those whose pages were evicted."""
        if key:
            self._prefixes[prefix_hashes(key, _ROOT, self._page_size)[-1]] = None
        if len(self._prefixes) > 2 * self._manager.num_blocks:
            live = filter(self._manager.is_published, self._prefixes)
            self._prefixes = dict.fromkeys(live)

    def _num_equal_pages(self, table: BlockTable, payloads: list[Any]) -> int:
        """Return how many matched pages, counted from the first, have equal payloads."""
        for index, page_id in enumerate(table.block_ids):
            if not _equal(
                self._payloads[page_id],
                payloads[index * self._page_size : (index + 1) * self._page_size],
            ):
                return index
        return len(table)

    def _available_for(self, seq_id: Hashable, table: BlockTable, num_shared: int) -> int:
        """Return the number of available pages if `seq_id` is replaced by `table`.

        Only the first `num_shared` pages of `table` are kept.
        """
        leaving = [draft._table for draft in self._drafts.get(seq_id, [])]
        if seq_id in self._sequences:
            leaving.append(self._sequences[seq_id])
        holds = Counter(page_id for held in (table, *leaving) for page_id in held.block_ids)
        kept = set(table.block_ids[:num_shared])
        released = sum(
            self._manager.ref_count(page_id) == count
            for page_id, count in holds.items()
            if page_id not in kept
        )
        return self._manager.free_block_count + released

    def _append(self, table: BlockTable, payloads: list[Any]) -> None:
        length = self._length(table)
        if payloads and length % self._page_size:
            op = self._manager.make_writable(table, len(table) - 1)
            if op is not None:
                self._payloads[op.dst] = self._payloads[op.src].copy()
        self._manager.extend(table, self._num_pages(length + len(payloads)) * self._page_size)
        self._write(table, length, payloads)
        self._seal(table)

    def _seal(self, table: BlockTable) -> None:
        """Mark all pages as written, without publishing them: payloads have no token ids."""
        num_slots = len(table) * self._page_size
        self._manager.commit(table, range(num_slots), num_slots, publish=False)

    def _write(self, table: BlockTable, start: int, payloads: list[Any]) -> None:
        """Write payloads at positions from `start` on, dropping later payloads of each page."""
        position = start
        while position < start + len(payloads):
            index, offset = divmod(position, self._page_size)
            taken = payloads[position - start : position - start + self._page_size - offset]
            page_id = table.block_ids[index]
            self._payloads[page_id] = self._payloads[page_id][:offset] + taken
            position += len(taken)

    def _length(self, table: BlockTable) -> int:
        return sum(len(self._payloads[page_id]) for page_id in table.block_ids)

    def _read(self, table: BlockTable) -> list[Any]:
        return [
            _copied(payload) for page_id in table.block_ids for payload in self._payloads[page_id]
        ]

    def _free(self, table: BlockTable) -> None:
        page_ids = table.block_ids
        self._manager.free(table)
        for page_id in page_ids:
            if self._manager.block_state(page_id) == BLOCK_FREE:
                self._payloads[page_id] = []


class PageStats(NamedTuple):
    """Page counts of a cache.

    Attributes:
        total_pages: number of pages.
        allocated_pages: number of pages in use.
        free_pages: number of pages not in use.
        fragmentation_ratio: share of pages in use; llmds uses this name.
    """

    total_pages: int
    allocated_pages: int
    free_pages: int
    fragmentation_ratio: float

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self, name)


class PageAllocator:
    """A read-only view of a cache's pages under the names of llmds' PagedAllocator."""

    __slots__ = ("_manager",)

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def page_size(self) -> int:
        """Number of payloads per page."""
        return self._manager.block_size

    @property
    def max_pages(self) -> int:
        """Number of pages in the cache."""
        return self._manager.num_blocks

    def stats(self) -> PageStats:
        """Return the current counts."""
        used = self._manager.used_block_count
        total = self._manager.num_blocks
        return PageStats(total, used, self._manager.free_block_count, used / total)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self, name)


def _refuse(view: object, name: str) -> NoReturn:
    """Raise AttributeError for a missing name, with the reason if llmds has that name."""
    reason = f" is not supported: {_NOT_OFFERED[name]}" if name in _NOT_OFFERED else ""
    raise AttributeError(f"{type(view).__name__}.{name}{reason or ' does not exist'}")


class Draft:
    """A draft of a sequence: `accept(n)` keeps its first n payloads, `reject()` drops all.

    A draft is closed when it is accepted or rejected, when another draft of its sequence is
    accepted, or when the sequence is detached or replaced.
    """

    __slots__ = ("_cache", "_open", "_payloads", "_seq_id", "_table")

    def __init__(
        self, cache: KVCache, seq_id: Hashable, table: BlockTable, payloads: list[Any]
    ) -> None:
        self._cache = cache
        self._seq_id = seq_id
        self._table = table
        self._payloads = payloads
        self._open = True

    @property
    def is_open(self) -> bool:
        """True until the draft is closed."""
        return self._open

    def get(self) -> list[Any]:
        """Return copies of the sequence's payloads followed by those of the draft.

        Raises:
            RequestError: the draft is closed.
        """
        self._check_open()
        return self._cache._read(self._table)

    def accept(self, n: int) -> None:
        """Append the first `n` payloads of the draft to the sequence, and close all its drafts.

        Raises:
            RequestError: `n` is not between 0 and the number of payloads, or the draft is closed.
        """
        self._check_open()
        count = _integer(n)
        if count is None or not 0 <= count <= len(self._payloads):
            raise RequestError(
                f"n={n!r} must be an integer from 0 to the number of drafts, {len(self._payloads)}"
            )
        self._cache._accept(self, self._payloads[:count])

    def reject(self) -> None:
        """Drop the draft and leave the sequence unchanged. A closed draft is ignored."""
        if self._open:
            self._cache._reject(self)

    def _check_open(self) -> None:
        if not self._open:
            raise RequestError(
                f"the draft of seq_id={self._seq_id!r} is closed: it was accepted or rejected, or "
                "its sequence has changed"
            )


def _check_hashable(seq_id: Hashable) -> None:
    try:
        hash(seq_id)
    except TypeError as error:
        raise RequestError(
            f"seq_id={seq_id!r} must be hashable, such as an integer or a string"
        ) from error


def _integer(value: object) -> int | None:
    """Return an integer as an int, and None for any other value, including booleans.

    NumPy integers are accepted.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        return None
    try:
        return operator.index(value)
    except TypeError:  # Arrays have __index__ without being integers.
        return None


def _size(name: str, value: object) -> int:
    number = _integer(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    return number


def _copies(name: str, payloads: object) -> list[Any]:
    if payloads is None or not isinstance(payloads, Iterable):
        raise RequestError(f"{name}={payloads!r} must be a list of payloads")
    return [_copied(payload) for payload in payloads]


def _copied(payload: Any) -> Any:
    try:
        return copy.deepcopy(payload)
    except Exception:  # Objects that cannot be copied are stored by reference.
        return payload


def _equal(left: Any, right: Any) -> bool:
    """Return whether two payloads, or lists of payloads, are equal, including their types.

    Never raises. Payloads that cannot be compared count as different.
    """
    try:
        return _compared(left, right)
    except Exception:
        return False


def _compared(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_compared, left, right))
    if isinstance(left, dict):
        # Compare pairs in order: 1 and True are the same key, and the order of a dict counts.
        return len(left) == len(right) and all(map(_compared, left.items(), right.items()))
    if isinstance(left, (set, frozenset)):
        return left == right and all(type(item) is str for item in left | right)
    if isinstance(left, (float, complex)):
        return left == right and repr(left) == repr(right)  # 0.0 == -0.0
    result = left == right
    if not isinstance(result, bool):
        # Arrays and tensors compare elementwise and broadcast, so shapes are checked first.
        same_kind = left.shape == right.shape and left.dtype == right.dtype
        return bool(same_kind and result.all() and _bits(left) == _bits(right))
    if not result or isinstance(left, (int, str, bytes, bytearray)):
        return result
    # Members of equal objects may differ in type or sign.
    return _compared(left.__reduce_ex__(4), right.__reduce_ex__(4))


def _bits(array: Any) -> bytes:
    """Return the elements of an array or tensor as bytes."""
    if hasattr(array, "untyped_storage"):  # NumPy lacks some of torch's types
        array = array.detach().cpu().contiguous().reshape(-1)
        array = array.view(sys.modules["torch"].uint8).numpy()
    return np.asarray(array).tobytes()
