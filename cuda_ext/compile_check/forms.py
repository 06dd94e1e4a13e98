"""Kernel instantiations for each architecture, and their requirements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from compile_check.cubin import opcodes, read_int
from compile_check.machines import Machine, ctas_that_fit
from compile_check.nvrtc import Used, compile_program

__all__ = ["HEAD_DIMS", "Form", "Row", "build", "programs", "requirements"]

HEAD_DIMS = (64, 96, 128, 256)
WARPS_M = (4, 1)
THREADS = 128
_FIRST_MMA = 80
_MANGLED = re.compile(r"(attention_mma|attention_wmma|merge_splits|write_kv|copy_blocks)")


class Form(NamedTuple):
    """A kernel instantiation; "" and 0 mark parameters that the kernel does not have."""

    kernel: str
    dtype: str = ""
    head_dim: int = 0
    warps_m: int = 0

    @property
    def shape(self) -> str:
        return (
            f"{'Mma' if self.kernel == 'attention_mma' else 'Wmma'}Shape<{self.head_dim}, "
            f"{self.warps_m}>"
        )

    @property
    def shared_symbol(self) -> str:
        return f"shared_{self.head_dim}_{self.warps_m}"

    @property
    def is_attention(self) -> bool:
        return self.kernel.startswith("attention")


class Row(NamedTuple):
    """An instantiation compiled for one architecture.

    Attributes:
        machine: the architecture.
        form: the instantiation.
        used: registers, stack and spills as reported by ptxas.
        shared: bytes of shared memory.
        hmma: number of tensor-core instructions.
        ctas: number of CTAs that fit on a multiprocessor.
    """

    machine: Machine
    form: Form
    used: Used
    shared: int
    hmma: int
    ctas: int


def programs(machine: Machine) -> Iterator[tuple[str, list[Form]]]:
    """Yield each program's source with its instantiations.

    There is one program per head dim, and one for the other kernels.
    """
    mma = machine.number >= _FIRST_MMA
    dtypes = ("F16", "BF16") if mma else ("F16",)
    kernel = "attention_mma" if mma else "attention_wmma"
    for head_dim in HEAD_DIMS:
        shapes = [Form(kernel, dtype, head_dim, warps) for dtype in dtypes for warps in WARPS_M]
        lines = [f'#include "{kernel}.cuh"', "namespace kvboost_edge_cuda {"]
        for form in shapes:
            element = f"{form.dtype}, " if mma else ""
            lines.append(
                f"template __global__ void {kernel}<{element}{head_dim}, "
                f"{form.warps_m}>(AttentionParams);"
            )
        lines += ["}", *(_shared_line(form) for form in shapes if form.dtype == "F16")]
        yield "\n".join(lines), shapes
    rest = [f"template __global__ void merge_splits<{dtype}>(AttentionParams);" for dtype in dtypes]
    source = (
        '#include "merge.cuh"\n#include "cache.cuh"\nnamespace kvboost_edge_cuda {\n'
        + "\n".join(rest)
        + "\n}"
    )
    yield (
        source,
        [*(Form("merge_splits", dtype) for dtype in dtypes), Form("write_kv"), Form("copy_blocks")],
    )


def _shared_line(form: Form) -> str:
    value = f"kvboost_edge_cuda::{form.shape}::kSharedBytes"
    return f'extern "C" __device__ int {form.shared_symbol} = {value};'


def build(machine: Machine, source: str, forms: list[Form]) -> tuple[list[Row], bytes]:
    """Compile a program; return one row per instantiation, and the machine code."""
    built = compile_program(source, machine.name)
    counts = {_form_of(name): count for name, count in opcodes(built.cubin).items()}
    used = {_form_of(name): figures for name, figures in built.used.items()}
    rows = []
    for form in forms:
        shared = read_int(built.cubin, form.shared_symbol) if form.is_attention else 0
        figures = used[form]
        hmma = counts.get(form, Counter())[machine.hmma]
        ctas = ctas_that_fit(machine, THREADS, figures.registers, shared + figures.static_shared)
        rows.append(Row(machine, form, figures, shared + figures.static_shared, hmma, ctas))
    return rows, built.cubin


def _form_of(mangled: str) -> Form:
    kernel = _MANGLED.search(mangled)
    if kernel is None:
        raise ValueError(f"{mangled} is not a known kernel")
    dtype = re.search(r"_\d(B?F16)E", mangled)
    numbers = [int(number) for number in re.findall(r"Li(\d+)E", mangled)]
    name = "F16" if kernel[1] == "attention_wmma" else dtype[1] if dtype else ""
    return Form(kernel[1], name, *numbers)


def requirements(row: Row) -> Iterator[str]:
    """Yield a message for each requirement that a row does not meet."""
    machine = row.machine
    form = row.form
    used = row.used
    if machine.number >= _FIRST_MMA and (used.spilled or used.stack):
        yield f"spills {used.spilled} bytes, stack {used.stack} bytes"
    if (
        used.registers > machine.registers_per_thread
        or used.registers * THREADS > machine.registers_per_sm
    ):
        yield f"{used.registers} registers per thread"
    if row.shared > machine.shared_per_cta:
        yield f"{row.shared} bytes of shared memory, of {machine.shared_per_cta}"
    if form.is_attention and not row.hmma:
        yield "no tensor-core instruction"
    if not row.ctas:
        yield "does not fit on a multiprocessor"
