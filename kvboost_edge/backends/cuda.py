"""The torch backend with the project's CUDA kernels for KV writes, block copies and attention.

The pool has torch's format, so torch code also computes bytes, checksums and poison. The kernels
are in the package `kvboost_edge_cuda` (`FORCE_CUDA=1 pip install ./cuda_ext`). Before use they are
compared with torch in float32 on the device.

Work that the kernels do not support falls back to torch, with one warning: KV in float32 (and in
bfloat16 below sm_80), head dims that are not multiples of 8, and tables with segments.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvboost_edge.backends import torch_backend
from kvboost_edge.backends.base import (
    DEFAULT_NUM_OPEN,
    AttentionParams,
    BackendInfo,
    BatchLayout,
    KVSpec,
    LayerKVSpec,
)
from kvboost_edge.backends.batch_layout import check_layout
from kvboost_edge.backends.cuda_check import failed_check, kernel_dtypes
from kvboost_edge.backends.torch.padded_groups import TorchBatch
from kvboost_edge.backends.torch.unquantized_blocks import PlainBlocks
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import BackendUnavailable, CapacityError
from kvboost_edge.kvcache.block_table import CopyOp

__all__ = ["CUDABackend", "CUDABatch", "extension", "find_tier", "make", "unsupported_reason"]

_LOG = logging.getLogger(__name__)
_PACKAGE = "kvboost_edge_cuda"
_INSTALL = "FORCE_CUDA=1 pip install ./cuda_ext"
_MOST_HEAD_DIM = 256
_FIRST_TORCH_FLASH = (8, 0)  # lowest compute capability of torch's flash kernels


def extension() -> Any:
    """Import `kvboost_edge_cuda`; raise BackendUnavailable with the reason if that fails."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise BackendUnavailable(f"{_PACKAGE} is not installed; {_INSTALL}")
    package = importlib.import_module(_PACKAGE)
    reason = package.unavailable_reason()
    if reason is not None:
        raise BackendUnavailable(reason)
    return package


def unsupported_reason(device: str, spec: KVSpec | None = None) -> str | None:
    """Return why the kernels cannot use a device or store KV of this kind, or None.

    The first call for a device tests the kernels on it.
    """
    if device.partition(":")[0] != "cuda":
        return f"{_PACKAGE} runs on CUDA devices"
    reason = torch_backend.unsupported_reason(device, spec)
    if reason is not None:
        return reason
    try:
        return _untrusted_reason(device)
    except (CapacityError, torch.OutOfMemoryError) as error:
        return f"{device} has too little free memory to test the kernels ({error})"


@lru_cache  # which keeps no result if too little memory was free
def _untrusted_reason(device: str) -> str | None:
    try:
        kernels = extension()
    except BackendUnavailable as error:
        return str(error)
    return failed_check(
        lambda spec, num_blocks: CUDABackend(spec, num_blocks, device=device, kernels=kernels),
        torch.device(device),
    )


def find_tier(device: torch.device | str = "cuda") -> str:
    """Return the best flash attention on a device.

    - "kvboost_cuda": the project's kernels
    - "torch_flash": torch's kernel
    - "vanilla": no flash attention, as on all devices other than CUDA
    """
    at = torch.device(device)
    if at.type != "cuda" or not torch.cuda.is_available():
        return "vanilla"
    if unsupported_reason(str(at)) is None:
        return "kvboost_cuda"
    has_flash = (
        torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
    )
    return (
        "torch_flash"
        if has_flash and torch.cuda.get_device_capability(at) >= _FIRST_TORCH_FLASH
        else "vanilla"
    )


def make(
    spec: KVSpec,
    num_blocks: int,
    *,
    device: str,
    num_threads: int | None = None,
    num_open: int = DEFAULT_NUM_OPEN,
    num_state_slots: int = 0,
    num_draft_rows: int = 0,
) -> CUDABackend:
    """Allocate the backend; see `select.BackendModule`. It supports no quantized pools."""
    reason = unsupported_reason(device, spec)
    if reason is not None:
        raise BackendUnavailable(f"backend 'cuda' on device={device!r}: {reason}")
    return CUDABackend(spec, num_blocks, device=device, kernels=extension())


@dataclasses.dataclass(frozen=True, slots=True)
class _Tables:
    """The layout of a pass for the kernels, int32 on the device.

    Attributes:
        cu_seqlens_q: [num_seqs + 1], first query row of each sequence.
        seq_lens: [num_seqs], KV length of each sequence.
        block_tables: [num_seqs, max_blocks].
        longest_q: Largest number of new tokens of a sequence.
        longest_k: Largest KV length of a sequence.
    """

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    longest_q: int
    longest_k: int


class CUDABatch(TorchBatch):
    """A prepared pass: torch's batch, and the kernels' tables if they support the pass."""

    def __init__(self, layout: BatchLayout, block_size: int, device: torch.device) -> None:
        super().__init__(layout, block_size, device)
        self.tables = None if layout.segments is not None else _tables(layout, device)


