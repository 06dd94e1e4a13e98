"""Faults in the CUDA kernels, found by tests that run them on the CPU."""

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
        "skips the mask for a tile that any row sees",
        _WORK,
        "clear = {last.begin, first.end}",
        "clear = first",
        _ATTENTION,
    ),
    (
        "assumes that blocks hold 16 tokens",
        _WORK,
        "(key - index * block_size)",
        "(key % 16)",
        _ATTENTION,
    ),
    (
        "loses the last tiles of an uneven split",
        _WORK,
        "(num_tiles + p.num_splits - 1)",
        "num_tiles",
        _ATTENTION,
    ),
    (
        "adds the sink in every split",
        _WORK,
        "if (!p.sinks || p.num_splits > 1)",
        "if (!p.sinks)",
        _ATTENTION,
    ),
    ("reads channels beyond head_dim", _WORK, " && channel < head_dim", "", _ATTENTION),
    (
        "reads values before their copy completes",
        _MMA,
        "        wait_copies();\n        __syncthreads();  // the values",
        "        __syncthreads();  // the values",
        _ATTENTION,
    ),
    (
        "overwrites queries with values before all are read",
        _MMA,
        "        __syncthreads();  // all queries are read before the values overwrite them\n",
        "",
        _ATTENTION,
    ),
    (
        "overwrites keys with values before all are read",
        _WMMA,
        "        __syncthreads();  // the keys are no longer read\n",
        "",
        _ATTENTION,
    ),
    (
        "returns NaN for a row without keys",
        _MMA,
        "largest = quad_max(largest);\n        const float base = largest == negative_infinity() "
        "? 0 : largest;",
        "largest = quad_max(largest);\n        const float base = largest;",
        _ATTENTION,
    ),
    (
        "copies block pairs in reverse order",
        f"{_CSRC}/cache.cuh",
        "for (int i = 0; i < p.num_pairs; ++i)",
        "for (int i = p.num_pairs - 1; i >= 0; --i)",
        _CACHE,
    ),
)
