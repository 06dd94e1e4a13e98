"""Quantized KV in plain NumPy: codes of a block, and attention over them.

Every step that determines a code is computed in float32 in the kernels' order, so codes and integer
sums equal those of the kernels. A query's own block is added in float64, so results can differ in
the last bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ConfigError
from kvboost_edge.kernels.attention.paged import (
    LOG2_E,
    PARTITION,
    AttentionOptions,
    Floats,
    KVPool,
    OwnBlocks,
    PagedBatch,
    QueryRotation,
)
from kvboost_edge.kernels.quantized_kv.code_layout import STEP_BIAS, CodeLayout
from kvboost_edge.kernels.reference.floats import exp2_f32, exp_f32, fma_f32
from kvboost_edge.kernels.reference.rope import rotate_heads
from kvboost_edge.segments import Segment, valid_to

__all__ = ["decode_block", "paged_attention_coded", "quantize_blocks"]

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

F32 = np.float32
TILE = 64
Q_TOP = F32(32512.0)  # 127 * 256, so a query's integers fit in two signed bytes
TINY = F32(1e-30)
SCALE_FLOOR = F32(6e-8)
SCALE_SLACK = F32(1.0 + 2.0**-10)


def _pack(codes: npt.NDArray[Any], bits: int) -> Bytes:
    """Pack quads [quads, lanes, 4] into the flat bytes of a section."""
    wide = codes.astype(np.int64) & 0xFF
    if bits == 4:
        wide = wide[0::2] | (wide[1::2] << 4)
    return wide.astype(np.uint8).ravel()


def _unpack(section: Bytes, quads: int, lanes: int, bits: int) -> npt.NDArray[np.uint8]:
    if bits == 8:
        return section.reshape(quads, lanes, 4)
    both = section.reshape(quads // 2, lanes, 4)
    return np.stack([both & 15, both >> 4], axis=1).reshape(quads, lanes, 4)


def _steps(layout: CodeLayout, codes: Bytes) -> Floats:
    """Decode key steps from bytes to float32."""
    return ((codes.astype(np.uint32) + np.uint32((127 - STEP_BIAS) << 3)) << np.uint32(20)).view(
        F32
    )


def _quantize_keys(keys: Floats, layout: CodeLayout, out: Bytes) -> None:
    """Quantize the keys of one block and head, float32 [head_dim, block]."""
    top = F32(2**layout.k_bits - 1)
    low = keys.min(axis=1)
    high = keys.max(axis=1)
    broken = (keys * F32(0)).sum(axis=1)  # NaN where a key is not finite
    bits = np.maximum((high - low) / top, F32(2.0**-STEP_BIAS)).astype(F32).view(np.uint32)
    rounded = ((bits + np.uint32((1 << 20) - 1)) >> np.uint32(20)).astype(np.int64) - (
        (127 - STEP_BIAS) << 3
    )
    step_codes = np.zeros(layout.dim, np.uint8)
    step_codes[: layout.head_dim] = np.clip(rounded, 0, 255)
    zeros = np.zeros(layout.dim, np.float16)
    zeros[: layout.head_dim] = low + broken
    inverse = (F32(1) / _steps(layout, step_codes))[: layout.head_dim, None]
    codes = np.zeros((layout.dim, layout.block_size), np.int64)
    scaled = np.rint((keys - low[:, None]) * inverse)
    codes[: layout.head_dim] = np.clip(
        np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0), 0, top
    )
    quads = codes.reshape(-1, 4, layout.block_size).transpose(0, 2, 1)
    packed = _pack(quads, layout.k_bits)
    out[: packed.size] = packed
    out[layout.key_zeros :][: 2 * layout.dim] = zeros.view(np.uint8)
    out[layout.key_steps :][: layout.dim] = step_codes


def _quantize_values(values: Floats, layout: CodeLayout, out: Bytes) -> None:
    """Quantize the values of one block and head, float32 [block, head_dim]."""
    size = layout.block_size
    dim = layout.head_dim
    broken = (values * F32(0)).sum(axis=1)
    codes = np.zeros((size, layout.dim), np.int64)
    if layout.v_bits == 8:
        scales = fma_f32(np.abs(values).max(axis=1), SCALE_SLACK / F32(127), SCALE_FLOOR).astype(
            np.float16
        )
        inverse = F32(1) / scales.astype(F32)
        scaled = np.rint(values * inverse[:, None])
        codes[:, :dim] = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0), -127, 127)
    else:
        low = values.min(axis=1)
        high = values.max(axis=1)
        scales = fma_f32(high - low, SCALE_SLACK / F32(15), SCALE_FLOOR).astype(np.float16)
        middles = fma_f32(F32(8), scales.astype(F32), low).astype(np.float16)
        inverse = F32(1) / scales.astype(F32)
        scaled = np.rint((values - middles.astype(F32)[:, None]) * inverse[:, None])
        codes[:, :dim] = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0), -8, 7) + 8
        out[layout.value_middles :][: 2 * size] = middles.view(np.uint8)
    scales = (scales + broken).astype(np.float16)
    packed = _pack(codes.reshape(-1, 4, layout.dim).transpose(0, 2, 1), layout.v_bits)
    out[layout.values :][: packed.size] = packed
    out[layout.value_scales :][: 2 * size] = scales.view(np.uint8)


def quantize_blocks(
    own: KVPool, sources: Longs, codes: Bytes, targets: Longs, layout: CodeLayout
) -> None:
    """Quantize the float16 blocks `sources` of `own` into the blocks `targets` of `codes`.

    `codes` is uint8 [num_blocks, num_kv_heads, bytes].
    """
    with np.errstate(all="ignore"):
        for source, target in zip(sources, targets, strict=True):
            for head in range(codes.shape[1]):
                out = codes[target, head]
                out[:] = 0
                _quantize_keys(own.keys[source, head].astype(F32), layout, out)
                _quantize_values(own.values[source, head].astype(F32), layout, out)


class _Coded(NamedTuple):
    """Decoded sections of a block.

    Attributes:
        keys: key codes [dim, block].
        zeros: float32 [dim].
        steps: float32 [dim].
        values: value codes [block, dim].
        scales: float32 [block].
        middles: float32 [block].
    """

    keys: Longs
    zeros: Floats
    steps: Floats
    values: Longs
    scales: Floats
    middles: Floats


def _take_apart(stored: Bytes, layout: CodeLayout) -> _Coded:
    """Unpack the sections of one head's block, uint8 [bytes]."""
    dim = layout.dim
    size = layout.block_size

    def halves(start: int, count: int) -> Floats:
        return stored[start : start + 2 * count].view(np.float16).astype(F32)

    key_bytes, value_bytes = (dim * size * bits // 8 for bits in (layout.k_bits, layout.v_bits))
    keys = (
        _unpack(stored[:key_bytes], dim // 4, size, layout.k_bits)
        .transpose(0, 2, 1)
        .reshape(dim, size)
    )
    section = stored[layout.values : layout.values + value_bytes]
    values = _unpack(section, size // 4, dim, layout.v_bits).transpose(0, 2, 1).reshape(size, dim)
    signed = (
        values.view(np.int8).astype(np.int64) if layout.v_bits == 8 else values.astype(np.int64) - 8
    )
    middles = halves(layout.value_middles, size) if layout.v_bits == 4 else np.zeros(size, F32)
    return _Coded(
        keys.astype(np.int64),
        halves(layout.key_zeros, dim),
        _steps(layout, stored[layout.key_steps :][:dim]),
        signed,
        halves(layout.value_scales, size),
        middles,
    )


def decode_block(stored: Bytes, layout: CodeLayout) -> tuple[Doubles, Doubles]:
    """Return the keys and values that a block's codes represent, each float64 [block, head_dim]."""
    coded = _take_apart(stored, layout)
    keys = coded.zeros.astype(np.float64) + coded.keys.T * coded.steps.astype(np.float64)
    values = (
        coded.middles.astype(np.float64)[:, None]
        + coded.values * coded.scales.astype(np.float64)[:, None]
    )
    return keys[:, : layout.head_dim], values[:, : layout.head_dim]


def _reduce(lanes: Floats, combine: Any) -> Floats:
    """Reduce [..., 16] to [...] by repeatedly combining halves."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = combine(lanes[..., :half], lanes[..., half:])
    first: Floats = lanes[..., 0]
    return first


def _sum_tile(tile: Floats) -> Floats:
    """Sum [rows, 64] to [rows]: first the four strips in pairs, then the lanes."""
    strips = tile.reshape(*tile.shape[:-1], 4, 16)
    return _reduce(
        (strips[..., 0, :] + strips[..., 1, :]) + (strips[..., 2, :] + strips[..., 3, :]), np.add
    )


class _State(NamedTuple):
    """Softmax state before the final division, float32.

    Attributes:
        sums: [rows, dim].
        maxima: [rows].
        totals: [rows].
    """

    sums: Floats
    maxima: Floats
    totals: Floats


def _empty(rows: int, dim: int) -> _State:
    return _State(np.zeros((rows, dim), F32), np.full(rows, -np.inf, F32), np.zeros(rows, F32))


def _merge(merged: _State, state: _State) -> _State:
    top = np.maximum(merged.maxima, state.maxima)
    base = np.where(np.isneginf(top), F32(0), top)
    keep = exp2_f32(merged.maxima - base)
    add = exp2_f32(state.maxima - base)
    sums = fma_f32(state.sums, add[:, None], merged.sums * keep[:, None])
    return _State(sums, top, fma_f32(state.totals, add, merged.totals * keep))


class _Rows(NamedTuple):
    """Query rows of one token and KV head.

    Attributes:
        scaled: [rows, dim], multiplied by the softmax scale and log2(e), which makes scores
            logarithms to base 2.
        unit: [rows, dim], `scaled` divided to make the largest magnitude Q_TOP.
        step: [rows], the value in `scaled` that corresponds to 1 in `unit`.
    """

    scaled: Floats
    unit: Floats
    step: Floats


def _query_rows(query: Floats, scale: float, dim: int) -> _Rows:
    scaled = np.zeros((len(query), dim), F32)
    scaled[:, : query.shape[1]] = query * F32(scale * LOG2_E)
    top = np.maximum(np.abs(scaled).max(axis=1), TINY)
    return _Rows(scaled, scaled * (Q_TOP / top)[:, None], top * (F32(1) / Q_TOP))


def _scores(rows: _Rows, coded: _Coded, tokens: slice) -> Floats:
    """Return the scores of 16 tokens of a block, [rows, 16]."""
    top = coded.steps.max()
    folded = np.rint(
        rows.unit.astype(np.float64) * (coded.steps * (F32(1) / top)).astype(np.float64)
    )
    sums = np.nan_to_num(folded).astype(np.int64) @ coded.keys[:, tokens]
    lanes = np.zeros((len(rows.scaled), 16), F32)
    for start in range(0, rows.scaled.shape[1], 16):
        lanes = fma_f32(rows.unit[:, start : start + 16], coded.zeros[start : start + 16], lanes)
    dots = _reduce(lanes, np.add) * rows.step
    scores: Floats = fma_f32(sums.astype(F32), (rows.step * top)[:, None], dots[:, None])
    return scores


def _cap(scores: Floats, cap: float) -> Floats:
    cap *= LOG2_E
    x = scores / F32(cap)
    minus = np.where(x < 0, x, F32(0) - x)
    decay = exp_f32(minus + minus)
    tanh = (F32(1) - decay) / (F32(1) + decay)
    return (np.where(x < 0, F32(0) - tanh, tanh) * F32(cap)).astype(F32)


def _add_tile(
    state: _State, scores: Floats, values: Longs, scales: Floats, middles: Floats
) -> _State:
    """Add 64 tokens to the softmax state.

    Args:
        state: softmax state so far.
        scores: [rows, 64]; -inf hides a token.
        values: value codes [64, dim].
        scales: [64].
        middles: [64].
    """
    new = np.maximum(scores.max(axis=1), state.maxima)
    base = np.where(np.isneginf(new), F32(0), new)
    weights = exp2_f32(scores - base[:, None])
    rescale = exp2_f32(state.maxima - base)
    scaled, shifted = (
        np.where(weights == 0, F32(0), weights * factors) for factors in (scales, middles)
    )
    top = np.maximum(scaled.max(axis=1), TINY)
    integers = np.rint(scaled.astype(np.float64) * (F32(255) / top).astype(np.float64)[:, None])
    dots = np.nan_to_num(integers).astype(np.int64) @ values
    old = fma_f32(state.sums, rescale[:, None], _sum_tile(shifted)[:, None])
    sums = fma_f32(dots.astype(F32), (top * (F32(1) / F32(255)))[:, None], old)
    return _State(sums, new, fma_f32(state.totals, rescale, _sum_tile(weights)))


class _Sequence(NamedTuple):
    """Codes and block table of one sequence and KV head."""

    codes: Bytes
    layout: CodeLayout
    table: npt.NDArray[np.int32]
    head: int


def _attend_partitions(
    rows: _Rows, where: _Sequence, low: int, high: int, softcap: float
) -> _State:
    """Attend to quantized tokens [low, high), partition by partition, and merge in order."""
    layout = where.layout
    merged = _empty(len(rows.scaled), layout.dim)
    apart: dict[int, _Coded] = {}
    for partition in range(low // PARTITION, -(-high // PARTITION)):
        state = _empty(len(rows.scaled), layout.dim)
        for start in range(
            max(low, partition * PARTITION) // TILE * TILE,
            min(high, partition * PARTITION + PARTITION),
            TILE,
        ):
            scores = np.full((len(rows.scaled), TILE), -np.inf, F32)
            values = np.zeros((TILE, layout.dim), np.int64)
            scales = np.zeros(TILE, F32)
            middles = np.zeros(TILE, F32)
            for at in range(start, start + TILE, 16):
                if at + 16 <= low or at >= high:
                    continue
                block = at // layout.block_size
                if block not in apart:
                    apart[block] = _take_apart(where.codes[where.table[block], where.head], layout)
                inside = slice(at - start, at - start + 16)
                tokens = slice(at % layout.block_size, None)
                tokens = slice(tokens.start, tokens.start + 16)
                scores[:, inside] = _scores(rows, apart[block], tokens)
                values[inside] = apart[block].values[tokens]
                scales[inside] = apart[block].scales[tokens]
                middles[inside] = apart[block].middles[tokens]
            if softcap > 0:
                scores = _cap(scores, softcap)
            positions = np.arange(start, start + TILE)
            scores = np.where((positions >= low) & (positions < high), scores, F32(-np.inf))
            state = _add_tile(state, scores, values, scales, middles)
        merged = _merge(merged, state)
    return merged


def _attend_own(rows: _Rows, keys: Floats, values: Floats, softcap: float) -> _State:
    """Attend to the rows' own block with keys [head_dim, tokens] and values [tokens, head_dim]."""
    dim = len(keys)
    scores = rows.scaled[:, :dim].astype(np.float64) @ keys.astype(np.float64)
    if softcap > 0:
        cap = softcap * LOG2_E
        scores = cap * np.tanh(scores / cap)
    maxima = scores.max(axis=1)
    weights = np.exp2(scores - maxima[:, None])
    sums = np.zeros((len(scores), rows.scaled.shape[1]), F32)
    sums[:, :dim] = weights @ values.astype(np.float64)
    return _State(sums, maxima.astype(F32), weights.sum(axis=1).astype(F32))


class _SegmentRange(NamedTuple):
    """Positions [low, high) of one segment, relative to slot 0 of its first entry."""

    first_index: int
    low: int
    high: int
    delta: int


def _segments_of(batch: PagedBatch, sequence: int, low: int, high: int) -> list[_SegmentRange]:
    """Return the segment ranges of a sequence that hold positions [low, high)."""
    if batch.segments is None:
        return [_SegmentRange(0, low, high, 0)]
    ends = valid_to(batch.segments)
    found = []
    for row, end in zip(batch.segments.tolist(), ends.tolist(), strict=True):
        segment = Segment(*row)
        start = max(low, segment.valid_from)
        stop = min(high, end)
        if segment.sequence == sequence and start < stop:
            first = start - segment.first_position
            last = stop - segment.first_position
            found.append(_SegmentRange(segment.first_index, first, last, segment.delta))
    return found


def paged_attention_coded(
    queries: Floats,
    codes: Bytes,
    layout: CodeLayout,
    batch: PagedBatch,
    own: OwnBlocks,
    options: AttentionOptions,
    turning: QueryRotation | None = None,
) -> tuple[Floats, Floats]:
    """Compute causal attention over quantized blocks and the float16 copies of own blocks.

    Args:
        queries: float32 [num_tokens, num_q_heads, head_dim].
        codes: uint8 [num_blocks, num_kv_heads, layout.nbytes].
        layout: sizes and offsets of the codes of one block and KV head.
        batch: query rows and block tables of each sequence.
        own: float16 copies of the blocks that the pass writes.
        options: softmax scale, window, softcap, sinks.
        turning: queries before RoPE, for segments with a delta.

    Returns:
        (out, lse): float32 like `queries`, float32 [num_tokens, num_q_heads].
    """
    if options.ahead:
        raise ConfigError(
            f"ahead={options.ahead} is not supported, because attention over quantized KV is "
            "causal; use ahead=0"
        )
    out = np.empty(queries.shape, F32)
    lse = np.empty(queries.shape[:2], F32)
    num_kv_heads = codes.shape[1]
    size = layout.block_size
    heads_per_kv = queries.shape[1] // num_kv_heads
    with np.errstate(all="ignore"):
        for sequence, seq_len in enumerate(batch.seq_lens):
            first = int(batch.cu_seqlens_q[sequence])
            stop = int(batch.cu_seqlens_q[sequence + 1])
            for row in range(first, stop):
                position = int(seq_len) - (stop - row)
                low = max(0, position - options.window + 1) if options.window > 0 else 0
                number, offset = divmod(position - int(own.first[sequence]), size)
                buffer = own.tables[sequence, number]
                begin = position - offset
                seen = slice(max(low - begin, 0), offset + 1)
                for head in range(num_kv_heads):
                    heads = slice(head * heads_per_kv, (head + 1) * heads_per_kv)
                    rows = _query_rows(queries[row, heads], options.softmax_scale, layout.dim)
                    coded = _empty(heads_per_kv, layout.dim)
                    for segment in _segments_of(batch, sequence, low, begin):
                        where = _Sequence(
                            codes, layout, batch.block_tables[sequence][segment.first_index :], head
                        )
                        mine = rows
                        if segment.delta and turning is not None:
                            turned = rotate_heads(
                                turning.queries[row, heads], position - segment.delta, turning
                            )
                            mine = _query_rows(turned, options.softmax_scale, layout.dim)
                        coded = _merge(
                            coded,
                            _attend_partitions(
                                mine, where, segment.low, segment.high, options.softcap
                            ),
                        )
                    keys = own.pool.keys[buffer, head][:, seen]
                    values = own.pool.values[buffer, head][seen]
                    state = _merge(coded, _attend_own(rows, keys, values, options.softcap))
                    sinks = None if options.sinks is None else options.sinks[heads]
                    out[row, heads], lse[row, heads] = _finish(state, sinks, queries.shape[2])
    return out, lse


def _finish(state: _State, sinks: Floats | None, dim: int) -> tuple[Floats, Floats]:
    """Return (out, lse) of a softmax state, adding sinks as logits without a value."""
    maxima = state.maxima
    totals = state.totals
    factor = np.ones_like(state.totals)
    if sinks is not None:
        sinks = sinks * F32(LOG2_E)
        top = np.maximum(maxima, sinks)
        factor = exp2_f32(maxima - top)
        totals = fma_f32(totals, factor, exp2_f32(sinks - top))
        maxima = top
    return state.sums[:, :dim] * (factor / totals)[:, None], fma_f32(
        maxima, F32(np.log(2.0)), np.log(totals)
    )
