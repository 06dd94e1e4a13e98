"""A device "mps" for machines without one: it computes on the CPU but enforces the rules of Apple
GPUs on every operator.

Its tensors are wrapped: they cannot be read without `.cpu()` or mixed with the CPU's. An operator
that torch dispatches for them is refused unless torch's table (mps_kernels.py) has a kernel for it,
Metal supports the dtypes of its tensors, 64-bit integers are only indices, and matrix products read
contiguous memory. The fake cannot show the numerical results of a Mac's kernels. Composite
operators are decomposed as on a Mac, unless the table has a kernel for the whole operator
(`linear`). Torch's C++ code takes the tensors for the CPU's: an operator that chooses a kernel by
device would choose wrongly here, so none is allowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from helpers.backends.mps_kernels import problem_of
from kvboost_edge.backends.torch_backend import TorchBackend

DEVICE = "mps:0"  # without a number, torch asks for the device itself
MOST_BYTES = 1 << 32
# Dtypes that Metal lacks.
_FOREIGN = {
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
# Allowed 64-bit integers: arguments that are indices, by position, and operators that only move
# their inputs.
_INDICES = {
    "embedding": 1,
    "index.Tensor": 1,
    "index_put_": 1,
    "index_copy_": 2,
    "index_select": 2,
    "gather": 2,
}
_MOVES = {
    "_to_copy",
    "_unsafe_view",
    "alias",
    "arange",
    "arange.start_step",
    "clone",
    "detach",
    "expand",
    "index.Tensor",
    "select.int",
    "slice.Tensor",
    "unsqueeze",
    "view",
}
_PRODUCTS = {"bmm", "mm", "addmm", "baddbmm"}
_COUNTED = {"cat", "eq.Scalar", "ne.Scalar", "sub.Tensor"}
_EXACT = 1 << 24  # smaller integers are exact in a kernel that computes in float32

recorded: set[str] = set()
"""Operators that were let through, of all tests of this process."""


_counting: list[bool] = []


@contextlib.contextmanager
def counting() -> Iterator[None]:
    """Allow comparing and subtracting small 64-bit integers inside the block. transformers does so
    to find packed sequences in the position ids.
    """
    _counting.append(True)
    try:
        yield
    finally:
        _counting.pop()


class Refused(RuntimeError):
    """An operation that an Apple GPU rejects or computes incorrectly."""


class FakeMps(torch.Tensor):
    """A tensor on the fake device; `inner` is the CPU tensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> FakeMps:
        self: FakeMps = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )
        self.inner = inner
        return self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner.clone()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert as torch does. The source device converts the dtype, so a dtype that the GPU
        lacks cannot be requested.
        """
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        converted: torch.Tensor = self if dtype is None else torch.Tensor.to(self, dtype)
        return converted.cpu() if device is not None and device.type == "cpu" else converted

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Dispatch mode that intercepts the creation of tensors on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def fake_device() -> TorchDispatchMode:
    """Return a mode in which "mps:0" is a device."""
    return _Mode()


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target = kwargs.get("device")
    leaves = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    held = [isinstance(leaf, FakeMps) for leaf in leaves]
    is_here = any(held) or (target is not None and target.type == "mps")
    name = func._schema.name.removeprefix("aten::") + (
        f".{func._overloadname}" * (func._overloadname != "default")
    )
    if is_here and problem_of(name) is not None and _is_composite(func):
        with fake_device():
            return func.decompose(*args, **kwargs)
    if is_here:
        _check(name, args, leaves, held)
    out = func(*tree_map(_inner, args), **tree_map(_inner, dict(kwargs)))
    if not is_here:
        return out
    results = [leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
    for result in results:
        _check_tensor(name, result)
    recorded.add(name)
    if func._schema.name.endswith("_"):
        return args[0]
    return tree_map(lambda leaf: FakeMps(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)


def _is_composite(func: Any) -> bool:
    """Return whether an operator consists only of other operators, which torch calls for it on
    every device. It is not decomposed where gradients cannot be requested.
    """
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


def place(model: torch.nn.Module) -> None:
    """Move a model's weights to the device, as `model.to` would."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(FakeMps(weight.data), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, FakeMps(buffer))


def _inner(leaf: Any) -> Any:
    if isinstance(leaf, FakeMps):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "mps" else leaf


def _check(name: str, args: Sequence[Any], leaves: list[torch.Tensor], held: list[bool]) -> None:
    problem = problem_of(name)
    if problem is not None:
        raise Refused(problem)
    strangers = [
        leaf for leaf, is_held in zip(leaves, held, strict=True) if not is_held and leaf.dim()
    ]
    if strangers and name not in ("_to_copy", "copy_"):
        raise Refused(f"{name} mixes tensors of the CPU and the GPU")
    for leaf in leaves:
        if isinstance(leaf, FakeMps):
            _check_tensor(name, leaf)
    indices = (
        set() if name not in _INDICES else {id(leaf) for leaf in tree_iter(args[_INDICES[name]])}
    )
    wide = [
        leaf
        for leaf in leaves
        if leaf.dtype == torch.int64 and leaf.dim() and id(leaf) not in indices
    ]
    if _counting and name in _COUNTED:
        wide = [leaf for leaf in wide if _inner(leaf).abs().amax() >= _EXACT]
    if wide and name not in _MOVES:
        raise Refused(f"{name} computes with 64-bit integers, which may only be indices")
    if name in _PRODUCTS and not all(leaf.is_contiguous() for leaf in leaves):
        raise Refused(f"{name} reads strided memory")
    if name == "linear" and not args[0].is_contiguous():
        raise Refused("linear reads strided memory")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype in _FOREIGN:
        raise Refused(f"{name} of {tensor.dtype}, which Apple GPUs do not support")
    if tensor.numel() * tensor.element_size() >= MOST_BYTES:
        raise Refused(f"{name} of {tuple(tensor.shape)} {tensor.dtype}, which exceeds a buffer")


class FakeMpsBackend(TorchBackend):
    """The torch backend on the fake device, with CPU tensors as inputs and outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with (
            mock.patch.object(torch.backends.mps, "is_available", return_value=True),
            torch.no_grad(),
            fake_device(),
        ):
            super().__init__(*args, **{**kwargs, "device": DEVICE})

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: Any) -> None:
        super().write_kv(layer, keys.to(DEVICE), values.to(DEVICE), batch)

    def attention(
        self, layer: int, queries: torch.Tensor, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().attention(layer, queries.to(DEVICE), *more)
        assert isinstance(out, FakeMps)
        assert isinstance(lse, FakeMps)
        return out.cpu(), lse.cpu()


def _on_the_device(name: str) -> Callable[..., Any]:
    def call(self: FakeMpsBackend, *args: Any) -> Any:
        with torch.no_grad(), fake_device():
            return method(self, *args)

    method = getattr(FakeMpsBackend, name)
    return call


def _methods() -> Iterator[str]:
    yield from ("prepare", "copy_blocks", "read_blocks", "write_blocks", "write_kv", "attention")
    yield from ("poison_blocks", "checksum_blocks", "stored")


for _name in _methods():
    setattr(FakeMpsBackend, _name, _on_the_device(_name))
