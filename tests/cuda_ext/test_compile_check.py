"""Tests of the arithmetic and the parsers of `make cuda-check`, without NVIDIA's compilers."""

import struct

import pytest

import helpers.cuda.standin  # noqa: F401  the package is found through it
from compile_check.cubin import opcodes, read_int
from compile_check.forms import Form, Row, programs, requirements
from compile_check.machines import MACHINES, ctas_that_fit
from compile_check.nvrtc import Used, _kernels

BY_NAME = {machine.name: machine for machine in MACHINES}
LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_75'
ptxas info    : Function properties for first
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 7.838 ms
ptxas info    : Compiling entry function 'second' for 'sm_75'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 376 bytes cmem[0]
"""


@pytest.mark.parametrize(
    ("name", "threads", "registers", "shared", "ctas"),
    [
        ("sm_80", 128, 128, 0, 4),  # 65536 / (128 x 128)
        ("sm_80", 128, 129, 0, 3),  # 129 registers of a warp are 17 times 256, not 16.1
        ("sm_80", 128, 32, 0, 16),  # 64 warps
        ("sm_80", 32, 16, 0, 32),  # CTAs
        ("sm_80", 128, 32, 80 * 1024, 2),  # 164 KiB / (80 + 1)
        ("sm_80", 128, 32, 163 * 1024, 1),
        ("sm_80", 128, 32, 164 * 1024, 0),
        ("sm_75", 128, 32, 33 * 1024, 1),
        ("sm_86", 128, 16, 0, 12),  # 48 warps
        ("sm_90", 128, 256, 0, 0),
    ],
)
def test_number_of_ctas_that_fit(name, threads, registers, shared, ctas):
    assert ctas_that_fit(BY_NAME[name], threads, registers, shared) == ctas


def test_ptxas_output_is_parsed():
    assert _kernels(LOG) == [("first", Used(255, 8, 28, 1024)), ("second", Used(32, 0, 0, 0))]


def elf():
    """Return an ELF file with a kernel of three instructions and an int of value 77."""
    names = b"\0.shstrtab\0.text.kernel\0.data\0.symtab\0.strtab\0"
    code = b"".join(struct.pack("<QQ", word, 0) for word in (0xABC123C, 0x723C, 0x7918))
    data = struct.pack("<i", 77)
    strings = b"\0number\0"
    symbol = struct.pack("<IBBHQQ", 1, 0, 0, 3, 0, 4)
    parts = [names, code, data, symbol, strings]
    kinds = [3, 1, 1, 2, 3]
    words = [".shstrtab", ".text.kernel", ".data", ".symtab", ".strtab"]
    at = 64
    headers = [struct.pack("<IIQQQQIIQQ", *([0] * 10))]
    for kind, word, part in zip(kinds, words, parts, strict=True):
        offset = names.index(word.encode() + b"\0")
        headers.append(
            struct.pack(
                "<IIQQQQIIQQ", offset, kind, 0, 0, at, len(part), 5 if kind == 2 else 0, 0, 1, 0
            )
        )
        at += len(part)
    start = (
        b"\x7fELF\x02\x01"
        + bytes(34)
        + struct.pack("<Q", at)
        + bytes(10)
        + struct.pack("<HHH", 64, 6, 1)
    )
    return start + b"".join(parts) + b"".join(headers)


def test_opcodes_are_read_from_a_sass_file():
    assert opcodes(elf()) == {"kernel": {0x23C: 2, 0x918: 1}}
    assert read_int(elf(), "number") == 77
    with pytest.raises(KeyError):
        read_int(elf(), "other")
    with pytest.raises(ValueError, match="ELF"):
        opcodes(b"other" * 20)


def test_every_variant_is_in_a_program():
    forms = {
        machine.name: [form for _, group in programs(machine) for form in group]
        for machine in MACHINES
    }
    assert {name: len(found) for name, found in forms.items()} == {
        "sm_70": 11,
        "sm_75": 11,
        "sm_80": 20,
        "sm_86": 20,
        "sm_89": 20,
        "sm_90": 20,
    }
    assert all(len(set(found)) == len(found) for found in forms.values())
    attention = {form[1:] for form in forms["sm_80"] if form.is_attention}
    assert attention == {
        (dtype, dim, m) for dtype in ("F16", "BF16") for dim in (64, 96, 128, 256) for m in (4, 1)
    }


GOOD = Used(128, 0, 0, 0)
ATTENTION = Form("attention_mma", "F16", 64, 4)
OTHER = Form("write_kv")


def problems(machine, form, used, shared, hmma):
    ctas = ctas_that_fit(machine, 128, used.registers, shared)
    return requirements(Row(machine, form, used, shared, hmma, ctas))


@pytest.mark.parametrize(
    ("name", "form", "used", "shared", "hmma", "said"),
    [
        ("sm_80", ATTENTION, GOOD, 27648, 64, []),
        ("sm_80", OTHER, GOOD, 0, 0, []),
        ("sm_80", ATTENTION, GOOD, 27648, 0, ["no tensor-core"]),
        ("sm_80", ATTENTION, Used(128, 8, 24, 0), 27648, 64, ["spills 24"]),
        ("sm_75", ATTENTION, Used(128, 8, 24, 0), 27648, 64, []),
        ("sm_75", ATTENTION, GOOD, 65537, 64, ["65537 bytes", "does not fit"]),
        ("sm_90", ATTENTION, Used(256, 0, 0, 0), 0, 64, ["256 registers", "does not fit"]),
    ],
)
def test_requirements_of_a_variant(name, form, used, shared, hmma, said):
    found = list(problems(BY_NAME[name], form, used, shared, hmma))
    assert [want in got for want, got in zip(said, found, strict=True)] == [True] * len(said)
