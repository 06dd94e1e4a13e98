"""Integer vectors for kernels: the dot-product variant of this process, and shared IR emitters.

The variants, widest first, are `vpdpbusd` on 512-bit registers (AVX512-VNNI) or 256-bit registers
(AVX-VNNI), plain AVX2, `smmla` (ARM i8mm) next to `sdot` (ARM dotprod), `sdot` alone, and plain
vectors.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from kvboost_edge.host.processor import describe_cpu
from kvboost_edge.kernels.lazy import binding, cgutils, codegen, numba_config
from kvboost_edge.kernels.library import kernel_library
from kvboost_edge.kernels.vectors import I64, LANES

__all__ = [
    "V16I",
    "dot_form",
    "emit_byte_halves",
    "emit_each",
    "emit_joined",
    "emit_load_bytes",
    "emit_loop",
    "emit_pair_sums",
    "emit_splat_int",
    "follows_pages",
    "has_512_bit_registers",
    "has_byte_permute",
    "has_byte_shuffle",
    "has_tile_registers",
    "int_constant",
]

I16 = ir.IntType(16)
I32 = ir.IntType(32)
V16I = ir.VectorType(I32, LANES)
_V4I = ir.VectorType(I32, 4)
_V8S = ir.VectorType(I16, 8)
_V32S = ir.VectorType(I16, 32)
_POINTER = ir.PointerType()

Value = Any
Builder = Any


def _feature_text() -> str:
    """Return the features that kernels are compiled for, such as "+avx2,-sha"; "" if unknown."""
    library = kernel_library()
    if library is not None:
        return library.manifest.features
    text = numba_config.CPU_FEATURES
    return str(codegen.get_host_cpu_features() if text is None else text)


@functools.cache
def _features() -> frozenset[str]:
    return frozenset(flag[1:] for flag in _feature_text().split(",") if flag.startswith("+"))


@functools.cache
def dot_form() -> str:
    """Return the integer dot-product variant of this process.

    The variants are "vnni512", "vnni256", "avx2", "i8mm", "neon" and "plain".
    """
    library = kernel_library()
    if library is not None:
        return library.manifest.dot_form
    features = _features()
    if {"avx512vnni", "avx512bw", "avx512f"} <= features:
        return "vnni512"
    if "avxvnni" in features or {"avx512vnni", "avx512vl"} <= features:
        return "vnni256"
    if "avx2" in features:
        return "avx2"
    if platform.machine().lower() in ("aarch64", "arm64") and _emits("sdot", _DOT_PROBE):
        return "i8mm" if _has_i8mm() else "neon"
    return "plain"


@functools.cache
def has_512_bit_registers() -> bool:
    """Return whether kernels are compiled for AVX-512, which has 32 registers of 512 bits."""
    return "avx512f" in _features()


@functools.cache
def has_tile_registers() -> bool:
    """Return whether kernels are compiled for Intel AMX with int8 tiles and for 512-bit VNNI."""
    return dot_form() == "vnni512" and {"amx-tile", "amx-int8"} <= _features()


@functools.cache
def has_byte_shuffle() -> bool:
    """Return whether kernels of the "plain" variant may use `pshufb` (SSSE3)."""
    return "ssse3" in _features()


@functools.cache
def has_byte_permute() -> bool:
    """Return whether kernels may use `vpermb` (AVX512-VBMI), a byte lookup in 64 entries."""
    return "avx512vbmi" in _features()


@functools.cache
def follows_pages() -> bool:
    """Return whether hardware prefetchers keep up with integer weights inside a 4 KiB page.

    Kernels then prefetch one line of each group a page ahead, instead of every line. For 5-bit
    codes, they prefetch every line a page ahead.
    """
    # On AMD Zen 4, leaving out the prefetches of every line saves 2 to 9% of a decode step.
    # Prefetching one line of each group a page ahead saves another 6 to 14%.
    return _processor() == "znver4"


def _processor() -> str:
    """Return the LLVM name of the processor that kernels are compiled for."""
    library = kernel_library()
    if library is not None:
        return library.manifest.cpu
    return str(numba_config.CPU_NAME or binding.get_host_cpu_name())


_DOT_PROBE = """
declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)
define <4 x i32> @probe(<4 x i32> %sums, <16 x i8> %x, <16 x i8> %y) {
  %a = sext <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %p = mul <16 x i32> %a, %b
  %r = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %sums, <16 x i32> %p)
  ret <4 x i32> %r
}
"""


# The product of bytes without and with a sign, which only processors with i8mm compute.
_MIXED_PROBE = _DOT_PROBE.replace("sext <16 x i8> %x", "zext <16 x i8> %x")


def _has_i8mm() -> bool:
    """Return whether LLVM may emit `smmla`, and the system reports i8mm."""
    if not _emits("usdot", _MIXED_PROBE):
        return False
    # A virtual machine may hide instructions that the processor's name stands for. A processor that
    # the user chose is taken as it is.
    is_chosen = bool(numba_config.CPU_NAME or numba_config.CPU_FEATURES)
    return is_chosen or "i8mm" in describe_cpu().flags


def _emits(instruction: str, probe: str) -> bool:
    """Return whether LLVM may emit an instruction on ARM, for a function that suits it."""
    # The feature flags are not enough, because LLVM can also derive instructions from the
    # processor's name. So compile a partial reduction and look at the assembly.
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    machine = target.create_target_machine(cpu=_processor(), features=_feature_text())
    return f"\t{instruction}\t" in machine.emit_assembly(binding.parse_assembly(probe))


def int_constant(value: int) -> ir.Constant:
    """Return an i64 constant."""
    return ir.Constant(I64, value)


@contextmanager
def emit_loop(b: Builder, count: Value) -> Iterator[Value]:
    """Yield the int64 index of a loop over [0, count) that LLVM must not unroll."""
    with cgutils.for_range(b, count, intp=I64) as loop:
        yield loop.index
        latch = b.block
    once = b.module.add_metadata(["llvm.loop.unroll.disable"])
    own = ir.MDValue(b.module, (once,), name=str(len(b.module.metadata)))
    own.operands = (own, once)  # LLVM requires self-referencing loop metadata
    latch.terminator.set_metadata("llvm.loop", own)


def emit_load_bytes(b: Builder, address: Value) -> Value:
    """Load 64 bytes from an address aligned to 4, as <16 x i32>."""
    return b.load(b.inttoptr(address, _POINTER), align=4, typ=V16I)


def emit_splat_int(b: Builder, scalar: Value) -> Value:
    """Broadcast an i32 to 16 lanes."""
    undefined = ir.Constant(V16I, ir.Undefined)
    return b.shuffle_vector(
        b.insert_element(undefined, scalar, I32(0)), undefined, ir.Constant(V16I, [0] * LANES)
    )


def _parts(b: Builder, x: Value, count: int) -> list[Value]:
    """Split a vector into `count` vectors of equal length."""
    size = x.type.count // count
    undefined = ir.Constant(x.type, ir.Undefined)
    lanes = [
        ir.Constant(ir.VectorType(I32, size), list(range(at, at + size)))
        for at in range(0, x.type.count, size)
    ]
    return [b.shuffle_vector(x, undefined, order) for order in lanes]


def emit_joined(b: Builder, parts: Sequence[Value]) -> Value:
    """Concatenate vectors; their number must be a power of two."""
    parts = list(parts)
    while len(parts) > 1:
        order = ir.Constant(
            ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count))
        )
        parts = [b.shuffle_vector(parts[i], parts[i + 1], order) for i in range(0, len(parts), 2)]
    return parts[0]


def emit_each(
    b: Builder, count: int, name: str, result: ir.Type, arguments: Sequence[tuple[Value, ir.Type]]
) -> Value:
    """Call an intrinsic on `count` equal slices of the arguments and concatenate the results.

    Args:
        count: number of slices, a power of two.
        name: LLVM name of the intrinsic.
        result: return type of one call.
        arguments: pairs of a vector and the type in which the intrinsic takes a slice of it.
    """
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(result, [kind for _, kind in arguments]), name
    )
    cut = [[b.bitcast(part, kind) for part in _parts(b, value, count)] for value, kind in arguments]
    return emit_joined(b, [b.call(function, list(part)) for part in zip(*cut, strict=True)])


def emit_byte_halves(b: Builder, x: Value, *, signed: bool) -> tuple[Value, Value]:
    """Widen the bytes of <16 x i32> to two <32 x i16>: bytes 0 and 2 of each lane, then 1 and 3."""
    eight = ir.Constant(_V32S, [8] * 32)
    pairs = b.bitcast(x, _V32S)
    if signed:
        return b.ashr(b.shl(pairs, eight), eight), b.ashr(pairs, eight)
    return b.and_(pairs, ir.Constant(_V32S, [255] * 32)), b.lshr(pairs, eight)


def emit_pair_sums(b: Builder, x: Value) -> Value:
    """Add neighbouring numbers of <32 x i16> into <16 x i32>."""
    if b.module.triple.startswith(("aarch64", "arm64")):
        return emit_each(b, 4, "llvm.aarch64.neon.saddlp.v4i32.v8i16", _V4I, [(x, _V8S)])
    sixteen = ir.Constant(V16I, [16] * LANES)
    both = b.bitcast(x, V16I)
    return b.add(b.ashr(b.shl(both, sixteen), sixteen), b.ashr(both, sixteen))
