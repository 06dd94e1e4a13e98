"""Attention cases for the CUDA kernels, their arrays in all layouts of a launch, and the float64
oracle.

Everything that no query may see is poison: rows after a sequence's end, blocks before its window,
unused entries of block tables (-1), and the part of the output that is not one of its rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from helpers.cuda.on_cpu import BF16, F16, AttentionParams, Form, Library, Schedule

Bits = npt.NDArray[np.uint16]
Doubles = npt.NDArray[np.float64]
NAN_BITS = 0x7FFF
UNIT_ROUNDOFF = {F16: 2.0**-11, BF16: 2.0**-8}
_PAD = 8


def to_bits(values: npt.NDArray[Any], dtype: int) -> Bits:
    """Round to nearest, ties to even, and return 16 bits per element."""
    if dtype == F16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(bits: Bits, dtype: int) -> Doubles:
    if dtype == F16:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes:
        lens: (queries, keys) of each sequence.
        block_size: tokens per block; 0 if keys are in rows instead of blocks.
        shared: number of leading blocks that all sequences share.
        is_flat: tensors are [total, heads, dim] with cu_seqlens. Otherwise they are
            [batch, rows, heads, dim], and all sequences have the same number of queries.
        is_strided: heads come before rows, with gaps between rows.
        is_indexed: keys of sequence i are not at row i of the batch, see cache_batch_idx.
    """

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    head_dim: int | None = None
    window: tuple[int, int] = (-1, 0)
    softcap: float = 0.0
    has_sinks: bool = False
    block_size: int = 0
    shared: int = 0
    is_flat: bool = True
    is_strided: bool = False
    is_indexed: bool = False
    num_splits: int = 1
    scale: float | None = None
    magnitude: float = 1.0


class Inputs(NamedTuple):
    """Bits of each sequence: q [len_q, num_q_heads, head_dim], k and v [len_k, num_kv_heads,
    head_dim]. The sinks are float32.
    """

    q: list[Bits]
    k: list[Bits]
    v: list[Bits]
    sinks: npt.NDArray[np.float32] | None


class Result(NamedTuple):
    """The bits of out and the lse of each sequence: [len_q, num_q_heads, head_dim], [len_q,
    num_q_heads].
    """

    out: list[Bits]
    lse: list[npt.NDArray[np.float32]]


