"""GGUF's types whose 4-bit codes stand for entries of a table: IQ4_NL, IQ4_XS and MXFP4, all with
groups of 32.

    IQ4_NL   float16 d, codes                                      d * table[code]
    IQ4_XS   float16 d, 6-bit scales of 8 groups, codes            d * (scale - 32) * table[code]
    MXFP4    a byte e, codes                                       2 ** (e - 128) * table[code]

They become int4t, which has a float16 scale for each group: exact for IQ4_NL, for MXFP4 while the
scale is a float16, and rounded for IQ4_XS. Blocks are uint8 [blocks, bytes of a block], as in
blocks.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.models.weights import mxfp4

__all__ = ["TABLES", "WORKED_OUT", "count_lost", "float_scales", "half_scales", "table_codes"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLES: dict[str, npt.NDArray[np.int8]] = {
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), np.array(_NL, dtype=np.int8)),
    "MXFP4": mxfp4.TABLE,
}
"""By type: the weight, without its scale, of each code."""
WORKED_OUT = ("IQ4_XS", "MXFP4")
"""Types whose float16 scales are not in the file as such: one may be too large for a float16 in a
sound file.
"""

_CODES_AT = {"IQ4_NL": 2, "IQ4_XS": 8, "MXFP4": 1}


def table_codes(name: str, blocks: Bytes) -> Bytes:
    """Codes 0..15 of every group, [groups, 32]: of its 16 bytes the low nibbles, then the high
    ones.
    """
    packed = blocks[:, _CODES_AT[name] :].reshape(-1, 16)
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def float_scales(name: str, blocks: Bytes) -> Floats:
    """The scale of every group, float32 [groups]: exact."""
    if name == "MXFP4":
        return mxfp4.float_scales(blocks[:, 0])
    d = blocks[:, :2].view("<f2").astype(np.float32)
    if name == "IQ4_NL":
        return d.reshape(-1)
    high = blocks[:, 2:4].view("<u2").astype(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([blocks[:, 4:8] & np.uint8(15), blocks[:, 4:8] >> np.uint8(4)], axis=2).reshape(
        -1, 8
    )
    factors = (low | (high & np.uint16(3)).astype(np.uint8) << np.uint8(4)).astype(
        np.float32
    ) - np.float32(32)
    scales: Floats = (d * factors).reshape(-1)
    return scales


def half_scales(name: str, blocks: Bytes) -> npt.NDArray[np.float16]:
    """The same as float16: infinite where one is too large. Groups of zeros, and those of MXFP4
    whose scale is below 2 ** -24, have the scale 0.
    """
    if name == "MXFP4":
        return mxfp4.half_scales(blocks[:, 0], blocks[:, 1:])
    with np.errstate(over="ignore"):
        return float_scales(name, blocks).astype(np.float16)


def count_lost(name: str, blocks: Bytes) -> int:
    """Groups of MXFP4 that have weights other than zero, and a scale that becomes 0."""
    return mxfp4.count_lost(blocks[:, 0], blocks[:, 1:]) if name == "MXFP4" else 0
