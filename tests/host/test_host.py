"""Processor, memory and threads of the test machine, and of others from their stored descriptions."""

import subprocess
import sys

import numpy as np
import psutil
import pytest

from helpers.fresh_process import in_fresh_process
from kvboost_edge.host import memory, processor
from kvboost_edge.host.cgroup import MemoryLimit

X86 = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel\t\t: 17\nmodel name\t: Some CPU @ 3GHz\n"
    "flags\t\t: fpu sse2 avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd0b\n"


def test_cpuinfo_of_x86_and_arm_is_parsed():
    assert processor.parse_cpuinfo(X86) == ("Some CPU @ 3GHz", frozenset({"fpu", "sse2", "avx2"}))
    assert processor.parse_cpuinfo(ARM) == ("", frozenset({"fp", "asimd", "asimddp"}))
    assert processor.parse_cpuinfo("") == ("", frozenset())


@pytest.mark.parametrize(
    ("arch", "flags", "label"),
    [
        ("x86_64", "sse2", "sse2"),
        ("x86_64", "sse4_2", "sse4.2"),
        ("x86_64", "sse4_2 avx", "avx"),
        ("x86_64", "avx avx2", "avx2"),
        ("x86_64", "avx avx2 avx_vnni", "avx2-vnni"),
        ("x86_64", "avx2 avx512f", "avx2"),
        ("x86_64", "avx2 avx512f avx512bw avx512vl", "avx512"),
        ("x86_64", "avx2 avx_vnni avx512f avx512bw avx512vl avx512_vnni", "avx512-vnni"),
        ("x86_64", "avx512f avx512bw avx512vl avx512_vnni amx_int8", "avx512-vnni-amx"),
        ("aarch64", "asimd", "neon"),
        ("aarch64", "asimd asimddp", "neon-dotprod"),
        ("aarch64", "asimd asimddp i8mm", "neon-i8mm"),
        ("riscv64", "", "riscv64"),
    ],
)
def test_isa_label(arch, flags, label):
    assert processor.isa_label(arch, frozenset(flags.split())) == label


def test_describe_cpu_of_this_machine():
    info = processor.describe_cpu()
    assert info.model
    assert info.arch
    assert info.isa == processor.isa_label(info.arch, frozenset(info.flags))
    assert 1 <= info.physical <= info.logical == psutil.cpu_count()
    assert info.affinity >= 1


@pytest.mark.parametrize(
    ("affinity", "quota", "threads"), [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (2, 16.0, 2)]
)
def test_default_threads(monkeypatch, affinity, quota, threads):
    monkeypatch.setattr(processor, "_affinity", lambda: affinity)
    monkeypatch.setattr(processor, "cpu_quota", lambda: quota)
    assert processor.default_num_threads() == threads


def test_memory_is_the_machines_or_the_cgroups(monkeypatch):
    monkeypatch.setattr(memory, "memory_limit", lambda: None)
    assert 0 < memory.available_bytes() <= memory.total_bytes() == psutil.virtual_memory().total
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(1000, 400))
    assert (memory.available_bytes(), memory.total_bytes()) == (600, 1000)
    monkeypatch.setattr(memory, "memory_limit", lambda: MemoryLimit(1 << 60, 0))
    assert memory.total_bytes() == psutil.virtual_memory().total


def test_peak_memory_is_this_processes_own():
    slack = 4 << 20  # the kernel counts pages in batches
    before = memory.process_peak()
    block = np.ones(64 << 20, dtype=np.uint8)
    held = memory.process_rss()
    assert memory.process_peak() >= held - slack >= block.nbytes
    del block
    assert memory.process_peak() >= max(before, held) - slack
    code = "from kvboost_edge.host.memory import process_peak; print(process_peak())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(child.stdout) < memory.process_peak()


def test_import_is_light():
    """Modules that need no model leave the large packages, and those of extras, unloaded."""
    code = (
        "import sys, kvboost_edge.host.processor, kvboost_edge.host.memory, "
        "kvboost_edge.models.weights.safetensors_check, kvboost_edge.models.fingerprint, "
        "kvboost_edge.models.locate, kvboost_edge.models.config.architectures, "
        "kvboost_edge.text.detokenizer, kvboost_edge.text.stop_strings, "
        "kvboost_edge.tiers.redis.tier\n"
        "large = ('torch', 'transformers', 'numba', 'onnxruntime', 'redis')\n"
        "print([name for name in large if name in sys.modules])"
    )
    assert in_fresh_process(code).strip() == "[]"
