"""Every variant of the integer kernels, including those for other processors, gives the bits of the
plain one.

Each microkernel is compiled for this machine, with functions in place of the instructions that it
lacks. test_forms.py and test_amx.py run the native variants unchanged.
"""

import ctypes
import functools

import numpy as np
import pytest
from llvmlite import binding

from helpers.kernels.tile_assembly import compiled_tile, product_of, tile_module
from helpers.kernels.weight_formats import GRIDS
from helpers.pairwise import each_once, pairwise
from kvboost_edge.kernels.linear import amx as linear_amx
from kvboost_edge.kernels.linear import grid_permutes, simd_loads
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, FORMATS, INT_KINDS
from kvboost_edge.kernels.linear.weight_tiles import IntTiles

GROUPS = 17
TILES = 2
# Variant -> the instruction's name in LLVM, number of its sums, and whether the first factor's
# bytes are signed.
INSTRUCTIONS = {
    "vnni512": ("llvm.x86.avx512.vpdpbusd.512", 16, False),
    "vnni256": ("llvm.x86.avx512.vpdpbusd.256", 8, False),
    "neon": ("llvm.aarch64.neon.sdot.v4i32.v16i8", 4, True),
}


def _dot(name, lanes, signed):
    """Return a function that adds the products of four bytes each to 32-bit sums."""
    many = f"<{4 * lanes} x i32>"
    sums = f"<{lanes} x i32>"
    picks = []
    for place in range(4):
        order = ", ".join(f"i32 {4 * lane + place}" for lane in range(lanes))
        picks.append(f"%p{place} = shufflevector {many} %p, {many} %p, {sums} <{order}>")
        picks.append(f"%s{place + 1} = add {sums} %s{place}, %p{place}")
    return "\n".join(
        [
            f"define {sums} @{name}({sums} %s0, <{4 * lanes} x i8> %x, <{4 * lanes} x i8> %y) {{",
            f"%a = {'sext' if signed else 'zext'} <{4 * lanes} x i8> %x to {many}",
            f"%b = sext <{4 * lanes} x i8> %y to {many}",
            f"%p = mul {many} %a, %b",
            *picks,
            f"ret {sums} %s4",
            "}",
        ]
    )


# Instruction that multiplies two rows of 8 bytes by two others.
MATRIX = "llvm.aarch64.neon.smmla.v4i32.v16i8"
PAIRED_KINDS = [
    kind for kind in INT_KINDS if FORMAT_OF[kind].parts == 1 or FORMAT_OF[kind].scaled_codes
]


def _matrix():
    """Return a function that adds the products of 2 rows x 8 bytes and 8 bytes x 2 tokens to four
    sums.
    """
    lines = []
    for row in range(2):
        for token in range(2):
            lane = 2 * row + token
            lines.append(f"%t{lane}_0 = extractelement <4 x i32> %sums, i32 {lane}")
            for at in range(8):
                name = f"{lane}_{at}"
                lines += [
                    f"%x{name} = extractelement <16 x i32> %a, i32 {8 * row + at}",
                    f"%y{name} = extractelement <16 x i32> %b, i32 {8 * token + at}",
                    f"%p{name} = mul i32 %x{name}, %y{name}",
                    f"%t{lane}_{at + 1} = add i32 %t{name}, %p{name}",
                ]
            before = f"%v{lane}" if lane else "undef"
            lines.append(
                f"%v{lane + 1} = insertelement <4 x i32> {before}, i32 %t{lane}_8, i32 {lane}"
            )
    return "\n".join(
        [
            "define <4 x i32> @emulated_matrix(<4 x i32> %sums, <16 x i8> %x, <16 x i8> %y) {",
            "%a = sext <16 x i8> %x to <16 x i32>",
            "%b = sext <16 x i8> %y to <16 x i32>",
            *lines,
            "ret <4 x i32> %v4",
            "}",
        ]
    )


# Instructions that look up bytes: bytes per call, bytes of a table, and the bits of a code that
# give 0 if one is set.
SHUFFLES = {
    "llvm.x86.avx512.pshuf.b.512": (64, 16, 0x80),
    "llvm.x86.avx512.permvar.qi.512": (64, 64, 0),
    "llvm.x86.avx2.pshuf.b": (32, 16, 0x80),
    "llvm.x86.ssse3.pshuf.b.128": (16, 16, 0x80),
    "llvm.aarch64.neon.tbl1.v16i8": (16, 16, 0xF0),
}


