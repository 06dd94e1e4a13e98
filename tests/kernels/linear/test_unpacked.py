"""Weights unpacked beforehand give the bits of the plain form, however many tiles, groups and panels there are."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import binding

from helpers.kernels.tile_assembly import compiled_tile, tile_assembly, tile_module
from kvboost_edge.kernels.linear.dot import BLOCK_KINDS
from kvboost_edge.kernels.linear.int_tiles import IntTiles, Target, Tile
from kvboost_edge.kernels.linear.layout import SCALE_BYTES, group_bytes, minima_bytes
from kvboost_edge.kernels.linear.tiles import INT_KINDS
from kvboost_edge.kernels.linear.unpacked import UnpackedTiles
from kvboost_edge.kernels.linear.weights import NUMBERS
from kvboost_edge.kernels.reference import linear as reference

NAMES = {number: name for name, number in NUMBERS.items()}
TOKENS = {False: 4, True: 2}
GROUPS = 35  # more than are unpacked at once, and more than twice
on_avx2 = pytest.mark.skipif(not binding.get_host_cpu_features().get("avx2"), reason="needs AVX2")


def _run(tiles: IntTiles, runs: int, *, over_tokens: bool, add: bool = False) -> npt.NDArray[np.float32]:
    """Random weights and tokens: so many tiles against a panel, or a tile against so many panels; [tokens, rows]."""
    text = tile_module(tiles, binding.get_default_triple())
    run, engine = compiled_tile(text, {})
    kind, rng = tiles.kind, np.random.default_rng(tiles.kind)
    count, panels = (1, runs) if over_tokens else (runs, 1)
    sizes = [GROUPS * group_bytes(kind), GROUPS * SCALE_BYTES, max(minima_bytes(kind, GROUPS), 2)]
    weights, scales, minima = (rng.integers(0, 256, (count, size), dtype=np.uint8) for size in sizes)
    weights[:, : 2 * group_bytes(kind)] = rng.choice(np.array([0, 255], np.uint8), (count, 2 * group_bytes(kind)))
    minima[:] = rng.standard_normal((count, sizes[2] // 2)).astype(np.float16).view(np.uint8)
    if kind not in BLOCK_KINDS:
        scales[:] = rng.standard_normal((count, sizes[1] // 2)).astype(np.float16).view(np.uint8)
    tokens = panels * tiles.tokens
    x = rng.standard_normal((tokens, GROUPS * 32)).astype(np.float32)
    x[:, :64] = rng.choice([-1, 1], (tokens, 64))
    panel = reference.pack_panel(x, NAMES[kind], [tiles.tokens] * panels, fine=tiles.fine)
    out = rng.standard_normal((tokens, count * 16)).astype(np.float32)
    bias = rng.standard_normal(count * 16).astype(np.float32)
    where = Tile(
        *(array.ctypes.data for array in (weights, scales, minima)),
        *(array.strides[0] for array in (weights, scales, minima)),
        GROUPS, runs, panel.nbytes // panels if over_tokens else 0,
    )  # fmt: skip
    target = Target(out.ctypes.data, out.strides[0], 64, bias.ctypes.data, int(add), 0.5)
    run(*where, panel.ctypes.data, *target)
    del engine
    assert np.isfinite(out).all()
    return out


@on_avx2
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", INT_KINDS)
def test_tiles_against_one_panel(kind: int, fine: bool) -> None:
    plain = _run(IntTiles(kind, 1, TOKENS[fine], fine, "plain"), 3, over_tokens=False)
    np.testing.assert_array_equal(_run(UnpackedTiles(kind, TOKENS[fine], fine), 3, over_tokens=False), plain)


@on_avx2
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", INT_KINDS)
def test_a_tile_against_more_panels_than_one_unpacking_serves(kind: int, fine: bool) -> None:
    plain = _run(IntTiles(kind, 1, TOKENS[fine], fine, "plain"), 37, over_tokens=True, add=True)
    unpacked = _run(UnpackedTiles(kind, TOKENS[fine], fine), 37, over_tokens=True, add=True)
    np.testing.assert_array_equal(unpacked, plain)


@pytest.mark.parametrize("kind", INT_KINDS)
def test_sums_stay_in_registers_and_loops_stay_loops(kind: int) -> None:
    """Four tokens of two quads: 16 products and no vector on the stack; how often that is written is how often sums of
    16 bits are widened."""
    assembly = tile_assembly(UnpackedTiles(kind, 4, False), "x86_64-unknown-linux-gnu", "znver3", optimize=True)
    products = [line for line in assembly.splitlines() if "vpmaddubsw" in line]
    most = {NUMBERS["q5k"]: 4, NUMBERS["q6k"]: 2}.get(kind, 2)
    assert len(products) == 16 * most
    assert not any(re.search(r"\(%r[sb]p", line) for line in products)
