"""FlashAttention-2 forward kernels for NVIDIA GPUs of sm_70 to sm_90, contiguous, ragged and paged.

The three functions take the arguments of flash-attn's in the same order. `unavailable_reason` says
why they cannot run here; calling them then raises `ExtensionUnavailable` with that reason.
"""

from __future__ import annotations

from kvboost_edge_cuda.blocks import copy_blocks, write_kv
from kvboost_edge_cuda.interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    paged_attention,
)
from kvboost_edge_cuda.library import ExtensionUnavailable, unavailable_reason

__all__ = [
    "ExtensionUnavailable",
    "__version__",
    "copy_blocks",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "paged_attention",
    "unavailable_reason",
    "write_kv",
]

__version__ = "0.1.0"