def _tables(layout: BatchLayout, device: torch.device) -> _Tables:
    num_seqs = len(layout.seq_lens)
    rows = (layout.cu_seqlens_q, layout.seq_lens, layout.block_tables.ravel())
    # Everything is copied to the device at once.
    together = torch.from_numpy(np.concatenate(rows).astype(np.int32)).to(device)
    starts, lengths, tables = together.split([num_seqs + 1, num_seqs, layout.block_tables.size])
    longest = int(np.diff(layout.cu_seqlens_q).max(initial=0))
    return _Tables(
        starts,
        lengths,
        tables.view(layout.block_tables.shape),
        longest,
        int(layout.seq_lens.max(initial=0)),
    )


class CUDABackend(TorchBackend):
    """`Backend` of CUDA kernels. Unsupported layers and dtypes fall back to torch.

    Raises the same errors as `TorchBackend`. `kernels` is the package `kvboost_edge_cuda`.
    """

    name = "cuda"

    def __init__(self, spec: KVSpec, num_blocks: int, *, device: str, kernels: Any) -> None:
        if spec.is_quantized:
            raise BackendUnavailable(
                f"backend 'cuda' does not support KV at {spec.bits} bits; use kv_cache_bits=16, "
                "or backend='torch' with kv_cache_bits=8"
            )
        super().__init__(spec, num_blocks, device=device)
        self._kernels = kernels
        has_dtype = spec.dtype in kernel_dtypes(self._device)
        self._served = [has_dtype and _is_served(layer) for layer in spec.layers]
        self._sinks: dict[int, tuple[npt.NDArray[np.float32], torch.Tensor]] = {}
        if not all(self._served):
            _LOG.warning("backend 'cuda': %s", self._path())

    def describe(self) -> BackendInfo:
        """Return the description of the kernels and of the layers that they do not support."""
        return BackendInfo(
            self.name, self.device, attention_path=self._path(), threading_layer="torch"
        )

    def _path(self) -> str:
        if all(self._served):
            return _PACKAGE
        layers = [
            layer
            for layer, served in zip(self.spec.layers, self._served, strict=True)
            if not served
        ]
        why = f"KV in {self.spec.dtype}, head dims {sorted({layer.head_dim for layer in layers})}"
        return (
            f"{_PACKAGE} for {sum(self._served)} of {len(self._served)} layers, torch for the "
            f"others ({why})"
        )

    @property
    def _plain(self) -> PlainBlocks:
        assert isinstance(self._blocks, PlainBlocks), "quantized pools are refused"
        return self._blocks

    def prepare(self, layout: BatchLayout) -> CUDABatch:
        """Check a layout and convert it for one pass on the device.

        Raises ConfigError that names a fault.
        """
        check_layout(layout, self.spec.block_size, self.num_blocks)
        return CUDABatch(layout, self.spec.block_size, self._device)

    def copy_blocks(self, ops: Sequence[CopyOp]) -> None:
        """Copy whole blocks of all layers in order."""
        self._check_copies(ops)
        halves = self._blocks.whole_blocks
        if ops and all(half[0].numel() * half.element_size() % 16 == 0 for half in halves):
            self._kernels.copy_blocks(halves, [(src, dst) for src, dst in ops])
        else:
            super().copy_blocks(ops)

    def write_kv(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: TorchBatch
    ) -> None:
        """Store keys and values, [num_tokens, num_kv_heads, head_dim], at the batch's slots."""
        if not self._served[layer]:
            super().write_kv(layer, keys, values, batch)
            return
        pool = self._plain.of(layer)
        rows = [tokens.to(pool[0].dtype) for tokens in (keys, values)]
        self._kernels.write_kv(*rows, *pool, batch.slots, check_values=False)

    def attention(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: TorchBatch,
        params: AttentionParams,
        frequencies: npt.NDArray[np.float64] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute causal attention.

        Passes with segments fall back to torch, because the kernels assume one position per slot.

        Returns:
            The output, shaped like the queries, and lse, float32 [num_tokens, num_q_heads].
        """
        pool = self._plain.of(layer)
        tables = batch.tables if isinstance(batch, CUDABatch) else None
        if tables is None or not self._served[layer] or queries.dtype != pool[0].dtype:
            return super().attention(layer, queries, batch, params, frequencies)
        out, lse = self._kernels.paged_attention(
            queries,
            pool[0],
            pool[1],
            cu_seqlens_q=tables.cu_seqlens_q,
            seqused_k=tables.seq_lens,
            block_table=tables.block_tables,
            max_seqlen_q=tables.longest_q,
            max_seqlen_k=tables.longest_k,
            softmax_scale=params.softmax_scale,
            window=params.window,
            softcap=params.softcap,
            sinks=self._on_device(layer, params.sinks),
        )
        return out, lse.transpose(0, 1)

    def _on_device(self, layer: int, sinks: npt.NDArray[np.float32] | None) -> torch.Tensor | None:
        """Return a layer's sinks on the device. They are copied there once."""
        if sinks is None:
            return None
        held = self._sinks.get(layer)
        if held is None or held[0] is not sinks:
            held = (sinks, torch.as_tensor(sinks, device=self._device).float())
            self._sinks[layer] = held
        return held[1]


def _is_served(layer: LayerKVSpec) -> bool:
    return layer.head_dim % 8 == 0 and layer.head_dim <= _MOST_HEAD_DIM
