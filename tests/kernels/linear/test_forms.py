"""Every variant of the integer dot product gives the same bits. Each is compiled in a separate
process.
"""

import functools
import os
import subprocess
import sys

import pytest
from llvmlite import binding

from helpers.kernels.tile_assembly import tile_assembly, tile_module
from helpers.kernels.weight_formats import INTEGERS
from helpers.pairwise import each_once
from kvboost_edge.kernels import integers
from kvboost_edge.kernels.integers import dot_form, follows_pages
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, FORMATS, INT_KINDS
from kvboost_edge.kernels.linear.weight_tiles import IntTiles

PROGRAM = """
import hashlib
import sys
import numba
import numpy as np
from helpers.kernels.weight_formats import kind_of, product, random_weights
from kvboost_edge.kernels.integers import dot_form
from kvboost_edge.kernels.linear.weight_tiles import Target, Tile, int_tile
from kvboost_edge.kernels.reference import linear as reference

INPUTS = 256
rng, digest = np.random.default_rng(0), hashlib.sha256()
for kind in sys.argv[1:]:
    packed = random_weights(kind, 16, INPUTS)
    for tokens, fine in ((1, False), (2, True)):
        tile = int_tile[kind_of(kind), 1, tokens, fine]

        @numba.njit(nogil=True, error_model="numpy")
        def run(where, panel, target):
            tile(where, panel, target)

        x = rng.standard_normal((tokens, INPUTS)).astype(np.float32)
        x[:, 32:64] = rng.choice([-1, 1], (tokens, 32))
        panel = reference.pack_panel(x, kind, [tokens], fine=fine)
        out = np.zeros((tokens, 16), np.float32)
        where = Tile(*(array.ctypes.data for array in packed[:3]), 0, 0, 0, INPUTS // 32, 1, 0)
        run(where, panel.ctypes.data, Target(out.ctypes.data, 64, 0, 0, 0, np.float32(1)))
        expected = product(kind, x, packed, 16, fine=fine)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
        digest.update(out.tobytes())
print(dot_form(), digest.hexdigest())
"""
_WITHOUT = {"vnni256": (), "avx2": ("avxvnni",), "plain": ("avxvnni", "avx2", "dotprod", "i8mm")}


def _features(form):
    """Return the feature flags of this machine without those that `form` lacks."""
    flags = []
    for name, present in binding.get_host_cpu_features().items():
        wide = name.startswith(("avx512", "avx10", "evex512", "amx"))
        keep = present and not wide and name not in _WITHOUT[form]
        flags.append(("+" if keep else "-") + name)
    return ",".join(flags)


@functools.cache
def _run(form, formats):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if form == "neon":
        environment |= {"NUMBA_CPU_NAME": "cortex-a76", "NUMBA_CPU_FEATURES": "+neon,+dotprod"}
    elif form != "host":
        environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": _features(form)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *formats],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def _forms():
    """Return the variants that this machine can run in addition to its own."""
    features = binding.get_host_cpu_features()
    needs = {"vnni256": ("avxvnni",), "avx2": ("avx2",), "plain": ("sse2", "neon")}
    found = [
        form
        for form, any_of in needs.items()
        if any(map(features.get, any_of)) and form != dot_form()
    ]
    return [*found, "neon"] if dot_form() == "i8mm" else found


# test_every_form.py runs the others in its own process and compares them with the plain one.
IN_NO_OTHER_FILE = ("avx2", "neon")
# With and without an offset and a grid, and in two parts with minima. Compiling one takes 2 s.
SOME = ("int4-asym", "q2k", "iq2xs")
OTHERS = tuple(name for name in INTEGERS if name not in SOME)


@pytest.mark.parametrize(
    ("form", "formats"),
    [
        pytest.param(
            form,
            formats,
            marks=() if form in IN_NO_OTHER_FILE and formats is SOME else pytest.mark.full,
            id=f"{form}-{' '.join(formats)}",
        )
        for form in _forms()
        for formats in (SOME, OTHERS)
    ],
)
def test_every_variant_gives_the_hosts_bits(form, formats):
    """The program also compares each result with the specification."""
    name, digest = _run("host", formats)
    assert name == dot_form()
    assert _run(form, formats) == [form, digest]


def _assembly(kind, form, cpu, *, fine=False):
    """Compile a tile against four tokens for another processor."""
    return tile_assembly(IntTiles(kind, 1, 4, fine, form), "aarch64-unknown-linux-gnu", cpu)


