"""Faults in the CUDA kernels, found over fibers."""

from __future__ import annotations

from faults.fault import faults

_CSRC = "cuda_ext/kvboost_edge_cuda/csrc"
_WORK = f"{_CSRC}/work.cuh"
_MMA = f"{_CSRC}/attention_mma.cuh"
_WMMA = f"{_CSRC}/attention_wmma.cuh"
_ATTENTION = "tests/cuda_ext/test_attention.py"
_CACHE = "tests/cuda_ext/test_cache.py"

FAULTS = faults(
    (
        "a tile needs no mask if any row sees it",
        _WORK,
        "clear = {last.begin, first.end}",
        "clear = first",
        _ATTENTION,
    ),
    (
        "blocks are taken to hold 16 tokens",
        _WORK,
        "(key - index * block_size)",
        "(key % 16)",
        _ATTENTION,
    ),
    (
        "the last tiles of an uneven split are lost",
        _WORK,
        "(num_tiles + p.num_splits - 1)",
        "num_tiles",
        _ATTENTION,
    ),
    (
        "every split adds the sink",
        _WORK,
        "if (!p.sinks || p.num_splits > 1)",
        "if (!p.sinks)",
        _ATTENTION,
    ),
    ("channels behind head_dim are read", _WORK, " && channel < head_dim", "", _ATTENTION),
    (
        "values are read before they are there",
        _MMA,
        "        wait_copies();\n        __syncthreads();  // the values",
        "        __syncthreads();  // the values",
        _ATTENTION,
    ),
    (
        "values take the queries' place too early",
        _MMA,
        "        __syncthreads();  // all queries are read before the values overwrite them\n",
        "",
        _ATTENTION,
    ),
    (
        "keys are overwritten by values",
        _WMMA,
        "        __syncthreads();  // the keys are no longer read\n",
        "",
        _ATTENTION,
    ),
    (
        "a row without keys is not a number",
        _MMA,
        "largest = quad_max(largest);\n        const float base = largest == negative_infinity() "
        "? 0 : largest;",
        "largest = quad_max(largest);\n        const float base = largest;",
        _ATTENTION,
    ),
    (
        "a block is copied from what it was at first",
        f"{_CSRC}/cache.cuh",
        "for (int i = 0; i < p.num_pairs; ++i)",
        "for (int i = p.num_pairs - 1; i >= 0; --i)",
        _CACHE,
    ),
)
