"""Faults in the interfaces of other systems."""

from __future__ import annotations

from faults.fault import fault

FAULTS = (
    fault(
        "LMCache: counts no misses for a partial hit",
        "compat/lmcache/engine.py",
        "self.miss_tokens_count += num_tokens - end",
        "self.miss_tokens_count += 0 if kv else num_tokens - end",
        "tests/compat/lmcache/test_oracle.py",
    ),
    fault(
        "LMCache: memory store evicts the heads of sequences first",
        "compat/lmcache/stores.py",
        "for address in reversed(addresses):",
        "for address in addresses:",
        "tests/compat/lmcache/test_stores.py",
    ),
    fault(
        "uses the largest of several pool sizes",
        "config.py",
        "return min(counts, default=None)",
        "return max(counts, default=None)",
        "tests/engine/test_bad_input.py",
    ),
    fault(
        "leaves a loaded model on a backend without chunk reuse",
        "engine/build.py",
        'choice.name == "cpu" and runner.turning_refusal is None',
        "False",
        "tests/compat/test_kvboost_interface.py",
    ),
    fault(
        "llmds: prefix map counts pages instead of prefixes",
        "compat/page_cache.py",
        "sum(map(self._manager.is_published, self._prefixes))",
        "self._manager.published_block_count",
        "tests/compat/test_llmds_interface.py",
    ),
    fault(
        "LMCache: memory store reports every sequence as truncated",
        "compat/lmcache/stores.py",
        "        if is_first:",
        "        if True:",
        "tests/compat/lmcache/test_stores.py",
    ),
    fault(
        "ignores padding when decoding rows after a shared prefix",
        "compat/hf_batches.py",
        "    if not is_full:",
        "    if False:",
        "tests/compat/test_hf_batches.py",
    ),
    fault(
        "KVBoost: batch module pads on the left",
        "batch.py",
        "[[1] * (longest - gap) + [0] * gap for gap in gaps]",
        "[[0] * gap + [1] * (longest - gap) for gap in gaps]",
        "tests/test_batch.py",
    ),
)
