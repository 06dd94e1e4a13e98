"""Masked attention of a group of sequences, with operations that work on CPU, CUDA and MPS.

torch's scaled_dot_product_attention is not used. On MPS it was wrong for strided inputs (torch
#181133), attended to later tokens with is_causal (#195910), and read out of bounds with grouped
heads (#174861). The mask is always explicit. It replaces scores instead of adding minus infinity,
because unwritten slots may be NaN. Inputs of matrix products are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvboost_edge.backends.base import AttentionParams
from kvboost_edge.backends.torch.padded_groups import SameLength

__all__ = ["attend", "query_slices", "visible_slots"]

# Most float32 scores held at once. On the CPU, they should fit in the cache.
_MAX_SCORES = {"cpu": 1 << 20}
_MAX_SCORES_ELSEWHERE = 1 << 26


def query_slices(group: SameLength, num_q_heads: int) -> Iterator[slice]:
    """Split the query rows of a group so that each slice has a limited number of scores."""
    per_query = group.k_positions.numel() * num_q_heads
    step = max(1, _MAX_SCORES.get(group.rows.device.type, _MAX_SCORES_ELSEWHERE) // per_query)
    for start in range(0, group.q_len, step):
        yield slice(start, min(start + step, group.q_len))


def visible_slots(group: SameLength, chosen: slice, window: int) -> torch.Tensor:
    """Return a mask of the slots that each chosen query sees, bool [num_seqs, q, num_slots].

    In a quantized pool, a query sees its own block in a buffer, and earlier blocks as codes.
    """
    queries = group.q_positions[:, chosen, None]
    keys = group.k_positions[:, None, :]
    visible = group.k_valid[:, None, :] & (keys <= queries)
    if group.k_own is not None and group.q_starts is not None:
        visible = visible & ((keys >= group.q_starts[:, chosen, None]) == group.k_own)
    return visible & (keys > queries - window) if window else visible


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    params: AttentionParams,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute masked attention of padded sequences in float32.

    Args:
        queries: [s, q, num_q_heads, d].
        keys: float32 [s, num_kv_heads, k, d].
        values: float32 [s, num_kv_heads, k, d].
        visible: bool [s, q, k]. Every query sees at least its own key.
        params: Constants of the layer.
        sinks: [num_q_heads], or None.

    Returns:
        The float32 output, shaped like the queries, and lse, float32 [s, q, num_q_heads].
    """
    num_seqs, q_len, num_q_heads, _ = queries.shape
    num_kv_heads = keys.shape[1]
    per_kv = num_q_heads // keys.shape[1]
    grouped = (queries.float() * params.softmax_scale).view(
        num_seqs, q_len, num_kv_heads, per_kv, -1
    )
    scores = _product(grouped.permute(0, 2, 3, 1, 4).flatten(2, 3), keys.transpose(2, 3))
    if params.softcap:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    split = scores.view(num_seqs, num_kv_heads, per_kv, q_len, -1)
    split.masked_fill_(~visible[:, None, None], float("-inf"))
    top = split.amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.view(num_kv_heads, per_kv, 1, 1)
        top = torch.maximum(top, sinks)
    weights = split.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total += torch.exp(sinks - top)
    out = (
        _product(weights.flatten(2, 3), values).view(num_seqs, num_kv_heads, per_kv, q_len, -1)
        / total
    )
    lse = (top + total.log()).squeeze(-1)
    shape = (num_seqs, q_len, num_q_heads)
    return out.permute(0, 3, 1, 2, 4).reshape(*shape, -1), lse.permute(0, 3, 1, 2).reshape(shape)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right."""
    # On MPS, inputs must be contiguous. Elsewhere the product packs them itself.
    if left.device.type == "mps":
        left = left.contiguous()
        right = right.contiguous()
    return left @ right
