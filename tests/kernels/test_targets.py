"""Classes of processors that kernel libraries are built for."""

import pytest

from kvboost_edge.host.processor import CpuIdentity
from kvboost_edge.kernels.targets import TARGETS, targets_of, usable_targets

V3 = "avx avx2 bmi1 bmi2 cx16 f16c fma abm movbe popcnt sse4_1 sse4_2 ssse3 xsave"
AVX512 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
VBMI = f"{AVX512} avx512vbmi avx512_vbmi2"

ZEN4 = f"{VBMI} avx512_bf16 avx512_bitalg avx512_vpopcntdq avx512ifma gfni sse4a"


def names(flags, family=("GenuineIntel", 6), arch="x86_64"):
    identity = CpuIdentity(arch, frozenset(flags.split()), family)
    return [target.name for target in usable_targets(identity)]


@pytest.mark.parametrize(
    ("flags", "family", "first"),
    [
        (V3, ("GenuineIntel", 6), "x86-64-avx2"),
        (V3, ("AuthenticAMD", 25), "x86-64-avx2"),
        (f"{V3} avx_vnni", ("GenuineIntel", 6), "x86-64-avx-vnni"),
        (AVX512, ("GenuineIntel", 6), "x86-64-avx512-vnni"),
        (VBMI, ("GenuineIntel", 6), "x86-64-avx512-vbmi"),
        (ZEN4, ("AuthenticAMD", 25), "x86-64-zen4"),
        (ZEN4, ("AuthenticAMD", 26), "x86-64-avx512-vbmi"),
        (f"{VBMI} amx_tile amx_int8", ("GenuineIntel", 6), "x86-64-amx"),
    ],
)
def test_the_first_target_is_the_fastest(flags, family, first):
    assert names(flags, family)[0] == first
    assert names(flags, family)[-1] == "x86-64-avx2"


def test_arm_targets():
    assert names("asimd asimdhp asimddp atomics", None, "aarch64") == ["arm64-dotprod"]
    assert names("asimd asimdhp asimddp atomics i8mm", None, "aarch64")[0] == "arm64-i8mm"
    assert names("asimd atomics", None, "aarch64") == []


@pytest.mark.parametrize("missing", V3.split())
def test_a_processor_lacking_an_instruction_set_has_no_target(missing):
    assert names(V3.replace(f"{missing} ", "").replace(f" {missing}", "")) == [] or missing == "avx"


def test_names_are_file_names_and_unique():
    found = [target.name for target in TARGETS]
    assert len(set(found)) == len(found)
    assert all(name.replace("-", "").isalnum() for name in found)
    assert {target.arch for target in TARGETS} == {"x86_64", "aarch64"}
    assert targets_of("riscv64") == ()