def _shuffle(name, lanes, size, zeros):
    """Return a function that looks up each byte in its own part of the table, which has `size`
    bytes.
    """
    kind = f"<{lanes} x i8>"
    lines = []
    for lane in range(lanes):
        lines += [
            f"%c{lane} = extractelement {kind} %codes, i32 {lane}",
            f"%l{lane} = and i8 %c{lane}, {size - 1}",
            f"%o{lane} = and i8 %c{lane}, {zeros - 256 * (zeros > 127)}",
            f"%n{lane} = icmp ne i8 %o{lane}, 0",
            f"%w{lane} = zext i8 %l{lane} to i32",
            f"%p{lane} = add i32 %w{lane}, {lane // size * size}",
            f"%e{lane} = extractelement {kind} %table, i32 %p{lane}",
            f"%b{lane} = select i1 %n{lane}, i8 0, i8 %e{lane}",
            f"%v{lane + 1} = insertelement {kind} {f'%v{lane}' if lane else 'undef'}, i8 "
            f"%b{lane}, i32 {lane}",
        ]
    head = f"define {kind} @{name}({kind} %table, {kind} %codes) {{"
    return "\n".join([head, *lines, f"ret {kind} %v{lanes}", "}"])


MULTISHIFT = "llvm.x86.avx512.pmultishift.qb.512"


def _multishift(name):
    """Return a function that takes 8 bits of a quadword, from a place of its own for each byte."""
    lines = ["%quads = bitcast <64 x i8> %bytes to <8 x i64>"]
    for lane in range(64):
        lines += [
            f"%q{lane} = extractelement <8 x i64> %quads, i32 {lane // 8}",
            f"%c{lane} = extractelement <64 x i8> %places, i32 {lane}",
            f"%l{lane} = and i8 %c{lane}, 63",
            f"%w{lane} = zext i8 %l{lane} to i64",
            f"%r{lane} = call i64 @llvm.fshr.i64(i64 %q{lane}, i64 %q{lane}, i64 %w{lane})",
            f"%b{lane} = trunc i64 %r{lane} to i8",
            f"%v{lane + 1} = insertelement <64 x i8> {f'%v{lane}' if lane else 'undef'}, i8 "
            f"%b{lane}, i32 {lane}",
        ]
    head = f"define <64 x i8> @{name}(<64 x i8> %places, <64 x i8> %bytes) {{"
    declaration = "declare i64 @llvm.fshr.i64(i64, i64, i64)"
    return "\n".join([declaration, head, *lines, "ret <64 x i8> %v64", "}"])


# Instructions that load entries of a grid: how many at once, and the bits of an entry.
GATHERS = {
    "llvm.x86.avx512.mask.gather.dpi.512": (16, 32),
    "llvm.x86.avx512.mask.gather.dpq.512": (8, 64),
}


def _gather(name, lanes, bits):
    """A function that loads the entry at each index."""
    kind = f"<{lanes} x i{bits}>"
    lines = []
    for lane in range(lanes):
        lines += [
            f"%i{lane} = extractelement <{lanes} x i32> %indices, i32 {lane}",
            f"%p{lane} = getelementptr i{bits}, ptr %table, i32 %i{lane}",
            f"%e{lane} = load i{bits}, ptr %p{lane}",
            f"%v{lane + 1} = insertelement {kind} {f'%v{lane}' if lane else '%none'}, i{bits} "
            f"%e{lane}, i32 {lane}",
        ]
    head = (
        f"define {kind} @{name}({kind} %none, ptr %table, <{lanes} x i32> %indices, "
        f"<{lanes} x i1> %every, i32 %size) {{"
    )
    return "\n".join([head, *lines, f"ret {kind} %v{lanes}", "}"])


