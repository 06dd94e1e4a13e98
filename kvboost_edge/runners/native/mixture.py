"""A layer's mixture of experts as operations."""

from __future__ import annotations

from kvboost_edge.kernels.linear.tiles import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.experts import Experts
from kvboost_edge.runners.native.emitter import ACTIVATIONS, MAX_TILES, Emitter

__all__ = ["emit_mixture"]


def emit_mixture(out: Emitter, layer: str, experts: Experts) -> None:
    """Operations of experts in the place of the MLP. Their norm stands before them alone."""
    spec, sizes, mixture = out.spec, out.sizes, out.sizes.mixture
    assert mixture is not None
    normed, hidden = (lt.B_NORMED, sizes.hidden), (lt.B_HIDDEN, sizes.hidden)
    router, gate_up, down = (f"{layer}{name}" for name in ("router", "experts_gate_up", "experts_down"))
    # Floats for the router, and codes for the expert that all share, where there is one.
    out.norm(f"{layer}mlp_in", f"{layer}gate_up" if experts.shared else router)
    out.linear(router, normed, (lt.B_ROUTED, mixture.routed))
    fields = _route_fields(experts, mixture.routed, out.packed.address(f"{layer}choice"))
    out.add(lt.OP_ROUTE, fields, factor=experts.scale, eps=experts.eps)
    each, step = _expert_fields(experts), {lt.F_SRC_STEP: sizes.hidden, lt.F_DST_STEP: experts.width}
    out.add(lt.OP_DISPATCH, each)
    quant = {lt.F_QUANT: out.kind(gate_up) if out.is_quantized(gate_up) else 0}
    spread = {lt.F_SRC: normed[0], lt.F_SRC_STEP: normed[1], lt.F_DST_STEP: sizes.hidden, **quant}
    out.add(lt.OP_SPREAD, {**each, **spread, lt.F_COUNT: spec.hidden_size})
    runs = experts.width // GROUP
    weights = out.weights(gate_up, runs, runs * experts.used, lt.B_SPREAD)
    act = {lt.F_COUNT: experts.width, lt.F_ACT: ACTIVATIONS[experts.activation or spec.activation]}
    act[lt.F_BIAS] = out.packed.address(f"{gate_up}_bias")
    quant = {lt.F_QUANT: out.kind(down) if out.is_quantized(down) else 0}
    out.add(lt.OP_EXPERTS_GATED, {**each, **weights, **act, **step, **quant})
    weights = out.weights(down, MAX_TILES, spec.hidden_size // LANES, lt.B_EXPERTS_INNER)
    into = {lt.F_DST: hidden[0], lt.F_DST_STEP: hidden[1], lt.F_SRC_STEP: experts.width}
    out.add(
        lt.OP_EXPERTS_DOWN,
        {**each, **weights, **into, lt.F_COUNT: spec.hidden_size, lt.F_BIAS: out.packed.address(f"{down}_bias")},
        factor=spec.residual_factor,
    )
    if experts.shared and not experts.names.shared_gate:
        out.gated(layer, normed, experts.shared, 1.0)
    elif experts.shared:
        _shared_by_gate(out, layer, experts, mixture.routed)


def _shared_by_gate(out: Emitter, layer: str, experts: Experts, routed: int) -> None:
    """The shared expert times the sigmoid of the router's last number."""
    hidden, wide = (lt.B_HIDDEN, out.sizes.hidden), (lt.B_WIDE, out.sizes.wide)
    rows = out.inner(layer, (lt.B_NORMED, out.sizes.hidden), experts.shared)
    out.linear(f"{layer}down", rows, wide, panel=lt.B_INNER)
    steps = {lt.F_SRC: wide[0], lt.F_SRC_STEP: wide[1], lt.F_DST: hidden[0], lt.F_DST_STEP: hidden[1]}
    by = {lt.F_BY: lt.B_ROUTED, lt.F_BY_STEP: routed, lt.F_BY_FIRST: experts.count}
    count = {lt.F_COUNT: out.spec.hidden_size}
    out.add(lt.OP_ADD_SHARED, {**steps, **by, **count}, factor=out.spec.residual_factor)


def _expert_fields(experts: Experts) -> dict[int, int]:
    """Fields that every operation on experts has."""
    return {lt.F_EXPERTS: experts.count, lt.F_USED: experts.used}


def _route_fields(experts: Experts, routed: int, bias: int) -> dict[int, int]:
    """Those of OP_ROUTE. routed: floats in a row of logits; bias: address of that of the choice, or 0."""
    how = {lt.F_SCORE: lt.SCORES[experts.score], lt.F_RENORM: lt.RENORMS[experts.renorm]}
    return {**_expert_fields(experts), **how, lt.F_SRC_STEP: routed, lt.F_BIAS: bias}
