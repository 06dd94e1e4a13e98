"""Which compiled entries (see kernels/entry.py) pack the weights of a plan, and read what is not
packed.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.kernels.block_rows import FORMATS, decode_rows_entry
from kvboost_edge.kernels.entry import Entry
from kvboost_edge.kernels.linear.blocks import blocks_entry
from kvboost_edge.kernels.linear.weights import (
    BLOCK_FORMATS,
    QUANTIZED,
    codes_entry,
    fit_entry,
    floats_entry,
)
from kvboost_edge.models.packed.plan import VECTOR, PackEntry, holds_exactly
from kvboost_edge.models.weights.source import WeightSource

__all__ = ["packing_entries"]


def packing_entries(
    plan: Sequence[PackEntry], source: WeightSource, tables: Sequence[PackEntry] = ()
) -> list[Entry]:
    """The entries, those that take longest to compile first. `tables`: what is read row by row."""
    found = set()
    for entry in plan:
        if entry.kind == VECTOR:
            continue
        if entry.kind in BLOCK_FORMATS:
            found.add(blocks_entry)
            continue
        kept = [holds_exactly(entry.kind, source.kind(tensor)) for tensor, _ in entry.parts]
        if any(kept):
            found.add(codes_entry)
        if not all(kept):
            found.add(fit_entry if entry.kind in QUANTIZED else floats_entry)
    if any(source.type_of(tensor) in FORMATS for table in tables for tensor, _ in table.parts):
        found.add(decode_rows_entry)
    each = (blocks_entry, fit_entry, decode_rows_entry, codes_entry, floats_entry)
    return [entry for entry in each if entry in found]
