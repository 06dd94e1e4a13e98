"""Random blocks of Q4_K, Q5_K and Q6_K as GGUF files hold them, and random rows of int4t."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.kernels.linear.blocks import BLOCK_BYTES
from kvboost_edge.kernels.linear.dot import KIND_INT4T, KIND_Q6K
from kvboost_edge.kernels.linear.weights import BLOCK_FORMATS, PackedRows, pack_codes

__all__ = ["random_blocks", "random_table_rows"]


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Rows of random bits with ordinary float16 numbers, uint8 [rows, bytes]; the first block of row 0 is at the
    extremes: the largest codes, and scales of the largest magnitude."""
    rng, number = np.random.default_rng(seed), BLOCK_FORMATS[kind]
    nbytes = BLOCK_BYTES[number]
    raw = rng.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    raw[0] = 255
    if number == KIND_Q6K:
        raw[0, 192:208] = 128
    for at in (208,) if number == KIND_Q6K else (0, 2):
        halves = (0.01 * rng.standard_normal((len(raw), 1))).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    return raw.reshape(rows, -1)


def random_table_rows(rows: int, inputs: int, seed: int = 0) -> PackedRows:
    """Random codes of int4t, and tables that differ from tile to tile, with both ends of a byte in each."""
    rng, parts = np.random.default_rng(seed), []
    for start in range(0, rows, 16):
        count = min(16, rows - start)
        table = rng.integers(-128, 128, 16).astype(np.int8)
        table[rng.permutation(16)[:2]] = -128, 127
        codes = rng.integers(0, 16, (count, inputs)).astype(np.uint8)
        scales = (0.01 * rng.standard_normal((count, -(-inputs // 32)))).astype(np.float16)
        parts.append(pack_codes(codes, scales, None, KIND_INT4T, table))
    return PackedRows(*(np.concatenate([part[index] for part in parts]) for index in range(3)))
