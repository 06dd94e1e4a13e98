"""FlashAttention-2 forward kernels for NVIDIA GPUs, sm_70 to sm_90: dense, ragged and paged.

The functions named `flash_attn_*` take flash-attn's arguments in the same order. If the kernels
cannot run in this process, `unavailable_reason` returns the reason, and the functions raise
`ExtensionUnavailable` with the same reason.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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


def __getattr__(name: str) -> str:
    """Read `__version__` from the installed metadata, or "0+unknown" if there is none."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return version("kvboost-edge-cuda")
    except PackageNotFoundError:
        return "0+unknown"
