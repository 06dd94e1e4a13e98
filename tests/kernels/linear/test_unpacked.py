"""Weights unpacked in advance give the bits of the plain variant, for any number of tiles, groups
and panels.
"""

import re
from typing import NamedTuple

import numpy as np
import pytest
from llvmlite import binding

from helpers.kernels.tile_assembly import compiled_tile, product_of, tile_assembly, tile_module
from helpers.kernels.weight_formats import GRIDS
from kvboost_edge.kernels.integers import dot_form
from kvboost_edge.kernels.linear.int_tiles import IntTiles
from kvboost_edge.kernels.linear.panel import PAIR_FINE_TOKENS, PAIR_TOKENS, TILES_AT_ONCE
from kvboost_edge.kernels.linear.unpacked import UnpackedTiles
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, FORMATS, INT_KINDS

TOKENS = {False: 4, True: 2}
GROUPS = 35  # more than twice the number unpacked at once
on_avx2 = pytest.mark.skipif(not binding.get_host_cpu_features().get("avx2"), reason="needs AVX2")


class Product(NamedTuple):
    """Shape of a product: numbers of tiles and panels, and whether it is added to the results."""

    tiles: int
    panels: int = 1
    add: bool = False


def _run(tiles, *products):
    """Compile the tiles; return the results of the products."""
    run, engine = compiled_tile(tile_module(tiles, binding.get_default_triple()), {})
    results = [
        product_of(run, tiles, GROUPS, each.tiles, each.panels, add=each.add) for each in products
    ]
    del engine
    return results


def _assert_equal(unpacked, packed, *products):
    """Compare the bits of both kinds of tiles."""
    found = _run(unpacked, *products)
    expected = _run(packed, *products)
    for product, one, other in zip(products, found, expected, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=str(product))


@on_avx2
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("kind", INT_KINDS)
@pytest.mark.some(3)
def test_unpacked_tiles_equal_packed_ones(kind, fine):
    """A tile is unpacked again for many panels."""
    unpacked = UnpackedTiles(kind, TOKENS[fine], fine)
    packed = IntTiles(kind, 1, TOKENS[fine], fine, "plain")
    _assert_equal(unpacked, packed, Product(3), Product(1, 37, add=True))


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.some(2)
def test_formats_with_a_grid_are_unpacked_for_many_tokens(kind, fine):
    """One or two tiles, whatever the variant of this machine takes, and again for many panels."""
    size = PAIR_FINE_TOKENS if fine else PAIR_TOKENS
    number = FORMATS[kind].kind
    unpacked = UnpackedTiles(number, size, fine, dot_form(), TILES_AT_ONCE)
    packed = IntTiles(number, TILES_AT_ONCE, size, fine)
    _assert_equal(unpacked, packed, Product(2 * TILES_AT_ONCE), Product(TILES_AT_ONCE, 37))


@pytest.mark.parametrize("kind", INT_KINDS)
@pytest.mark.some(3)
def test_unpacked_tiles_keep_sums_in_registers(kind):
    """Two quads of four tokens take 16 products and no vector on the stack. The code is repeated
    once per widening of 16-bit sums.
    """
    assembly = tile_assembly(
        UnpackedTiles(kind, 4, False), "x86_64-unknown-linux-gnu", "znver3", optimize=True
    )
    products = [line for line in assembly.splitlines() if "vpmaddubsw" in line]
    form = FORMAT_OF[kind]
    most = 4 // form.parts if form.bits == 5 else 2
    if form.scaled_codes:  # both halves of a group are in the code
        most *= 2
    assert len(products) == 16 * most
    assert not any(re.search(r"\(%r[sb]p", line) for line in products)
