"""Operators of torch that have a kernel on Apple GPUs, according to the table that torch ships with
its code generator.

The table lists neither dtypes nor the operators that a composite operator calls. CALLEES lists the
latter for the operators that the backend uses.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torchgen
import yaml

TABLE = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
_DEVICES = {"CPU", "CUDA", "MPS"}

# Kernels that composite operators call on a device; () if they only create views or do bookkeeping.
CALLEES: dict[str, tuple[str, ...]] = {
    "_to_copy": ("empty_strided", "copy_"),
    "_unsafe_view": (),
    "abs": ("abs.out",),
    "alias": (),
    "clone": ("empty_like", "copy_"),
    "copy_": (),  # checks for MPS itself and calls its copy functions
    "detach": (),
    "embedding": ("index_select",),
    "empty_like": ("empty.memory_format", "empty_strided"),
    "expand": (),
    "full": ("empty.memory_format", "fill_.Scalar"),
    "index_put_": ("_index_put_impl_",),
    "masked_fill_.Scalar": (),
    "nan_to_num": ("nan_to_num.out",),
    "new_zeros": ("empty.memory_format", "zero_"),
    "permute": (),
    "rsub.Scalar": ("sub.Tensor",),
    "select.int": (),
    "slice.Tensor": (),
    "split.Tensor": (),
    "split_with_sizes": (),
    "squeeze.dim": (),
    "stack": ("cat",),
    "t": (),
    "transpose.int": (),
    "unsqueeze": (),
    "view.dtype": (),
    "zeros": ("empty.memory_format", "zero_"),
}
# scaled_dot_product_attention chooses its kernel by device, so a recording on the CPU says nothing
# about MPS. It must not be used at all.
SDPA = "scaled_dot_product"


@functools.cache
def read_table() -> dict[str, dict[str, Any]]:
    """Return the entries by operator and overload, such as "index.Tensor"."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(TABLE.read_text(encoding="utf-8"), Loader=loader)
    return {entry["func"].partition("(")[0]: entry for entry in entries}


@functools.cache
def problem_of(name: str) -> str | None:
    """Return why an operator does not run on MPS according to the table, or None if it does."""
    if SDPA in name:
        return f"{name} chooses its kernel by device and is not used"
    entry = read_table().get(name)
    if entry is None:
        return f"{name} is not in torch's table"
    dispatch: dict[str, str] = entry.get("dispatch", {})
    keys = {key.strip() for some in dispatch for key in some.split(",")}
    if "MPS" in keys:
        return None
    if "structured_delegate" in entry:
        return problem_of(entry["structured_delegate"])
    if keys & _DEVICES:
        return f"{name} has kernels for {', '.join(sorted(keys))}, none for MPS"
    if name not in CALLEES:
        return f"{name} is written in terms of other operators; say in CALLEES which"
    return next(
        (problem for callee in CALLEES[name] if (problem := problem_of(callee)) is not None), None
    )