class _Registers:
    """Emulation of Intel's tile registers by its manual."""

    def __init__(self):
        self.tiles = {}
        self.multiplied = 0
        kinds = {
            "ldtilecfg": (self._configure, [ctypes.c_void_p]),
            "tilerelease": (self.tiles.clear, []),
            "tilezero": (lambda tile: self.tiles[tile].fill(0), [ctypes.c_uint8]),
            "tileloadd64": (self._load, [ctypes.c_uint8, ctypes.c_void_p, ctypes.c_int64]),
            "tilestored64": (self._store, [ctypes.c_uint8, ctypes.c_void_p, ctypes.c_int64]),
            "tdpbssd": (self._multiply, [ctypes.c_uint8] * 3),
        }
        self.functions = {
            name: ctypes.CFUNCTYPE(None, *types)(function)
            for name, (function, types) in kinds.items()
        }

    def _configure(self, address):
        text = ctypes.string_at(address, 64)
        for tile in range(8):
            width = int.from_bytes(text[16 + 2 * tile : 18 + 2 * tile], "little")
            self.tiles[tile] = np.zeros((text[48 + tile], width), np.int8)

    def _rows(self, tile, address, step):
        for row in range(len(self.tiles[tile])):
            yield row, address + row * step

    def _load(self, tile, address, step):
        for row, at in self._rows(tile, address, step):
            self.tiles[tile][row] = np.frombuffer(
                ctypes.string_at(at, self.tiles[tile].shape[1]), np.int8
            )

    def _store(self, tile, address, step):
        for row, at in self._rows(tile, address, step):
            ctypes.memmove(at, self.tiles[tile][row].tobytes(), self.tiles[tile].shape[1])

    def _multiply(self, sums, rows, weights):
        self.multiplied += 1
        a = self.tiles[rows].astype(np.int32)
        b = self.tiles[weights].astype(np.int32)
        assert a.shape[1] == 4 * len(b)
        quads = b.reshape(len(b), -1, 4).transpose(0, 2, 1).reshape(4 * len(b), -1)
        self.tiles[sums].view(np.int32)[:] += a @ quads


def _run(tiles, functions, definitions=""):
    """Multiply two tiles by a panel with emulated instructions; float32 [tokens, 32]."""
    text = tile_module(tiles, binding.get_default_triple())
    for form_name, _, _ in INSTRUCTIONS.values():
        if f'@"{form_name}"' in text:
            lines = [
                line
                for line in text.splitlines()
                if not (line.startswith("declare") and form_name in line)
            ]
            text = "\n".join(lines).replace(f'@"{form_name}"', "@emulated_dot") + definitions
    if f'@"{MATRIX}"' in text:
        lines = [
            line
            for line in text.splitlines()
            if not (line.startswith("declare") and MATRIX in line)
        ]
        text = "\n".join(lines).replace(f'@"{MATRIX}"', "@emulated_matrix") + "\n" + _matrix()
    functions_of = dict.fromkeys(SHUFFLES, _shuffle) | dict.fromkeys(GATHERS, _gather)
    functions_of[MULTISHIFT] = _multishift
    for number, (name, shape) in enumerate((SHUFFLES | GATHERS | {MULTISHIFT: ()}).items()):
        if f'@"{name}"' in text:
            lines = [
                line
                for line in text.splitlines()
                if not (line.startswith("declare") and f'@"{name}"' in line)
            ]
            emulated = f"emulated{number}"
            text = (
                "\n".join(lines).replace(f'@"{name}"', f"@{emulated}")
                + "\n"
                + functions_of[name](emulated, *shape)
            )
    text = text.replace('@"llvm.x86.t', '@"emulated_t').replace('@"llvm.x86.ldt', '@"emulated_ldt')
    run, engine = compiled_tile(text, functions)
    out = product_of(run, tiles, GROUPS, TILES)
    del engine
    return out


@functools.cache
def _plain(kind, fine, tokens=2):
    """Return the results of the plain variant."""
    return _run(IntTiles(kind, 1, tokens, fine, "plain"), {})


@pytest.mark.parametrize(("form", "kind", "fine"), pairwise(INSTRUCTIONS, INT_KINDS, (False, True)))
@pytest.mark.some(3)
def test_every_dot_product_variant_gives_the_same_integers(form, kind, fine, scale):
    """`make test` takes one or two tiles at once, depending on the format."""
    name, lanes, signed = INSTRUCTIONS[form]
    plain = _plain(kind, fine)
    definitions = _dot("emulated_dot", lanes, signed)
    shapes = ((1, 2), (2, 2))
    for tiles, tokens in scale(shapes[kind % 2 :][:1], shapes):
        one = IntTiles(kind, tiles, tokens, fine, form)
        assert name in tile_module(one, "")
        np.testing.assert_array_equal(_run(one, {}, definitions), plain)


@pytest.mark.parametrize(
    ("kind", "fine", "shape"), pairwise(PAIRED_KINDS, (False, True), ((1, 2), (1, 4), (2, 2)))
)
@pytest.mark.some(3)
def test_smmla_variant_gives_the_same_integers(kind, fine, shape):
    tiles, tokens = shape
    one = IntTiles(kind, tiles, tokens, fine, "i8mm")
    text = tile_module(one, "")
    assert MATRIX in text
    assert "sdot" not in text
    np.testing.assert_array_equal(_run(one, {}), _plain(kind, fine, tokens))


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *((kind, 1) for kind in PAIRED_KINDS),
        *((kind, 2) for kind in INT_KINDS if kind not in PAIRED_KINDS),
    ],
)
def test_one_token_uses_dot_products_with_i8mm(kind, tokens):
    texts = [tile_module(IntTiles(kind, 1, tokens, False, form), "") for form in ("i8mm", "neon")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("kind", "fine"), each_once(INT_KINDS, (False, True)))