@pytest.mark.parametrize(("kind", "fine"), each_once(INT_KINDS, (False, True)))
@pytest.mark.some(3)
def test_arm_with_dotprod_uses_sdot(kind, fine):
    """The 8 quads of 4 x 4 rows for each of 4 tokens (and planes) take one sdot each."""
    assembly = _assembly(kind, "neon", "cortex-a76", fine=fine)
    assert assembly.count("sdot") == 8 * 4 * 4 * (2 if fine else 1)


@pytest.mark.parametrize(
    ("kind", "fine"),
    each_once([kind for kind in INT_KINDS if FORMAT_OF[kind].parts == 1], (False, True)),
)
@pytest.mark.some(3)
def test_arm_with_i8mm_uses_smmla(kind, fine):
    """There are 4 pairs of quads of 8 pairs of rows for each of 2 pairs of tokens (and planes),
    half as many as with dot products. The total number of instructions is smaller too, or about the
    same for codes of 1 and 2 bits and for iq1s.
    """
    assembly = _assembly(kind, "i8mm", "ampere1", fine=fine)
    assert assembly.count("smmla") == 4 * 8 * 2 * (2 if fine else 1)
    assert "sdot" not in assembly
    form = FORMAT_OF[kind]
    most = 1.01 if form.bits <= 2 or form.has_deltas else 1
    others = _assembly(kind, "neon", "ampere1", fine=fine).splitlines()
    assert len(assembly.splitlines()) < most * len(others)


@pytest.mark.parametrize(("form", "cpu"), [("neon", "cortex-a76"), ("plain", "cortex-a72")])
def test_arm_uses_table_lookups(form, cpu):
    """The 8 quads of 4 x 16 codes are looked up once for all tokens. The table stays in a register,
    and no code is looked up individually.
    """
    instructions = [
        line.split()[0]
        for line in _assembly(FORMATS["int4t"].kind, form, cpu).splitlines()
        if line.startswith("\t")
    ]
    assert instructions.count("tbl") == 8 * 4
    assert not {"ldrb", "umov", "smov"} & set(instructions)


@pytest.mark.parametrize(("kind", "fine"), each_once(INT_KINDS, (False, True)))
@pytest.mark.some(3)
def test_arm_without_dotprod_multiplies_in_16_bits(kind, fine):
    """There are 8 quads of 64 products for each of 4 tokens (and planes), computed 8 at a time. Few
    instructions keep compilation fast too.

    Sums are widened to 32 bits for every quad of int8, once per group or half (if it has its own
    scales) for codes of up to 4 bits, and after 4 and 2 quads for codes of 5 and 6 bits.
    """
    assembly = _assembly(kind, "plain", "cortex-a72", fine=fine)
    planes = 2 if fine else 1
    products = 8 * 8 * 4 * planes
    assert "sdot" not in assembly
    multiplied = sum(
        line.split()[0] in ("mul", "mla") for line in assembly.splitlines() if ".8h" in line
    )
    added = sum(
        line.split()[0] in ("saddlp", "sadalp") for line in assembly.splitlines() if ".8h" in line
    )
    assert multiplied == products
    form = FORMAT_OF[kind]
    assert added == 4 * 4 * planes * (
        8 if form.uses_whole_byte else max(form.parts, {5: 2, 6: 4}.get(form.bits, 1))
    )


@pytest.mark.parametrize("processor", ["znver4", "znver2", "sapphirerapids", "generic"])
@pytest.mark.parametrize(
    ("name", "tokens", "lines", "on_zen_4"),
    [("int4", 1, 4, 1), ("int4", 2, 4, 1), ("int4", 3, 4, 4), ("int5", 1, 5, 5)],
)
def test_prefetched_lines_per_tile(name, tokens, lines, on_zen_4, processor, monkeypatch):
    """Only the number of prefetches is checked here. The bits are compared above, since other
    variants are compiled for "generic", which prefetches every line.
    """
    monkeypatch.setattr(integers, "_processor", lambda: processor)
    follows_pages.cache_clear()
    try:
        modules = [
            tile_module(IntTiles(FORMATS[name].kind, tiles, tokens, False, "plain"), "x86_64")
            for tiles in (1, 2)
        ]
    finally:
        follows_pages.cache_clear()
    found = [module.count('call void @"llvm.prefetch.p0"(') for module in modules]
    # One line for each result of a tile. For each group, one or all lines of a tile, or the lines
    # of weights and scales of all tiles.
    single = on_zen_4 if processor == "znver4" else lines + 1
    assert found == [tokens + single, 2 * tokens + 2 * (lines + 1)]
