"""Classes of processors that kernel libraries are compiled for.

A library of a class runs on every processor that has the class's instructions. Results are the same
bits on all of them. The classes follow the variants of the kernels (`integers.dot_form`).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from kvboost_edge.host.processor import CpuIdentity, cpu_identity

__all__ = ["TARGETS", "KernelTarget", "targets_of", "usable_targets"]


class KernelTarget(NamedTuple):
    """A class of processors.

    Attributes:
        name: name of the class; libraries are named after it.
        arch: architecture, such as "x86_64".
        cpu: LLVM's name of the processor.
        features: LLVM's names of the instruction sets.
        flags: the instruction sets in Linux's spelling that a processor must have.
        family: vendor and family of the only processors that it is for; empty for all.
        about: processors of this class, for people.
    """

    name: str
    arch: str
    cpu: str
    features: tuple[str, ...]
    flags: frozenset[str]
    family: tuple[str, int] | None
    about: str

    @property
    def feature_text(self) -> str:
        """The instruction sets as Numba and LLVM expect them."""
        return ",".join(name if name.startswith("-") else f"+{name}" for name in self.features)


# Linux's flags and LLVM's names
_V3 = {
    "avx": "avx",
    "avx2": "avx2",
    "bmi1": "bmi",
    "bmi2": "bmi2",
    "cx16": "cx16",
    "f16c": "f16c",
    "fma": "fma",
    "abm": "lzcnt",
    "movbe": "movbe",
    "popcnt": "popcnt",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
    "ssse3": "ssse3",
    "xsave": "xsave",
}
_AVX_VNNI = {"avx_vnni": "avxvnni"}
_AVX512 = {
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512_vnni": "avx512vnni",
}
_VBMI = {"avx512vbmi": "avx512vbmi", "avx512_vbmi2": "avx512vbmi2"}
# LLVM assumes these on Zen 4.
_ZEN4 = {
    "avx512_bf16": "avx512bf16",
    "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "avx512ifma": "avx512ifma",
    "gfni": "gfni",
    "sse4a": "sse4a",
}
_AMX = {"amx_tile": "amx-tile", "amx_int8": "amx-int8"}
_DOTPROD = {"asimd": "neon", "asimdhp": "fullfp16", "asimddp": "dotprod", "atomics": "lse"}
_I8MM = {"i8mm": "i8mm"}
# Every 64-bit x86 processor has these. Kernels use 512-bit registers where they are emitted.
_X86 = ("64bit", "cmov", "cx8", "fxsr", "mmx", "sse", "sse2", "sse3", "sahf", "x87")
_PREFER_512_BIT = ("-prefer-256-bit",)


def _x86(
    name: str,
    cpu: str,
    about: str,
    *sets: dict[str, str],
    more: tuple[str, ...] = (),
    family: tuple[str, int] | None = None,
) -> KernelTarget:
    known = {flag: feature for each in (_V3, *sets) for flag, feature in each.items()}
    features = (*_X86, *known.values(), *more)
    return KernelTarget(name, "x86_64", cpu, features, frozenset(known), family, about)


def _arm(name: str, about: str, known: dict[str, str]) -> KernelTarget:
    features = tuple(known.values())
    return KernelTarget(name, "aarch64", "generic", features, frozenset(known), None, about)


TARGETS = (
    _x86(
        "x86-64-amx",
        "x86-64-v4",
        "Intel Xeon from Sapphire Rapids on",
        _AVX512,
        _VBMI,
        _AMX,
        more=_PREFER_512_BIT,
    ),
    _x86(
        "x86-64-zen4",
        "znver4",
        "AMD Zen 4",
        _AVX512,
        _VBMI,
        _ZEN4,
        family=("AuthenticAMD", 25),
    ),
    _x86(
        "x86-64-avx512-vbmi",
        "x86-64-v4",
        "Intel from Ice Lake on, AMD Zen 5",
        _AVX512,
        _VBMI,
        more=_PREFER_512_BIT,
    ),
    _x86("x86-64-avx512-vnni", "x86-64-v4", "Intel Cascade Lake", _AVX512, more=_PREFER_512_BIT),
    _x86("x86-64-avx-vnni", "x86-64-v3", "Intel Core from Alder Lake on", _AVX_VNNI),
    _x86("x86-64-avx2", "x86-64-v3", "Intel from Haswell on, AMD Zen to Zen 3"),
    _arm("arm64-i8mm", "64-bit ARM with i8mm, such as AWS Graviton3", _DOTPROD | _I8MM),
    _arm("arm64-dotprod", "64-bit ARM with dot products, such as the Raspberry Pi 5", _DOTPROD),
)
"""All classes, the fastest first."""


def targets_of(arch: str) -> tuple[KernelTarget, ...]:
    """Return the classes of an architecture, such as "x86_64"."""
    return tuple(target for target in TARGETS if target.arch == arch)


def usable_targets(cpu: CpuIdentity | None = None) -> tuple[KernelTarget, ...]:
    """Return the classes that a processor belongs to, the fastest first.

    Args:
        cpu: the processor, or None for this machine's.
    """
    if sys.platform != "linux" and cpu is None:
        return ()  # libraries are ELF files
    cpu = cpu_identity() if cpu is None else cpu
    return tuple(
        target
        for target in targets_of(cpu.arch)
        if target.flags <= cpu.flags and target.family in (None, cpu.family)
    )
