"""Alignment and CUDA streams of tensors."""

from __future__ import annotations

import torch

__all__ = ["aligned", "current_stream"]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy unless its rows are contiguous and aligned to 16 bytes."""
    *outer, inner = tensor.stride()
    strides = [stride for stride, size in zip(outer, tensor.shape, strict=False) if size > 1]
    if inner == 1 and all(stride % 8 == 0 for stride in strides) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def current_stream(tensor: torch.Tensor) -> int:
    """Return the address of the device's current stream, or 0 for a tensor in host memory."""
    if tensor.device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
