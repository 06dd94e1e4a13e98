"""Tensors as the kernels and launchers take them."""

from __future__ import annotations

import torch

__all__ = ["aligned", "current_stream"]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """As the kernels read it: a copy where the last dimension is not contiguous or a piece of 16
    bytes not aligned.
    """
    *outer, inner = tensor.stride()
    strides = [stride for stride, size in zip(outer, tensor.shape, strict=False) if size > 1]
    if inner == 1 and all(stride % 8 == 0 for stride in strides) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def current_stream(tensor: torch.Tensor) -> int:
    """The address of the current stream of the tensor's device; 0 for tensors in the host's
    memory.
    """
    if tensor.device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
