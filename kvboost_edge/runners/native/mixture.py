"""A layer's mixture of experts as operations."""

from __future__ import annotations

from kvboost_edge.kernels.linear.weight_tiles import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.families.moe import Experts
from kvboost_edge.runners.native.emitter import ACTIVATIONS, MAX_TILES, Emitter, Rows
from kvboost_edge.runners.native.sizes import MixtureSizes

__all__ = ["emit_mixture", "emit_mixture_beside"]


def emit_mixture(out: Emitter, layer: str, experts: Experts) -> None:
    """Operations of experts in the place of the MLP. Their norm stands before them alone."""
    normed = (lt.B_NORMED, out.sizes.hidden)
    mixture = _sizes(out)
    router = f"{layer}router"
    # Floats for the router, and codes for the expert that all share, where there is one.
    out.norm(f"{layer}mlp_in", f"{layer}{out.spec.family.way_in}" if experts.shared else router)
    out.linear(router, normed, (lt.B_ROUTED, mixture.routed))
    _route(out, layer, experts)
    _all_experts(out, layer, experts, (lt.B_HIDDEN, out.sizes.hidden), add=True)
    if experts.shared and not experts.names.shared_gate:
        out.gated(layer, normed, experts.shared, 1.0)
    elif experts.shared:
        _shared_by_gate(out, layer, experts, mixture.routed)


def emit_mixture_beside(
    out: Emitter, layer: str, experts: Experts, inner: int, sum_factor: float
) -> None:
    """Operations of experts and of an MLP of `inner` channels: both read the hidden state through
    norms of their own, and the norm of the sum of their norms is added to it, which is then
    multiplied with `sum_factor`.
    """
    spec = out.spec
    sizes = out.sizes
    normed = (lt.B_NORMED, sizes.hidden)
    hidden = (lt.B_HIDDEN, sizes.hidden)
    wide = (lt.B_WIDE, sizes.wide)
    beside = (lt.B_BESIDE, _sizes(out).beside)
    out.norm(f"{layer}mlp_in", f"{layer}gate_up")
    out.linear(f"{layer}down", out.inner(layer, normed, inner), wide, panel=lt.B_INNER)
    count = {lt.F_COUNT: spec.hidden_size}
    fields = {
        **_from_to(wide, beside),
        **count,
        lt.F_WEIGHT: out.packed.address(f"{layer}beside_out"),
    }
    out.add(lt.OP_NORM, fields, eps=spec.eps)
    out.norm(f"{layer}router_in", f"{layer}router")
    out.linear(
        f"{layer}router", normed, (lt.B_ROUTED, _sizes(out).routed), factor=spec.hidden_size**-0.5
    )
    _route(out, layer, experts)
    out.norm(
        f"{layer}experts_in", f"{layer}router"
    )  # floats: their codes are made where they are spread
    _all_experts(out, layer, experts, wide, add=False)
    for source, to, norm, factor in (
        (wide, beside, "experts_out", 1.0),
        (beside, hidden, "mlp_out", sum_factor),
    ):
        fields = {
            **_from_to(source, to),
            **count,
            lt.F_WEIGHT: out.packed.address(f"{layer}{norm}"),
        }
        out.add(lt.OP_ADD_NORM, fields, eps=spec.eps, sum_factor=factor)


def _sizes(out: Emitter) -> MixtureSizes:
    assert out.sizes.mixture is not None
    return out.sizes.mixture


def _from_to(source: Rows, to: Rows) -> dict[int, int]:
    return {lt.F_SRC: source[0], lt.F_SRC_STEP: source[1], lt.F_DST: to[0], lt.F_DST_STEP: to[1]}


def _route(out: Emitter, layer: str, experts: Experts) -> None:
    """From the router's logits to each expert's tokens."""
    how = {lt.F_SCORE: lt.SCORES[experts.score], lt.F_RENORM: lt.RENORMS[experts.renorm]}
    places = {
        lt.F_BIAS: out.packed.address(f"{layer}choice"),
        lt.F_SCALE: out.packed.address(f"{layer}shares"),
    }
    fields = {**_each(experts), **how, **places, lt.F_SRC_STEP: _sizes(out).routed}
    out.add(lt.OP_ROUTE, fields, factor=experts.scale, eps=experts.eps)
    out.add(lt.OP_DISPATCH, _each(experts))


def _all_experts(out: Emitter, layer: str, experts: Experts, to: Rows, *, add: bool) -> None:
    """Each expert's tokens from B_NORMED through it, and their shares to `to`: added to what is
    there, or alone.
    """
    spec = out.spec
    sizes = out.sizes
    each = _each(experts)
    way_in = f"{layer}experts_{spec.family.way_in}"
    down = f"{layer}experts_down"
    step = {lt.F_SRC_STEP: sizes.hidden, lt.F_DST_STEP: experts.width}
    quant = {lt.F_QUANT: out.kind(way_in) if out.is_quantized(way_in) else 0}
    spread = {
        lt.F_SRC: lt.B_NORMED,
        lt.F_SRC_STEP: sizes.hidden,
        lt.F_DST_STEP: sizes.hidden,
        **quant,
    }
    out.add(lt.OP_SPREAD, {**each, **spread, lt.F_COUNT: spec.hidden_size})
    runs = experts.width // GROUP
    weights = out.weights(way_in, runs, runs * experts.used, lt.B_SPREAD)
    act = {lt.F_COUNT: experts.width, lt.F_ACT: ACTIVATIONS[experts.activation or spec.activation]}
    act[lt.F_BIAS] = out.packed.address(f"{way_in}_bias")
    quant = {lt.F_QUANT: out.kind(down) if out.is_quantized(down) else 0}
    out.add(lt.OP_EXPERTS_GATED, {**each, **weights, **act, **step, **quant})
    weights = out.weights(down, MAX_TILES, spec.hidden_size // LANES, lt.B_EXPERTS_INNER)
    into = {lt.F_DST: to[0], lt.F_DST_STEP: to[1], lt.F_SRC_STEP: experts.width, lt.F_ADD: int(add)}
    out.add(
        lt.OP_EXPERTS_DOWN,
        {
            **each,
            **weights,
            **into,
            lt.F_COUNT: spec.hidden_size,
            lt.F_BIAS: out.packed.address(f"{down}_bias"),
        },
        factor=spec.residual_factor,
    )


def _shared_by_gate(out: Emitter, layer: str, experts: Experts, routed: int) -> None:
    """The shared expert times the sigmoid of the router's last number."""
    hidden = (lt.B_HIDDEN, out.sizes.hidden)
    wide = (lt.B_WIDE, out.sizes.wide)
    rows = out.inner(layer, (lt.B_NORMED, out.sizes.hidden), experts.shared)
    out.linear(f"{layer}down", rows, wide, panel=lt.B_INNER)
    steps = {
        lt.F_SRC: wide[0],
        lt.F_SRC_STEP: wide[1],
        lt.F_DST: hidden[0],
        lt.F_DST_STEP: hidden[1],
    }
    by = {lt.F_BY: lt.B_ROUTED, lt.F_BY_STEP: routed, lt.F_BY_FIRST: experts.count}
    count = {lt.F_COUNT: out.spec.hidden_size}
    out.add(lt.OP_ADD_SHARED, {**steps, **by, **count}, factor=out.spec.residual_factor)


def _each(experts: Experts) -> dict[int, int]:
    """Fields that every operation on experts has."""
    return {lt.F_EXPERTS: experts.count, lt.F_USED: experts.used}
