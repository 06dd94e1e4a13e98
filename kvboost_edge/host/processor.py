"""Processor model, vector instructions, and the number of usable threads."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

import psutil

from kvboost_edge.host.cgroup import cpu_quota

__all__ = [
    "CpuIdentity",
    "CpuInfo",
    "cpu_identity",
    "default_num_threads",
    "describe_cpu",
    "isa_label",
    "parse_cpuinfo",
]

_ALIASES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
# Sysctl keys of macOS, and the corresponding Linux flags.
_DARWIN_ARM = {
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.AdvSIMD": "asimd",
}


@dataclasses.dataclass(frozen=True, slots=True)
class CpuInfo:
    """Properties of this machine's processor.

    Attributes:
        model: Name of the processor or the board; "unknown" if it cannot be determined.
        arch: Architecture, such as "x86_64" or "aarch64".
        flags: Instruction set flags in Linux's spelling, sorted.
        isa: Short name of the widest supported instruction set, see `isa_label`.
        physical: Number of cores.
        logical: Number of hardware threads.
        affinity: Number of CPUs that this process may run on.
        quota: CPU seconds per second that the cgroup allows; None without a quota.
    """

    model: str
    arch: str
    flags: tuple[str, ...]
    isa: str
    physical: int
    logical: int
    affinity: int
    quota: float | None


class CpuIdentity(NamedTuple):
    """What decides which machine code a processor can run, and which is fastest.

    Attributes:
        arch: Architecture, such as "x86_64" or "aarch64".
        flags: Instruction set flags in Linux's spelling.
        family: Vendor and family, such as ("AuthenticAMD", 25); None if unknown.
    """

    arch: str
    flags: frozenset[str]
    family: tuple[str, int] | None


def cpu_identity() -> CpuIdentity:
    """Identify the processor on Linux; unknown properties are empty."""
    machine = platform.machine().lower()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = _first_fields(text)
    family = fields.get("cpu family", "")
    known = (fields.get("vendor_id", ""), int(family)) if family.isdecimal() else None
    return CpuIdentity(_ALIASES.get(machine, machine), parse_cpuinfo(text)[1], known)


def describe_cpu() -> CpuInfo:
    """Describe the processor. Never raises an error: unknown properties are "unknown" or empty."""
    machine = platform.machine().lower()
    arch = _ALIASES.get(machine, machine) or "unknown"
    model, flags = _identify(arch)
    logical = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    return CpuInfo(
        model=model or platform.processor() or "unknown",
        arch=arch,
        flags=tuple(sorted(flags)),
        isa=isa_label(arch, flags),
        physical=physical,
        logical=logical,
        affinity=_affinity(),
        quota=cpu_quota(),
    )


def default_num_threads() -> int:
    """Return the number of CPUs that this process may use, limited by the cgroup's quota.

    For example, a quota of 2.5 gives 2 threads.
    """
    # With 3 threads and a quota of 2.5, one thread would sleep half of the time and the others
    # would wait for it.
    affinity = _affinity()
    quota = cpu_quota()
    return affinity if quota is None else max(1, min(affinity, math.floor(quota)))


def isa_label(arch: str, flags: frozenset[str]) -> str:
    """Return the short name of the instruction set, such as 'avx512-vnni' or 'neon-dotprod'."""
    if arch == "x86_64":
        return _x86_label(flags)
    if arch == "aarch64":
        for flag, label in (("i8mm", "neon-i8mm"), ("asimddp", "neon-dotprod")):
            if flag in flags:
                return label
        return "neon"
    return arch


def _x86_label(flags: frozenset[str]) -> str:
    if {"avx512f", "avx512bw", "avx512vl"} <= flags:
        label = "avx512-vnni" if "avx512_vnni" in flags else "avx512"
        return f"{label}-amx" if "amx_int8" in flags else label
    if "avx2" in flags:
        return "avx2-vnni" if "avx_vnni" in flags else "avx2"
    for flag, label in (("avx", "avx"), ("sse4_2", "sse4.2")):
        if flag in flags:
            return label
    return "sse2"


def parse_cpuinfo(text: str) -> tuple[str, frozenset[str]]:
    """Return the model name and flags from Linux's /proc/cpuinfo (x86 'flags', ARM 'Features')."""
    fields = _first_fields(text)
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name") or fields.get("model", ""), frozenset(flags.split())


def _first_fields(text: str) -> dict[str, str]:
    """Return the fields of the first processor in Linux's /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip().lower(), value.strip())
    return fields


def _identify(arch: str) -> tuple[str, frozenset[str]]:
    system = platform.system()
    if system == "Linux":
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:  # some sandboxes hide /proc
            return platform.processor(), _llvm_flags()
        model, flags = parse_cpuinfo(text)
        # ARM boards store their name in the device tree.
        return model or _device_tree_model(), flags
    if system == "Darwin":
        return _identify_darwin(arch)
    return platform.processor(), _llvm_flags()


def _device_tree_model() -> str:
    try:
        return (
            Path("/proc/device-tree/model")
            .read_text(encoding="utf-8", errors="replace")
            .strip("\0 \n")
        )
    except OSError:
        return ""


def _identify_darwin(arch: str) -> tuple[str, frozenset[str]]:
    model = _sysctl("machdep.cpu.brand_string")
    if arch == "aarch64":
        return model, frozenset(flag for key, flag in _DARWIN_ARM.items() if _sysctl(key) == "1")
    words = (
        f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".lower().split()
    )
    names = {"avx1.0": "avx", "sse4.2": "sse4_2", "avx512vnni": "avx512_vnni"}
    return model, frozenset(names.get(word, word) for word in words)


def _sysctl(key: str) -> str:
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", key], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _llvm_flags() -> frozenset[str]:
    """Return the CPU flags that LLVM detects. Some systems, such as Windows, do not list them."""
    from llvmlite import binding

    names = {
        "avx512vnni": "avx512_vnni",
        "avxvnni": "avx_vnni",
        "amx-int8": "amx_int8",
        "dotprod": "asimddp",
    }
    names |= {"sse4.2": "sse4_2", "neon": "asimd"}
    return frozenset(
        names.get(name, name)
        for name, present in binding.get_host_cpu_features().items()
        if present
    )


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    affinity = getattr(psutil.Process(), "cpu_affinity", None)
    if affinity is not None:
        return max(1, len(affinity()))
    return os.cpu_count() or 1