def make_inputs(case: Case, form: Form, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    dim = case.head_dim or form.head_dim
    num_q_heads, num_kv_heads = case.heads

    def draw(rows: int, heads: int) -> Bits:
        return to_bits(rng.standard_normal((rows, heads, dim)) * case.magnitude, form.dtype)

    q = [draw(len_q, num_q_heads) for len_q, _ in case.lens]
    k = [draw(len_k, num_kv_heads) for _, len_k in case.lens]
    v = [draw(len_k, num_kv_heads) for _, len_k in case.lens]
    for tensors in (k, v):
        for tensor in tensors[1:]:
            same = min(case.shared * case.block_size, len(tensor), len(tensors[0]))
            tensor[:same] = tensors[0][:same]
    sinks = rng.standard_normal(num_q_heads).astype(np.float32) * 2 if case.has_sinks else None
    return Inputs(q, k, v, sinks)


def visible(case: Case, len_q: int, len_k: int) -> npt.NDArray[np.bool_]:
    """Return a mask [len_q, len_k] of the keys that each query sees, aligned bottom right."""
    distance = np.arange(len_k)[None, :] - (np.arange(len_q)[:, None] + len_k - len_q)
    left, right = case.window
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def softmax_scale(case: Case, form: Form) -> float:
    return case.scale if case.scale is not None else 1 / math.sqrt(case.head_dim or form.head_dim)


class Expected(NamedTuple):
    """Expected results of one sequence in float64.

    Attributes:
        magnitude: like out, but of absolute values; rounding errors of the weights scale with it.
        noise: like lse; the error that float32 sums may add to a score.
    """

    out: Doubles
    lse: Doubles
    magnitude: Doubles
    noise: Doubles


def oracle(case: Case, form: Form, inputs: Inputs) -> list[Expected]:
    """Compute attention with one softmax over all scores of a row."""
    expected = []
    for (len_q, len_k), q, k, v in zip(case.lens, *inputs[:3], strict=True):
        group = case.heads[0] // case.heads[1]
        keys, values = (np.repeat(from_bits(x, form.dtype), group, axis=1) for x in (k, v))
        queries = from_bits(q, form.dtype)
        scale = softmax_scale(case, form)
        scores = np.einsum("ihd,jhd->hij", queries, keys) * scale
        most = np.einsum("ihd,jhd->hij", np.abs(queries), np.abs(keys)).max(axis=2, initial=0).T
        if case.softcap > 0:
            scores = case.softcap * np.tanh(scores / case.softcap)
        scores = np.where(visible(case, len_q, len_k), scores, -np.inf)
        if inputs.sinks is not None:
            sinks = np.broadcast_to(
                inputs.sinks.astype(np.float64)[:, None, None], (case.heads[0], len_q, 1)
            )
            scores = np.concatenate([scores, sinks], axis=2)
        top = scores.max(axis=2, initial=-np.inf, keepdims=True)
        weights = np.exp(scores - np.where(np.isinf(top), 0, top))
        total = weights.sum(axis=2, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = (np.log(total) + np.where(np.isinf(top), 0, top))[:, :, 0].T
            shares = np.where(total > 0, weights / total, 0)[:, :, :len_k]
        out, magnitude = (np.einsum("hij,jhd->ihd", shares, x) for x in (values, np.abs(values)))
        expected.append(Expected(out, lse, magnitude, 2.0**-22 * scale * most))
    return expected


def bound_of_error(expected: Expected, dtype: int) -> Doubles:
    """Return the largest error of each element of out. Weights and result are rounded once each,
    everything else is float32.
    """
    weights = 3e-6 + 2 * expected.noise[:, :, None]
    return UNIT_ROUNDOFF[dtype] * (expected.magnitude + np.abs(expected.out)) * 1.01 + weights * (
        1 + expected.magnitude
    )


class _Tensor(NamedTuple):
    """An array that a launch reads or writes, and its view as [batch, rows, heads, dim]. `used`
    marks the rows.
    """

    array: npt.NDArray[Any]
    view: npt.NDArray[Any]

    @property
    def strides(self) -> tuple[int, int, int]:
        batch, row, head, _ = (stride // self.array.itemsize for stride in self.view.strides)
        return batch, row, head


def _empty(batch: int, rows: int, heads: int, dim: int, is_strided: bool) -> _Tensor:
    """Return poison of this shape. If strided, memory is [batch, heads, rows, dim and a gap]."""
    if is_strided:
        array = np.full((batch, heads, rows, dim + _PAD), NAN_BITS, dtype=np.uint16)
        return _Tensor(array, array.transpose(0, 2, 1, 3)[..., :dim])
    array = np.full((batch, rows, heads, dim), NAN_BITS, dtype=np.uint16)
    return _Tensor(array, array)


def _rows(case: Case, tensor: _Tensor, which: int) -> list[npt.NDArray[Any]]:
    """Return the sequences' rows in a tensor of queries (which 0) or keys (1) as views [len, heads,
    dim].
    """
    lens = [pair[which] for pair in case.lens]
    if not case.is_flat:
        places = _places(case) if which else range(len(lens))
        return [tensor.view[place, :length] for place, length in zip(places, lens, strict=True)]
    stops = np.cumsum(lens)
    return [tensor.view[0, stop - length : stop] for length, stop in zip(lens, stops, strict=True)]


def _places(case: Case) -> npt.NDArray[np.int32]:
    """Return the row of each sequence in a batch of keys."""
    num = len(case.lens)
    return (
        np.arange(num, 0, -1, dtype=np.int32) if case.is_indexed else np.arange(num, dtype=np.int32)
    )


def _starts(lens: list[int]) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


class _Blocks(NamedTuple):
    k: _Tensor
    v: _Tensor
    table: npt.NDArray[np.int32]


def _in_blocks(case: Case, inputs: Inputs, rng: np.random.Generator) -> _Blocks:
    """Return KV in a pool of blocks in random order. Tables name only blocks with a key that some
    query sees.
    """
    size = case.block_size
    num_kv_heads, dim = inputs.k[0].shape[1:]
    counts = [-(-len_k // size) for _, len_k in case.lens]
    num_blocks = sum(counts) + 2
    ids = iter(rng.permutation(num_blocks).tolist())
    table = np.full((len(counts), max(counts) + 1), -1, dtype=np.int32)
    k, v = (_empty(num_blocks, size, num_kv_heads, dim, case.is_strided) for _ in range(2))
    for sequence, (len_q, len_k) in enumerate(case.lens):
        seen = visible(case, len_q, len_k).any(axis=0)
        for index in range(counts[sequence]):
            tokens = slice(index * size, min((index + 1) * size, len_k))
            if not seen[tokens].any():
                continue
            if (
                sequence
                and index < case.shared
                and table[0, index] >= 0
                and tokens.stop <= case.lens[0][1]
            ):
                table[sequence, index] = table[0, index]
                continue
            table[sequence, index] = next(ids)
            for tensor, rows in ((k, inputs.k[sequence]), (v, inputs.v[sequence])):
                tensor.view[table[sequence, index], : tokens.stop - tokens.start] = rows[tokens]
    return _Blocks(k, v, table)


class Call:
    """The arrays of one launch, which must outlive it."""

    def __init__(self, case: Case, form: Form, inputs: Inputs, seed: int = 0) -> None:
        self.case = case
        self.inputs = inputs
        lens_q = [pair[0] for pair in case.lens]
        lens_k = [pair[1] for pair in case.lens]
        num_q_heads, num_kv_heads = case.heads
        dim = inputs.q[0].shape[2]
        num = len(case.lens)
        batch_q, rows_q = (1, sum(lens_q)) if case.is_flat else (num, max(lens_q))
        self.total_q = sum(lens_q)
        self.q = _empty(batch_q, rows_q, num_q_heads, dim, case.is_strided)
        self.out = _empty(batch_q, rows_q, num_q_heads, dim, case.is_strided)
        for view, rows in zip(_rows(case, self.q, 0), inputs.q, strict=True):
            view[:] = rows
        self.table = None
        if case.block_size:
            self.k, self.v, self.table = _in_blocks(case, inputs, np.random.default_rng(seed + 1))
        else:
            batch_k, rows_k = (
                (1, sum(lens_k)) if case.is_flat else (num + case.is_indexed, max(lens_k) + 3)
            )
            self.k, self.v = (
                _empty(batch_k, rows_k, num_kv_heads, dim, case.is_strided) for _ in range(2)
            )
            for tensor, sequences in ((self.k, inputs.k), (self.v, inputs.v)):
                for view, rows in zip(_rows(case, tensor, 1), sequences, strict=True):
                    view[:] = rows
        # flat: [rows, heads]; batched: [batch, heads, rows], as flash-attn returns it
        shape = (rows_q, num_q_heads) if case.is_flat else (num, num_q_heads, rows_q)
        self.lse = np.full(shape, np.nan, dtype=np.float32)
        self.starts_q = _starts(lens_q)
        self.starts_k = _starts(lens_k)
        self.used = np.array(lens_k, dtype=np.int32)
        self.places = _places(case)
        parts = (case.num_splits, self.total_q, num_q_heads)
        self.partial_out = np.full((*parts, dim), np.nan, dtype=np.float32)
        self.partial_lse = np.full(parts, np.nan, dtype=np.float32)
        self.params = self._params(form, dim)

    def _params(self, form: Form, dim: int) -> AttentionParams:
        case = self.case
        params = AttentionParams(
            batch=len(case.lens),
            seqlen_q=max(pair[0] for pair in case.lens),
            seqlen_k=max(pair[1] for pair in case.lens),
            num_q_heads=case.heads[0],
            num_kv_heads=case.heads[1],
            head_dim=dim,
            block_size=case.block_size,
            window_left=case.window[0],
            window_right=case.window[1],
            num_splits=case.num_splits,
            softmax_scale=softmax_scale(case, form),
            softcap=case.softcap,
            total_q=self.total_q,
            lse=self.lse.ctypes.data,
        )
        for name in ("q", "k", "v", "out"):
            tensor = getattr(self, name)
            setattr(params, name, tensor.array.ctypes.data)
            for axis, stride in zip(("batch", "row", "head"), tensor.strides, strict=True):
                setattr(params, f"{name}_{axis}_stride", stride)
        heads = case.heads[0]
        rows = params.seqlen_q
        strides = (0, heads, 1) if case.is_flat else (heads * rows, 1, rows)
        params.lse_batch_stride, params.lse_row_stride, params.lse_head_stride = strides
        if case.is_flat:
            params.cu_seqlens_q = self.starts_q.ctypes.data
        if case.is_flat and not case.block_size:
            params.cu_seqlens_k = self.starts_k.ctypes.data
        elif case.block_size or len(set(self.used.tolist())) > 1:
            params.seqused_k = self.used.ctypes.data  # else all have seqlen_k
        if case.is_indexed:
            params.cache_batch_idx = self.places.ctypes.data
        if self.table is not None:
            params.block_table = self.table.ctypes.data
            params.block_table_stride = self.table.shape[1]
        if self.inputs.sinks is not None:
            params.sinks = self.inputs.sinks.ctypes.data
        if case.num_splits > 1:
            params.partial_out = self.partial_out.ctypes.data
            params.partial_lse = self.partial_lse.ctypes.data
        return params

    def result(self) -> Result:
        out = _rows(self.case, self.out, 0)
        if self.case.is_flat:
            lse = [
                self.lse[start:stop]
                for start, stop in zip(self.starts_q, self.starts_q[1:], strict=False)
            ]
        else:
            lse = [self.lse[i, :, :len_q].T for i, (len_q, _) in enumerate(self.case.lens)]
        return Result([np.array(rows) for rows in out], [np.array(rows) for rows in lse])

    def touched_elsewhere(self) -> bool:
        """Return whether anything was written outside of the output's rows."""
        for rows in _rows(self.case, self.out, 0):
            rows[:] = NAN_BITS
        return bool((self.out.array != NAN_BITS).any())


def run(
    kernels: Library, case: Case, form: Form, inputs: Inputs, schedule: Schedule, seed: int = 0
) -> Result:
    """Launch the kernel once, on separate arrays."""
    call = Call(case, form, inputs, seed)
    kernels.attention(call.params, form, schedule)
    result = call.result()
    if call.touched_elsewhere():
        raise AssertionError(f"{form} wrote outside its rows")
    return result


def check(case: Case, form: Form, expected: list[Expected], result: Result) -> None:
    """Raise AssertionError unless each row matches the oracle within its rounding error."""
    for exact, out, lse in zip(expected, result.out, result.lse, strict=True):
        error = np.abs(from_bits(out, form.dtype) - exact.out) / bound_of_error(exact, form.dtype)
        assert error.max(initial=0) <= 1, (case, form, error.max())
        is_empty = np.isinf(exact.lse)
        np.testing.assert_array_equal(lse[is_empty], -np.inf, err_msg=f"{case} {form}")
        error = (
            np.abs(lse[~is_empty] - exact.lse[~is_empty])
            / (3e-6 + 1e-6 * np.abs(exact.lse) + exact.noise)[~is_empty]
        )
        assert error.max(initial=0) <= 1, (case, form, error.max())
