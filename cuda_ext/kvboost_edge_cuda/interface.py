"""The three functions, with flash-attn's names and order of arguments.

What differs from flash-attn 2: blocks of a paged cache may be any multiple of 16 tokens, and
head_dim any multiple of 8 up to 256; `sinks` and `check_values` are added as keywords, and
`return_softmax_lse` where flash-attn has none. There is no backward pass. An argument that is not
supported raises NotImplementedError by its name.

A query i sees key j where -left <= j - (i + seqlen_k - seqlen_q) <= right: the mask is aligned
bottom right, so with causal=True, 2 queries and 5 keys it is

    1 1 1 1 0
    1 1 1 1 1

and with 5 queries and 2 keys

    0 0
    0 0
    0 0
    1 0
    1 1

A query that sees no key gives 0, and lse -inf (or the logit of its sink).
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
    """Constants of the scores, as params.cuh has them: bounds of the window, -1 for none."""

    softmax_scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0


class Indices(NamedTuple):
    """Index tensors of a call on its device, checked; None for what the call is without."""

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
    """Attention of sequences of one length.

    q        [batch, seqlen_q, num_q_heads, head_dim], float16 or (from sm_80) bfloat16
    k, v     [batch, seqlen_k, num_kv_heads, head_dim]; num_kv_heads divides num_q_heads
    sinks    float32 [num_q_heads]: one logit more in each softmax's denominator, without a value
    returns  out like q; with return_softmax_lse also the natural log of the sum of exp(scores),
             sinks included, float32 [batch, num_q_heads, seqlen_q]

    `deterministic` changes nothing: the forward pass always is. Raises NotImplementedError for
    dropout_p, alibi_slopes and return_attn_probs, and where a gradient is wanted.
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
    """Attention of sequences of many lengths, one after another in q, and in k and v or by blocks.

    q             [total_q, num_q_heads, head_dim]
    k, v          [total_k, num_kv_heads, head_dim], or [num_blocks, block_size, num_kv_heads,
                  head_dim]
    cu_seqlens_q  int32 [batch + 1]: first row of each sequence in q, then total_q; cu_seqlens_k
                  likewise
    block_table   int32 [batch, max_blocks]: the blocks of each sequence in order
    returns       out like q; with return_softmax_lse also lse, float32 [num_q_heads, total_q]

    Otherwise as `flash_attn_func`. ValueError for index tensors that do not fit, and, unless
    check_values=False, for values in them that do not (lengths beyond max_seqlen_*, rows or blocks
    that are not there).
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
    """Attention over a cache that may be longer than what it holds, after new keys and values were
    put into it.

    q                 [batch, seqlen_q, num_q_heads, head_dim]
    k_cache, v_cache  [batch_cache, seqlen_cache, num_kv_heads, head_dim], or with block_table
                      [num_blocks, block_size, num_kv_heads, head_dim]
    k, v              [batch, seqlen_new, num_kv_heads, head_dim]: written to the cache, in place,
                      behind cache_seqlens
    cache_seqlens     int, or int32 [batch]: keys in the cache before the new ones; None: all of it
    cache_batch_idx   int32 [batch]: the sequence's row in the cache
    num_splits        parts that the keys are cut into; 0: chosen here
    returns           out like q; with return_softmax_lse also lse, float32 [batch, num_q_heads,
                      seqlen_q]

    Otherwise as `flash_attn_varlen_func`. Raises NotImplementedError for rotary_cos, rotary_sin
    (rotate before), cache_leftpad and alibi_slopes; `rotary_interleaved` has no meaning without
    them.
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
    """Where the sequences of a call lie in a cache."""

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
    """Check the cache's indices, write new keys and values; the lengths after that, None where the
    cache is full.
    """
    if (k is None) != (v is None):
        raise ValueError("k and v are given together or not at all")
    if cache.block_table is not None and cache.batch_idx is not None:
        raise ValueError(
            "block_table says where sequences lie; cache_batch_idx cannot be given with it"
        )
    num_new = 0 if k is None else k.shape[1]
    if k is not None and cache.seqlens is None:
        raise ValueError("k and v are written behind cache_seqlens, which is not given")
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
            f"the cache has {rows} sequences, q has {batch}; cache_batch_idx says which are meant"
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
    """int64 [batch, num_new]: where the new keys go, in a pool of blocks of `size` tokens."""
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
    """Causal attention of ragged sequences over blocks, for callers that have checked what the
    index tensors hold.

    q                 [total_q, num_q_heads, head_dim]
    k_cache, v_cache  [num_blocks, block_size, num_kv_heads, head_dim]
    seqused_k         int32 [batch]: keys of each sequence, those of its queries included
    window            a query at position p sees keys at (p - window, p]; 0: all up to p
    returns           (out like q, lse float32 [num_q_heads, total_q])

    Not one value is read before the launch, so nothing waits for the device: lengths and block ids
    that do not fit read memory that is not the pool's.
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
    """Allocate and launch: (out like q, lse float32 [batch, heads, seqlen_q], or [heads, total_q]
    for a flat q). The indices are taken as they are; the operator checks every tensor's shape,
    dtype, device, strides and alignment.
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
    """CTAs of a launch without splits, as params.cuh cuts the rows."""
    packed = longest_q * (num_q_heads // max(1, num_kv_heads))
    rows = _DECODE_ROWS if packed <= _DECODE_ROWS else 4 * _DECODE_ROWS
    return math.ceil(packed / rows) * num_kv_heads * num_seqs


def _check_dims(**tensors: tuple[torch.Tensor, int]) -> None:
    for name, (tensor, dims) in tensors.items():
        if tensor.dim() != dims:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must have {dims} dimensions")
        if tensor.shape[-1] % 8 or tensor.shape[-1] > 256:
            raise NotImplementedError(
                f"kvboost_edge_cuda does not do head_dim={tensor.shape[-1]}; it must be a multiple "
                "of 8 up to 256"
            )
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(
                f"kvboost_edge_cuda does not do {name} in {tensor.dtype}, but float16 and bfloat16"
            )


def _check_device(q: torch.Tensor) -> None:
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
    left, right = (max(-1, int(side)) for side in window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return Mask(float(scale), left, 0 if causal else right, float(softcap))


def _contiguous(index: torch.Tensor | None) -> torch.Tensor | None:
    return None if index is None else index.contiguous()
