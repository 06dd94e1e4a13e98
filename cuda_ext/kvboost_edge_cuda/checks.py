"""Checks of index tensors and unsupported arguments before a launch.

Index values are on the device. All conditions of a call are collected there and read once, which
synchronizes with the device. A caller that knows its values are valid passes `check_values=False`,
which is required while a CUDA graph is captured.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["IndexChecks", "Number", "refuse_gradients", "refuse_unsupported"]

Number: TypeAlias = int | torch.Tensor


class IndexChecks:
    """Conditions on the values of index tensors.

    Shapes and dtypes are checked when a condition is added. `raise_first` reads all values.
    """

    def __init__(self, *, check_values: bool) -> None:
        self._check_values = check_values
        self._bad: list[torch.Tensor] = []
        self._messages: list[str] = []

    def index(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.int32,
    ) -> None:
        """Raise ValueError unless the tensor has this dtype and shape; -1 matches any size."""
        matches = tensor.dim() == len(shape) and all(
            want in (-1, size) for want, size in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not matches:
            wanted = ", ".join("*" if size < 0 else str(size) for size in shape)
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} [{wanted}]"
            )

    def within(self, name: str, tensor: torch.Tensor, low: Number, high: Number) -> None:
        """Require all values to be in low..high."""
        if self._check_values and tensor.numel():
            self._add(
                (tensor < low) | (tensor > high), f"{name} has values outside {_span(low, high)}"
            )

    def cumulative(self, name: str, tensor: torch.Tensor, total: int | None, longest: int) -> None:
        """Require a cumulative sum from 0 to `total` with steps in 0..longest.

        If `total` is None, the end is not checked.
        """
        if not self._check_values:
            return
        steps = tensor.diff()
        self._add(tensor[:1] != 0, f"{name} does not start at 0")
        self._add(steps < 0, f"{name} falls")
        self._add(steps > longest, f"{name} has a sequence longer than {longest}")
        if total is not None:
            self._add(tensor[-1:] != total, f"{name} does not end at {total}")

    def table(
        self,
        name: str,
        tensor: torch.Tensor,
        lengths: torch.Tensor,
        block_size: int,
        num_blocks: int,
    ) -> None:
        """Require enough blocks for every length, and valid block ids in the entries in use."""
        if not self._check_values:
            return
        columns = torch.arange(tensor.shape[1], device=tensor.device)
        used = columns < (lengths[:, None] + block_size - 1) // block_size
        room = tensor.shape[1] * block_size
        self._add(
            lengths > room,
            f"{name} of {tensor.shape[1]} blocks of {block_size} is too short for a sequence",
        )
        self._add(
            used & ((tensor < 0) | (tensor >= num_blocks)),
            f"{name} has block ids outside 0..{num_blocks - 1}",
        )

    def raise_first(self) -> None:
        """Raise ValueError for the first condition that is not met."""
        if not self._bad:
            return
        for bad, message in zip(torch.stack(self._bad).tolist(), self._messages, strict=True):
            if bad:
                raise ValueError(message)

    def _add(self, bad: torch.Tensor, message: str) -> None:
        self._bad.append(bad.any())
        self._messages.append(message)


def _span(low: Number, high: Number) -> str:
    shown = (
        "0" if isinstance(low, torch.Tensor) else low,
        "the cache's end" if isinstance(high, torch.Tensor) else high,
    )
    return f"{shown[0]}..{shown[1]}"


def refuse_unsupported(function: str, **given: object) -> None:
    """Raise NotImplementedError for the first argument that is not None, 0 or False."""
    for name, value in given.items():
        if value is not None and (isinstance(value, torch.Tensor) or value):
            raise NotImplementedError(
                f"{function} of kvboost_edge_cuda does not support {name}={_short(value)}"
            )


def refuse_gradients(function: str, *tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError if a gradient is required, because there is no backward pass."""
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    ):
        raise NotImplementedError(
            f"{function} of kvboost_edge_cuda has no backward pass; call it under torch.no_grad() "
            "or inference_mode()"
        )


def _short(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