@pytest.mark.some(3)
def test_amx_variant_gives_the_same_integers(kind, fine, monkeypatch):
    monkeypatch.setattr(linear_amx, "MATRIX_TOKENS", 32)
    monkeypatch.setattr(linear_amx, "MATRIX_FINE_TOKENS", 16)
    registers = _Registers()
    tiles = linear_amx.AmxTiles(kind, fine)
    out = _run(tiles, registers.functions)
    assert registers.multiplied == 4 * GROUPS * tiles.parts
    np.testing.assert_array_equal(out, _plain(kind, fine, tiles.tokens))


def test_only_signed_kinds_have_an_offset():
    assert {name for name, form in FORMATS.items() if form.offset} == {
        "int8",
        "int4",
        "int5",
        "q3k",
        "q6k",
        "int4t",
        "int2-g64",
        "int2-g256",
        "int1-g128",
        "nvfp4",
        *GRIDS,
    }


@pytest.mark.parametrize(
    ("form", "name", "permutes", "shuffles", "triple"),
    [
        ("vnni512", "llvm.x86.avx512.permvar.qi.512", True, True, "x86_64"),
        ("vnni512", "llvm.x86.avx512.pshuf.b.512", False, True, "x86_64"),
        ("vnni256", "llvm.x86.avx2.pshuf.b", True, True, "x86_64"),
        ("avx2", "llvm.x86.avx2.pshuf.b", False, True, "x86_64"),
        ("neon", "llvm.aarch64.neon.tbl1.v16i8", False, False, "aarch64"),
        ("plain", "llvm.aarch64.neon.tbl1.v16i8", False, False, "aarch64"),
        ("plain", "llvm.x86.ssse3.pshuf.b.128", False, True, "x86_64"),
        ("plain", "", False, False, "x86_64"),
    ],
)
def test_every_table_lookup_gives_the_same_integers(
    form, name, permutes, shuffles, triple, monkeypatch
):
    """The 8 quads of a group are looked up with the expected number of instructions, and the
    results have the same bits.
    """
    plain = _plain(FORMATS["int4t"].kind, False)
    monkeypatch.setattr(simd_loads, "has_byte_permute", lambda: permutes)
    monkeypatch.setattr(simd_loads, "has_byte_shuffle", lambda: shuffles)
    tiles = IntTiles(FORMATS["int4t"].kind, 1, 2, False, form)
    text = tile_module(tiles, f"{triple}-unknown-linux-gnu")
    for other, (lanes, _, _) in SHUFFLES.items():
        assert text.count(f'call <{lanes} x i8> @"{other}"') == (
            8 * 64 // lanes if other == name else 0
        )
    # The other instructions of "avx2" are not emulated, see test_unpacked.py. `_run` uses the
    # triple of this machine.
    if form in INSTRUCTIONS or (form, triple) == ("plain", "x86_64"):
        definitions = _dot("emulated_dot", *INSTRUCTIONS[form][1:]) if form in INSTRUCTIONS else ""
        np.testing.assert_array_equal(_run(tiles, {}, definitions), plain)


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in ("iq2xxs", "iq2xs", "iq3xxs", "iq3s") for form in ("vnni512", "amx")],
)
def test_permutations_find_the_entries_of_a_grid(name, form, monkeypatch):
    """The weights are those of the gathers, which other processors use."""
    kind = FORMATS[name].kind
    plain = _plain(kind, False, 32 if form == "amx" else 2)
    monkeypatch.setattr(linear_amx, "MATRIX_TOKENS", 32)
    tiles = linear_amx.AmxTiles(kind, False) if form == "amx" else IntTiles(kind, 1, 2, False, form)
    functions = _Registers().functions
    definitions = _dot("emulated_dot", *INSTRUCTIONS["vnni512"][1:]) if form != "amx" else ""
    for permutes in (True, False):
        monkeypatch.setattr(grid_permutes, "has_byte_permute", lambda found=permutes: found)
        text = tile_module(tiles, "")
        assert (f'call <64 x i8> @"{MULTISHIFT}"' in text) == permutes
        assert ("gather" in text) != permutes
        np.testing.assert_array_equal(_run(tiles, functions, definitions), plain)
