"""Which compiled entries (see kernels/entry.py) pack the weights of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost_edge.kernels.entry import Entry
from kvboost_edge.kernels.linear.blocks import blocks_entry
from kvboost_edge.kernels.linear.weights import BLOCK_FORMATS, QUANTIZED, codes_entry, fit_entry, floats_entry
from kvboost_edge.models.packed.plan import VECTOR, PackEntry, holds_exactly
from kvboost_edge.models.weights.source import WeightSource

__all__ = ["packing_entries"]


def packing_entries(plan: Sequence[PackEntry], source: WeightSource) -> list[Entry]:
    """The entries, those that take longest to compile first."""
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
    return [entry for entry in (blocks_entry, fit_entry, codes_entry, floats_entry) if entry in found]
