"""Blocks that were stored stay right only as long as the same tokens give the same bits."""

from __future__ import annotations

import hashlib

import pytest

from kvboost_edge import CPUPagedEngine
from kvboost_edge.runners.native.numerics import NUMERICS_VERSION

TOKENS = [(7 * i * i + 3 * i) % 250 for i in range(96)]
# By version, form of the linear kernels and of attention, and bits of the cache.
BITS = {
    (1, "avx2", "float", 16): "5341531b521407c5",
    (1, "avx2", "plain", 8): "41fb452d6438f085",
    (1, "avx2", "plain", 4): "755d4c1555f6571a",
    (1, "vnni512", "float", 16): "814a1f422b5ab5d8",
    (1, "vnni512", "vnni512", 8): "d396713ee29204db",
    (1, "vnni512", "vnni512", 4): "638a1a82db30830a",
}


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
def test_the_same_tokens_give_the_bits_that_this_version_stands_for(kv_bits):
    """Fails where a change of kernels or program changed what they give: raise NUMERICS_VERSION, and note the new bits
    here. Otherwise blocks on disk and in Redis would be mixed with others that are not equal to them."""
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=8, kv_cache_bits=kv_bits, weights="int8"
    ) as engine:
        logits = engine.logits(TOKENS)
        stored = engine._parts.backend.read_blocks(range(6))
        stats = engine.paged_stats()
    found = hashlib.sha256(logits.tobytes() + stored.tobytes()).hexdigest()[:16]
    key = (NUMERICS_VERSION, stats["kernel_path"], stats["attention_path"], kv_bits)
    if key not in BITS:
        pytest.skip(f"no bits are on record for {key}; here they are {found!r}")
    assert found == BITS[key]
