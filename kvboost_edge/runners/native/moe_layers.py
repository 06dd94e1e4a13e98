"""Emission of mixture-of-experts layers."""

from __future__ import annotations

from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.table import BufferRows, ExpertCounts
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.families.moe import Experts
from kvboost_edge.runners.native.buffer_sizes import MixtureSizes
from kvboost_edge.runners.native.emitter import ACTIVATIONS, MAX_TILES, Emitter

__all__ = ["emit_mixture", "emit_mixture_beside"]


def emit_mixture(out: Emitter, layer: str, experts: Experts) -> None:
    """Emit experts that replace the MLP."""
    # The norm's output is read by the router as floats, and by a shared expert in quantized form.
    router = f"{layer}router"
    out.norm(f"{layer}mlp_in", f"{layer}{out.spec.family.way_in}" if experts.shared else router)
    routed = BufferRows(lt.B_ROUTED, _sizes(out).routed)
    out.linear(router, out.normed, routed)
    _route(out, layer, experts)
    _all_experts(out, layer, experts, out.hidden, add=True)
    if experts.shared and not experts.names.shared_gate:
        out.gated(layer, out.normed, experts.shared, 1.0)
    elif experts.shared:
        _shared_by_gate(out, layer, experts, routed._replace(first=experts.count))


def emit_mixture_beside(
    out: Emitter, layer: str, experts: Experts, inner: int, sum_factor: float
) -> None:
    """Emit experts in parallel to an MLP with `inner` channels.

    The MLP and the experts read the hidden state through separate norms, and each output is normed.
    Their sum is normed again and added to the hidden state, which is then multiplied by
    `sum_factor`.
    """
    spec = out.spec
    size = spec.hidden_size
    beside = BufferRows(lt.B_BESIDE, _sizes(out).parallel_mlp)
    out.norm(f"{layer}mlp_in", f"{layer}gate_up")
    out.linear(f"{layer}down", out.inner(layer, out.normed, inner), out.projected, panel=lt.B_INNER)
    norm = out.packed.address(f"{layer}beside_out")
    out.ops.append(lt.NormOp(out.projected, beside, size, norm, spec.eps))
    out.norm(f"{layer}router_in", f"{layer}router")
    routed = BufferRows(lt.B_ROUTED, _sizes(out).routed)
    out.linear(f"{layer}router", out.normed, routed, factor=size**-0.5)
    _route(out, layer, experts)
    # The router has a float format, so this norm does not quantize. `SpreadOp` quantizes the rows.
    out.norm(f"{layer}experts_in", f"{layer}router")
    _all_experts(out, layer, experts, out.projected, add=False)
    norm = out.packed.address(f"{layer}experts_out")
    out.ops.append(lt.AddNormOp(out.projected, beside, size, norm, spec.eps))
    norm = out.packed.address(f"{layer}mlp_out")
    out.ops.append(lt.AddNormOp(beside, out.hidden, size, norm, spec.eps, sum_factor=sum_factor))


def _sizes(out: Emitter) -> MixtureSizes:
    assert out.sizes.mixture is not None
    return out.sizes.mixture


def _route(out: Emitter, layer: str, experts: Experts) -> None:
    """Emit the operations that turn router logits into a list of tokens for each expert."""
    counts = ExpertCounts(experts.count, experts.used)
    out.ops.append(
        lt.RouteOp(
            counts,
            _sizes(out).routed,
            lt.SCORES[experts.score],
            lt.RENORMS[experts.renorm],
            out.packed.address(f"{layer}choice"),
            out.packed.address(f"{layer}shares"),
            experts.eps,
            experts.scale,
            experts.groups,
            experts.used_groups,
        )
    )
    out.ops.append(lt.DispatchOp(counts))


def _all_experts(out: Emitter, layer: str, experts: Experts, to: BufferRows, *, add: bool) -> None:
    """Emit all experts, which read B_NORMED.

    Their weighted sum is stored in `to` or, with `add`, added to it.
    """
    spec = out.spec
    size = spec.hidden_size
    counts = ExpertCounts(experts.count, experts.used)
    way_in = f"{layer}experts_{spec.family.way_in}"
    down = f"{layer}experts_down"
    out.ops.append(lt.SpreadOp(counts, out.normed, size, out.read_by(way_in)))
    runs = experts.width // GROUP
    matrix = out.matrix(way_in, runs, runs * experts.used, lt.B_SPREAD)
    act = ACTIVATIONS[experts.activation or spec.activation]
    inner = lt.InnerChannels(experts.width, act, out.read_by(down))
    out.ops.append(lt.ExpertsGatedOp(counts, matrix, inner, out.normed.step))
    matrix = out.matrix(down, MAX_TILES, size // LANES, lt.B_EXPERTS_INNER)
    out.ops.append(lt.ExpertsDownOp(counts, matrix, to, size, int(add), spec.residual_factor))


def _shared_by_gate(out: Emitter, layer: str, experts: Experts, gate: BufferRows) -> None:
    """Emit the shared expert, multiplied by the sigmoid of the router's last output."""
    rows = out.inner(layer, out.normed, experts.shared)
    out.linear(f"{layer}down", rows, out.projected, panel=lt.B_INNER)
    size = out.spec.hidden_size
    factor = out.spec.residual_factor
    out.ops.append(lt.AddSharedOp(out.projected, out.hidden, gate, size, factor))
