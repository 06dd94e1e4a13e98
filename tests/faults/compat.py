"""Faults in other systems' interfaces."""

from __future__ import annotations

from faults.fault import fault

FAULTS = (
    fault(
        "a partial hit of LMCache counts no misses",
        "compat/lmcache/engine.py",
        "self.miss_tokens_count += num_tokens - end",
        "self.miss_tokens_count += 0 if kv else num_tokens - end",
        "tests/compat/lmcache/test_oracle.py",
    ),
    fault(
        "LMCache's memory forgets heads first",
        "compat/lmcache/stores.py",
        "for address in reversed(addresses):",
        "for address in addresses:",
        "tests/compat/lmcache/test_stores.py",
    ),
    fault(
        "llmds' prefix map counts pages",
        "compat/page_cache.py",
        "sum(map(self._manager.is_published, self._prefixes))",
        "self._manager.published_block_count",
        "tests/compat/test_llmds_interface.py",
    ),
)
