"""What index tensors hold, and what the functions here do not do, looked at before anything is
launched.

The values lie on the device: all conditions of a call are gathered there and read in one go, which
waits for it. Callers that know their values pass `check_values=False`; while a CUDA graph is
captured they have to.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["IndexChecks", "Number", "refuse_gradients", "refuse_unsupported"]

Number: TypeAlias = int | torch.Tensor


class IndexChecks:
    """Conditions on the values of index tensors; `raise_first` reads them all and raises ValueError
    for the first one that does not hold. Shapes and dtypes are checked as they are added.
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
        """ValueError unless the tensor is of this dtype and shape; -1 in `shape` is any size."""
        matches = tensor.dim() == len(shape) and all(
            want in (-1, size) for want, size in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype != dtype or not matches:
            wanted = ", ".join("*" if size < 0 else str(size) for size in shape)
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} [{wanted}]"
            )

    def within(self, name: str, tensor: torch.Tensor, low: Number, high: Number) -> None:
        """All values in low..high."""
        if self._check_values and tensor.numel():
            self._add(
                (tensor < low) | (tensor > high), f"{name} has values outside {_span(low, high)}"
            )

    def cumulative(self, name: str, tensor: torch.Tensor, total: int | None, longest: int) -> None:
        """Starts at 0, never falls, no step above `longest`, ends at `total` where that is
        known.
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
        """Holds every length, and the entries that lengths use are blocks that there are."""
        if not self._check_values:
            return
        columns = torch.arange(tensor.shape[1], device=tensor.device)
        used = columns < (lengths[:, None] + block_size - 1) // block_size
        room = tensor.shape[1] * block_size
        self._add(
            lengths > room,
            f"{name} of {tensor.shape[1]} blocks of {block_size} does not hold every sequence",
        )
        self._add(
            used & ((tensor < 0) | (tensor >= num_blocks)),
            f"{name} has block ids outside 0..{num_blocks - 1}",
        )

    def raise_first(self) -> None:
        """ValueError for the first condition that does not hold."""
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
    """NotImplementedError that names the first argument that is neither None nor 0 nor False."""
    for name, value in given.items():
        if value is not None and (isinstance(value, torch.Tensor) or value):
            raise NotImplementedError(
                f"{function} of kvboost_edge_cuda does not do {name}={_short(value)}"
            )


def refuse_gradients(function: str, *tensors: torch.Tensor | None) -> None:
    """NotImplementedError where a gradient would be wanted: there is no backward pass."""
    if torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    ):
        raise NotImplementedError(
            f"{function} of kvboost_edge_cuda has no backward pass; call it under torch.no_grad() "
            "or inference_mode()"
        )


def _short(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
