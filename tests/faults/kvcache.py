"""Faults in the block pool."""

from __future__ import annotations

from faults.fault import Fault, fault

_ROOM = ("tests/kvcache",)

FAULTS = (
    fault(
        "copy-on-write skipped",
        "kvcache/manager.py",
        "if self._pool.ref_count(block_id) == 1:",
        "if self._pool.ref_count(block_id) >= 1:",
        *_ROOM,
    ),
    fault(
        "a hash is trusted without comparing tokens",
        "kvcache/prefix_index.py",
        " and entry.tokens == tokens",
        "",
        *_ROOM,
    ),
    fault(
        "the parent's identity is not compared",
        "kvcache/prefix_index.py",
        " and entry.parent_serial == parent_serial",
        "",
        *_ROOM,
    ),
    Fault(
        "hash cut to 8 bits and trusted",
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
        "a reference is not released",
        "kvcache/manager.py",
        "for index in range(len(table.block_ids) - 1, -1, -1):",
        "for index in range(len(table.block_ids) - 2, -1, -1):",
        *_ROOM,
    ),
    fault(
        "blocks are freed head first",
        "kvcache/manager.py",
        "for index in range(len(table.block_ids) - 1, -1, -1):",
        "for index in range(len(table.block_ids)):",
        *_ROOM,
    ),
    fault(
        "what is used once has no share",
        "kvcache/eviction/order.py",
        "len(once) > self.once_share or once.first < again.first",
        "once.first < again.first",
        *_ROOM,
    ),
    fault(
        "nothing leaves the recency window",
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
        "retained is never too much",
        "kvcache/eviction/order.py",
        "len(queue) > self._floor:",
        "False:",
        *_ROOM,
    ),
    fault(
        "a pin's time is never over",
        "kvcache/eviction/pins.py",
        (
            "            serial\n"
            "            for serial, pin in self._pins.items()\n"
            "            if pin.until is not None and pin.until <= now\n"
        ),
        "            serial for serial, pin in self._pins.items() if pin.until is not None and "
        "pin.until < 0\n",
        *_ROOM,
    ),
    fault(
        "what two pins share goes with the first",
        "kvcache/eviction/pins.py",
        "            if not self._counts[block_id]:\n",
        "            if self._counts[block_id] >= 0:\n",
        *_ROOM,
    ),
    fault(
        "a half-filled block is published",
        "kvcache/block_table.py",
        "return whole // block_size",
        "return -(-whole // block_size)",
        *_ROOM,
    ),
    fault(
        "the model is not part of the root hash",
        "kvcache/hashing.py",
        '"model_fingerprint": model_fingerprint,',
        '"model_fingerprint": "",',
        *_ROOM,
    ),
    fault(
        "tenants share a root",
        "kvcache/hashing.py",
        '(("tenant", tenant), ("cache_salt", cache_salt))',
        '(("cache_salt", cache_salt),)',
        "tests/engine/test_terms.py",
    ),
    fault(
        "quantized blocks are written into again",
        "kvcache/lookup.py",
        "if self.whole_blocks and found.block_ids and covers_all",
        "if found.block_ids and not covers_all and covers_all",
        "tests/kvcache/test_lookup.py",
    ),
)
