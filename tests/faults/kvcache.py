"""Faults in the block pool."""

from __future__ import annotations

from faults.fault import Fault, fault

_ROOM = ("tests/kvcache",)

FAULTS = (
    fault(
        "skips copy-on-write",
        "kvcache/manager.py",
        "if self._pool.ref_count(block_id) == 1:",
        "if self._pool.ref_count(block_id) >= 1:",
        *_ROOM,
    ),
    fault(
        "trusts a hash without comparing tokens",
        "kvcache/prefix_index.py",
        " and entry.tokens == tokens",
        "",
        *_ROOM,
    ),
    fault(
        "does not compare the parent's identity",
        "kvcache/prefix_index.py",
        " and entry.parent_serial == parent_serial",
        "",
        *_ROOM,
    ),
    Fault(
        "truncates the hash to 8 bits and trusts it",
        "kvboost_edge/kvcache/prefix_index.py",
        (
            (
                "        for block_id in self._buckets.get(prefix_hash, ()):\n",
                (
                    "        for block_id in [\n"
                    "            b for h, ids in self._buckets.items() if h[:1] == "
                    "prefix_hash[:1] for b in ids\n"
                    "        ]:\n"
                ),
            ),
            (
                (
                    "            if (\n"
                    "                entry is not None\n"
                    "                and entry.parent_serial == parent_serial\n"
                    "                and entry.tokens == tokens\n"
                    "            ):\n"
                ),
                "            if entry is not None and True:\n",
            ),
        ),
        (*_ROOM,),
    ),
    fault(
        "leaks one block reference",
        "kvcache/manager.py",
        "for index in range(len(table.block_ids) - 1, -1, -1):",
        "for index in range(len(table.block_ids) - 2, -1, -1):",
        *_ROOM,
    ),
    fault(
        "frees blocks from the head of a sequence",
        "kvcache/manager.py",
        "for index in range(len(table.block_ids) - 1, -1, -1):",
        "for index in range(len(table.block_ids)):",
        *_ROOM,
    ),
    fault(
        "reserves no share for blocks used once",
        "kvcache/eviction/order.py",
        "len(once) > self.once_share or once.first < again.first",
        "once.first < again.first",
        *_ROOM,
    ),
    fault(
        "never moves blocks out of the recency window",
        "kvcache/eviction/order.py",
        "len(recent) > self._window:",
        "False:",
        *_ROOM,
    ),
    fault(
        "eviction starts as plain LRU",
        "kvcache/eviction/order.py",
        "self.once_share = capacity // _LEAST_SHARE",
        "self.once_share = capacity",
        "tests/kvcache/eviction/test_policy.py",
    ),
    fault(
        "does not limit retained blocks",
        "kvcache/eviction/order.py",
        "len(queue) > self._floor:",
        "False:",
        *_ROOM,
    ),
    fault(
        "never expires a pin",
        "kvcache/eviction/pins.py",
        "                if until is not None and until <= now:\n",
        "                if until is not None and until < 0:\n",
        *_ROOM,
    ),
    fault(
        "unpins blocks that another pin still holds",
        "kvcache/eviction/pins.py",
        "            if not self._counts[block_id]:\n",
        "            if self._counts[block_id] >= 0:\n",
        *_ROOM,
    ),
    fault(
        "publishes a half-filled block",
        "kvcache/block_table.py",
        "return whole // block_size",
        "return -(-whole // block_size)",
        *_ROOM,
    ),
    fault(
        "leaves the model out of the root hash",
        "kvcache/hashing.py",
        '"model_fingerprint": model_fingerprint,',
        '"model_fingerprint": "",',
        *_ROOM,
    ),
    fault(
        "gives all tenants the same root hash",
        "kvcache/hashing.py",
        '{"tenant": tenant, "cache_salt": cache_salt}',
        '{"cache_salt": cache_salt}',
        "tests/engine/test_terms.py",
    ),
    fault(
        "gives sparse and exact prefill the same root hash",
        "kvcache/hashing.py",
        'if prefill != "exact":',
        "if False:",
        "tests/engine/test_sparse_prefill.py",
    ),
    fault(
        "writes into quantized blocks again",
        "kvcache/lookup.py",
        "if self.whole_blocks and found.block_ids and covers_all",
        "if found.block_ids and not covers_all and covers_all",
        "tests/kvcache/test_lookup.py",
    ),
)
