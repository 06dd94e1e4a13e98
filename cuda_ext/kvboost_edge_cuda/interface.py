"""flash-attn's functions with the same names and argument order, and `paged_attention`.

Differences from flash-attn 2: blocks of a paged cache may hold any multiple of 16 tokens, and
head_dim may be any multiple of 8 up to 256. The keywords `sinks`, `check_values` and, where
flash-attn lacks it, `return_softmax_lse` are added. There is no backward pass. An unsupported
argument raises NotImplementedError with its name.

Query i sees key j if -left <= j - (i + seqlen_k - seqlen_q) <= right, so the mask is aligned to the
bottom right. With causal=True, it looks like this for 2 queries and 5 keys (left) and for 5 queries
and 2 keys (right):

    1 1 1 1 0        0 0
    1 1 1 1 1        0 0
                     0 0
                     1 0
                     1 1

A query that sees no key returns 0, and lse -inf (or the logit of its sink).
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch

from kvboost_edge_cuda.checks import IndexChecks, refuse_gradients, refuse_unsupported
from kvboost_edge_cuda.library import operators
from kvboost_edge_cuda.splits import choose_num_splits
from kvboost_edge_cuda.tensors import aligned, current_stream

__all__ = [
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "paged_attention",
]

Out: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_OLDEST = (7, 0)
_OLDEST_BF16 = (8, 0)
_DECODE_ROWS = 16


class Mask(NamedTuple):
    """Scale and mask of the scores, as in params.cuh.

    Attributes:
        softmax_scale: factor of the products of queries and keys.
        left: number of visible keys before the diagonal, or -1 for all.
        right: number of visible keys after the diagonal, or -1 for all.
        softcap: softcap of scores, or 0 for none.
    """

    softmax_scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0


class Indices(NamedTuple):
    """Checked index tensors of a call, on its device; None where the call has no such tensor."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Out:
    """Compute attention of sequences of equal length.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim], float16 or (from sm_80) bfloat16.
        k: [batch, seqlen_k, num_kv_heads, head_dim]; num_kv_heads divides num_q_heads.
        v: like `k`.
        dropout_p: not supported.
        softmax_scale: factor of scores; None uses head_dim ** -0.5.
        causal: True sets the window's right side to 0.
        window_size: (left, right) in keys; -1 is unbounded.
        softcap: scores become softcap * tanh(score / softcap); 0 disables it.
        alibi_slopes: not supported.
        deterministic: ignored, because the forward pass is always deterministic.
        return_attn_probs: not supported.
        sinks: float32 [num_q_heads], an additional logit in each softmax's denominator, without a
            value.
        return_softmax_lse: True also returns lse.

    Returns:
        out like `q`; with return_softmax_lse (out, lse). lse is the natural log of the sum of
            exp(scores), including sinks, float32 [batch, num_q_heads, seqlen_q].

    Raises:
        NotImplementedError: an unsupported argument is set, or a gradient is required.
    """
    name = "flash_attn_func"
    refuse_unsupported(
        name, dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs
    )
    refuse_gradients(name, q, k, v)
    _check_dims(q=(q, 4), k=(k, 4), v=(v, 4))
    mask = _mask(q, softmax_scale, causal, window_size, softcap)
    out, lse = _launch(
        aligned(q), aligned(k), aligned(v), Indices(), mask, max_seqlen_k=k.shape[1], sinks=sinks
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    check_values: bool = True,
) -> Out:
    """Compute attention of concatenated sequences of different lengths; k and v may be paged.

    Other arguments are the same as in `flash_attn_func`.

    Args:
        q: [total_q, num_q_heads, head_dim].
        k: [total_k, num_kv_heads, head_dim], or [num_blocks, block_size, num_kv_heads, head_dim].
        v: like `k`.
        cu_seqlens_q: int32 [batch + 1], first row of each sequence in q, then total_q.
        cu_seqlens_k: int32 [batch + 1], first row of each sequence in k, then total_k.
        max_seqlen_q: upper bound of query lengths.
        max_seqlen_k: upper bound of key lengths.
        block_table: int32 [batch, max_blocks], blocks of each sequence in order.
        check_values: False skips the checks of index values, which synchronize with the device.

    Returns:
        out like `q`; with return_softmax_lse (out, lse), lse float32 [num_q_heads, total_q].

    Raises:
        ValueError: index tensors have a wrong dtype, shape or value.
        NotImplementedError: an unsupported argument is set, or a gradient is required.
    """
    name = "flash_attn_varlen_func"
    refuse_unsupported(
        name, dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs
    )
    refuse_gradients(name, q, k, v)
    paged = block_table is not None
    _check_dims(q=(q, 3), k=(k, 4 if paged else 3), v=(v, 4 if paged else 3))
    batch = cu_seqlens_q.numel() - 1
    checks = IndexChecks(check_values=check_values)
    checks.index("cu_seqlens_q", cu_seqlens_q, (-1,))
    checks.index("cu_seqlens_k", cu_seqlens_k, (batch + 1,))
    checks.cumulative("cu_seqlens_q", cu_seqlens_q, len(q), max_seqlen_q)
    checks.cumulative("cu_seqlens_k", cu_seqlens_k, None if paged else len(k), max_seqlen_k)
    if block_table is not None:
        checks.index("block_table", block_table, (batch, -1))
        checks.table("block_table", block_table, cu_seqlens_k.diff(), k.shape[1], k.shape[0])
    checks.raise_first()
    mask = _mask(q, softmax_scale, causal, window_size, softcap)
    indices = Indices(*map(_contiguous, (cu_seqlens_q, cu_seqlens_k, None, block_table)))
    keys, values = (k, v) if paged else (aligned(k), aligned(v))
    out, lse = _launch(
        aligned(q),
        keys,
        values,
        indices,
        mask,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        sinks=sinks,
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    check_values: bool = True,
) -> Out:
    """Append new KV to a KV cache, then compute attention over the cache.

    Other arguments are the same as in `flash_attn_varlen_func`.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k_cache: [batch_cache, seqlen_cache, num_kv_heads, head_dim], or with block_table
            [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: like `k_cache`.
        k: [batch, seqlen_new, num_kv_heads, head_dim], written to the cache after cache_seqlens.
        v: like `k`.
        rotary_cos: not supported; apply RoPE before the call.
        rotary_sin: not supported.
        cache_seqlens: int, or int32 [batch]: number of keys in the cache before the new keys. None
            uses the whole cache.
        cache_batch_idx: int32 [batch], row of each sequence in the cache.
        cache_leftpad: not supported.
        rotary_interleaved: ignored.
        num_splits: number of parts that the keys are split into; 0 chooses it automatically.

    Returns:
        out like `q`; with return_softmax_lse (out, lse), lse float32 [batch, num_q_heads,
            seqlen_q].

    Raises:
        ValueError: index tensors have a wrong dtype, shape or value.
        NotImplementedError: an unsupported argument is set, or a gradient is required.
    """
    name = "flash_attn_with_kvcache"
    refuse_unsupported(
        name,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    refuse_gradients(name, q, k_cache, v_cache, k, v)
    _check_dims(q=(q, 4), k_cache=(k_cache, 4), v_cache=(v_cache, 4))
    if num_splits < 0:
        raise ValueError(f"num_splits={num_splits} must be at least 0")
    seqused = _append(
        k,
        v,
        k_cache,
        v_cache,
        _Cache(cache_seqlens, cache_batch_idx, block_table),
        len(q),
        check_values,
    )
    longest = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    mask = _mask(q, softmax_scale, causal, window_size, softcap)
    indices = Indices(None, None, seqused, *map(_contiguous, (block_table, cache_batch_idx)))
    out, lse = _launch(
        aligned(q),
        k_cache,
        v_cache,
        indices,
        mask,
        max_seqlen_k=longest,
        sinks=sinks,
        num_splits=num_splits,
    )
    return (out, lse) if return_softmax_lse else out


class _Cache(NamedTuple):
    """Location of a call's sequences in a cache."""

    seqlens: int | torch.Tensor | None
    batch_idx: torch.Tensor | None
    block_table: torch.Tensor | None


def _append(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache: _Cache,
    batch: int,
    check_values: bool,
) -> torch.Tensor | None:
    """Check the cache's indices and append new KV; return the new lengths.

    Returns None if the whole cache is used.
    """
    if (k is None) != (v is None):
        raise ValueError("k and v must be passed together")
    if cache.block_table is not None and cache.batch_idx is not None:
        raise ValueError(
            "cache_batch_idx cannot be combined with block_table; leave one of them out"
        )
    num_new = 0 if k is None else k.shape[1]
    if k is not None and cache.seqlens is None:
        raise ValueError("k and v are appended after cache_seqlens; pass cache_seqlens too")
    rows = k_cache.shape[0]
    size = k_cache.shape[1]
    device = k_cache.device
    checks = IndexChecks(check_values=check_values)
    seqlens = cache.seqlens
    if isinstance(seqlens, int):
        seqlens = torch.full((batch,), seqlens, dtype=torch.int32, device=device)
    lengths = None if seqlens is None else seqlens + num_new
    if seqlens is not None and lengths is not None:
        checks.index("cache_seqlens", seqlens, (batch,))
        room = size if cache.block_table is None else cache.block_table.shape[-1] * size
        checks.within("cache_seqlens", seqlens, 0, room - num_new)
    if cache.block_table is not None:
        checks.index("block_table", cache.block_table, (batch, -1))
        held = (
            torch.full((batch,), cache.block_table.shape[1] * size, device=device)
            if lengths is None
            else lengths
        )
        checks.table("block_table", cache.block_table, held, size, rows)
    if cache.batch_idx is not None:
        checks.index("cache_batch_idx", cache.batch_idx, (batch,))
        checks.within("cache_batch_idx", cache.batch_idx, 0, rows - 1)
    elif cache.block_table is None and rows != batch:
        raise ValueError(
            f"the cache has {rows} sequences, but q has {batch}; select them with cache_batch_idx"
        )
    checks.raise_first()
    if k is not None and v is not None and seqlens is not None:
        if k.dim() != 4 or len(k) != batch or k.shape != v.shape:
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [{batch}, seqlen_new, heads, "
                "dim]"
            )
        slots = _slots(seqlens, num_new, cache, size)
        flat = (aligned(k).flatten(0, 1), aligned(v).flatten(0, 1))
        operators().write_kv(*flat, k_cache, v_cache, slots.flatten(), current_stream(k))
    return None if lengths is None else lengths.contiguous()


def _slots(seqlens: torch.Tensor, num_new: int, cache: _Cache, size: int) -> torch.Tensor:
    """Return the slots of new keys, int64 [batch, num_new], for blocks of `size` tokens."""
    at = seqlens.long()[:, None] + torch.arange(num_new, device=seqlens.device)
    if cache.block_table is not None:
        return cache.block_table.long().gather(1, at // size) * size + at % size
    rows = (
        torch.arange(len(seqlens), device=seqlens.device)
        if cache.batch_idx is None
        else cache.batch_idx.long()
    )
    return rows[:, None] * size + at


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention of ragged sequences over blocks, without checking index values.

    No value is read before the launch, so the call does not synchronize with the device. Invalid
    lengths or block ids read memory outside the pool.

    Args:
        q: [total_q, num_q_heads, head_dim].
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim].
        v_cache: like `k_cache`.
        cu_seqlens_q: int32 [batch + 1].
        seqused_k: int32 [batch], number of keys of each sequence, including those of its queries.
        block_table: int32 [batch, max_blocks].
        max_seqlen_q: upper bound of query lengths.
        max_seqlen_k: upper bound of key lengths.
        softmax_scale: factor of scores.
        window: sliding window in tokens; a query at position p sees keys at (p - window, p]. 0 lets
            it see all keys up to p.
        softcap: softcap of scores; 0 disables it.
        sinks: float32 [num_q_heads], or None.

    Returns:
        (out, lse): like `q`, float32 [num_q_heads, total_q].
    """
    mask = Mask(softmax_scale, window - 1 if window else -1, 0, softcap)
    indices = Indices(cu_seqlens_q, None, seqused_k, block_table)
    sizes = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _launch(aligned(q), k_cache, v_cache, indices, mask, **sizes, sinks=sinks)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: Indices,
    mask: Mask,
    *,
    max_seqlen_k: int,
    max_seqlen_q: int | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results and launch the kernels, without checking index values.

    The operator checks the shape, dtype, device, strides and alignment of every tensor.

    Returns:
        (out, lse): like `q`, float32 [batch, heads, seqlen_q], or [heads, total_q] for a flat q.
    """
    _check_device(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    *batch, rows, heads, _ = q.shape
    lse = torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)
    longest = rows if max_seqlen_q is None else max_seqlen_q
    if num_splits == 0:
        num_seqs = batch[0] if indices.cu_seqlens_q is None else indices.cu_seqlens_q.numel() - 1
        num_splits = choose_num_splits(
            q.device, _num_ctas(longest, heads, k.shape[-2], num_seqs), max_seqlen_k
        )
    operators().attention(
        *(q, k, v, out, lse.transpose(-1, -2), *indices),
        *(None if sinks is None else sinks.float().contiguous(), longest, mask.left, mask.right),
        *(mask.softmax_scale, mask.softcap, num_splits, current_stream(q)),
    )
    return out, lse


def _num_ctas(longest_q: int, num_q_heads: int, num_kv_heads: int, num_seqs: int) -> int:
    """Return the number of CTAs of a launch without splits, with rows packed as in params.cuh."""
    packed = longest_q * (num_q_heads // max(1, num_kv_heads))
    rows = _DECODE_ROWS if packed <= _DECODE_ROWS else 4 * _DECODE_ROWS
    return math.ceil(packed / rows) * num_kv_heads * num_seqs


def _check_dims(**tensors: tuple[torch.Tensor, int]) -> None:
    """Raise unless the named tensors have valid dimensions, head_dim and dtype."""
    for name, (tensor, dims) in tensors.items():
        if tensor.dim() != dims:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must have {dims} dimensions")
        if tensor.shape[-1] % 8 or tensor.shape[-1] > 256:
            raise NotImplementedError(
                f"kvboost_edge_cuda does not support head_dim={tensor.shape[-1]}; it must be a "
                "multiple of 8 up to 256"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(
                f"kvboost_edge_cuda does not support {name} in {tensor.dtype}; use float16 or "
                "bfloat16"
            )


def _check_device(q: torch.Tensor) -> None:
    """Raise NotImplementedError if the GPU is too old for the dtype."""
    if q.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(q.device)
    needed = _OLDEST_BF16 if q.dtype == torch.bfloat16 else _OLDEST
    if capability < needed:
        raise NotImplementedError(
            f"{q.dtype} needs compute capability {needed[0]}.{needed[1]}; "
            f"{torch.cuda.get_device_name(q.device)} has {capability[0]}.{capability[1]}"
        )


def _mask(
    q: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Mask:
    """Return the scale and mask as FlashAttention defines them; -1 is an unbounded side."""
    left, right = (max(-1, int(side)) for side in window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Mask(float(scale), left, 0 if causal else right, float(softcap))


def _contiguous(index: torch.Tensor | None) -> torch.Tensor | None:
    return None if index is None else index.contiguous()
