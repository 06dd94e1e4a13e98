"""What a layer with experts needs in a pass: sizes of its buffers, and the fields of its operations."""

from __future__ import annotations

from typing import NamedTuple

from kvboost_edge.kernels.linear.panel import COARSE_BYTES, SEED_BYTES
from kvboost_edge.kernels.linear.tiles import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.route import dispatch_numbers
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.experts import Experts

__all__ = ["MixtureSizes", "expert_fields", "route_fields"]


class MixtureSizes(NamedTuple):
    """Buffers of layers with experts.

    routed   floats in a row of the router's logits, padded to tiles
    numbers  of the dispatch before its slots
    spread   bytes of a slot's row of inputs, as codes or as floats; inner: of what its gate and up leave
    """

    used: int
    routed: int
    numbers: int
    spread: int
    inner: int

    @classmethod
    def of(cls, experts: Experts, hidden: int, *, floats: bool) -> MixtureSizes:
        """hidden: inputs of an expert, padded to groups. floats: whether their weights are."""
        rows = experts.count + (1 if experts.names.shared_gate else 0)
        each = 4 * GROUP if floats else COARSE_BYTES + SEED_BYTES
        spread, inner = (count // GROUP * each for count in (hidden, experts.width))
        return cls(experts.used, -(-rows // LANES) * LANES, dispatch_numbers(experts.count), spread, inner)


def expert_fields(experts: Experts) -> dict[int, int]:
    """Fields that every operation on experts has."""
    return {lt.F_EXPERTS: experts.count, lt.F_USED: experts.used}


def route_fields(experts: Experts, routed: int, bias: int) -> dict[int, int]:
    """Those of OP_ROUTE. routed: floats in a row of logits; bias: address of that of the choice, or 0."""
    how = {lt.F_SCORE: lt.SCORES[experts.score], lt.F_RENORM: lt.RENORMS[experts.renorm]}
    return {**expert_fields(experts), **how, lt.F_SRC_STEP: routed, lt.F_BIAS: bias}
