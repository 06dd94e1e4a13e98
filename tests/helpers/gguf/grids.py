"""Grids of GGUF's lattice types, as the `gguf` package has them.

`PYTHONPATH=tests python -m helpers.gguf.grids` writes grids.npz.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import quants

PATH = Path(__file__).parents[3] / "kvboost_edge" / "kernels" / "linear" / "grids.npz"
CLASSES = {
    "iq1s": quants.IQ1_S,
    "iq2xxs": quants.IQ2_XXS,
    "iq2xs": quants.IQ2_XS,
    "iq2s": quants.IQ2_S,
    "iq3xxs": quants.IQ3_XXS,
    "iq3s": quants.IQ3_S,
}


def package_grids() -> dict[str, npt.NDArray[np.uint8]]:
    """The magnitudes, or for iq1s the codes, of every entry by weight format.

    Returns:
        uint8 [entries, weights of an entry]. A code of iq1s is 8 times the weight plus 10.
    """
    found = {}
    for name, one in CLASSES.items():
        one.init_grid()
        grid = one.grid.reshape(one.grid_shape)
        assert np.array_equal(grid, np.rint(grid))
        if name == "iq1s":
            grid = 8 * grid + 10
        found[name] = grid.astype(np.uint8)
    return found


if __name__ == "__main__":
    np.savez_compressed(PATH, **package_grids())
    print(f"{PATH}: {PATH.stat().st_size} bytes")
