"""Passes over quantized KV pools, and dense attention in float64 over the decoded blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from helpers.kernels.paged_cases import Case, attend_densely, make_case, num_blocks_for
from kvboost_edge.backends.base import AttentionParams, Backend, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.backends.reference import ReferenceBackend
from kvboost_edge.kernels.attention.paged import KVPool
from kvboost_edge.kernels.quantized_kv.code_dot import coded_dot_form
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS, code_layout
from kvboost_edge.kernels.reference.quantized_kv import decode_block, quantize_blocks


def _torch(device: str) -> Callable[..., Backend]:
    """Return a maker of a torch backend that takes and returns NumPy arrays."""

    def make(spec: KVSpec, num_blocks: int, **options: Any) -> Backend:
        import torch

        from helpers.backends.fake_mps import FakeMpsBackend
        from kvboost_edge.backends.torch_backend import TorchBackend

        class OnArrays(FakeMpsBackend if device == "mps" else TorchBackend):  # type: ignore[misc]
            array_kind = "numpy"

            def write_kv(
                self, layer: int, keys: np.ndarray, values: np.ndarray, batch: Any
            ) -> None:
                super().write_kv(layer, torch.from_numpy(keys), torch.from_numpy(values), batch)

            def attention(
                self, layer: int, queries: np.ndarray, *more: Any
            ) -> tuple[np.ndarray, np.ndarray]:
                out, lse = super().attention(layer, torch.from_numpy(queries), *more)
                return out.numpy(), lse.numpy()

        return OnArrays(spec, num_blocks, **options)

    return make


MAKERS: dict[str, Callable[..., Backend]] = {
    "reference": ReferenceBackend,
    "cpu": CPUBackend,
    "torch-cpu": _torch("cpu"),
    "torch-mps": _torch("mps"),
}
KERNELS = ("reference", "cpu")
"""Those that round as the kernels do, and have codes of all widths; the others are of 8 bits, in
float32.
"""
KINDS = [(name, bits) for name in MAKERS for bits in BIT_PAIRS if name in KERNELS or bits == (8, 8)]
Span = tuple[int, int, int]  # sequence, first position, position after the last


def make_backend(
    name: str, case: Case, bits: tuple[int, int], *, num_open: int = 17, threads: int = 1
) -> Backend:
    """Make a poisoned pool with room for the case and three more blocks."""
    _, heads, dim = case.keys[0].shape
    spec = KVSpec((LayerKVSpec(heads, dim),), case.block_size, "float16", bits)
    num_blocks = num_blocks_for(case.lengths, case.block_size)
    more = {"num_threads": threads} if name == "cpu" else {}
    backend = MAKERS[name](spec, num_blocks, num_open=num_open, **more)
    backend.poison_blocks(range(num_blocks))
    return backend


def write(backend: Backend, case: Case, spans: Sequence[Span]) -> None:
    """Run a pass that writes the tokens and computes no attention."""
    batch = backend.prepare(case.layout(spans))
    backend.write_kv(0, case.rows(case.keys, spans), case.rows(case.values, spans), batch)


def run(
    backend: Backend, case: Case, spans: Sequence[Span], params: AttentionParams
) -> tuple[np.ndarray, np.ndarray]:
    """Run a pass that writes the tokens and computes their attention."""
    batch = backend.prepare(case.layout(spans))
    backend.write_kv(0, case.rows(case.keys, spans), case.rows(case.values, spans), batch)
    return backend.attention(0, case.rows(case.queries, spans), batch, params)


def run_all(
    backend: Backend, case: Case, passes: Sequence[Sequence[Span]], params: AttentionParams
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Run several passes and return out and lse of each sequence's tokens in order."""
    parts: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in case.lengths]
    for spans in passes:
        out, lse = run(backend, case, spans, params)
        at = 0
        for sequence, start, stop in spans:
            rows = slice(at, at + stop - start)
            parts[sequence].append((out[rows], lse[rows]))
            at = rows.stop
    return [
        tuple(np.concatenate(list(arrays)) for arrays in zip(*part, strict=True)) for part in parts
    ]  # type: ignore[misc]


def random_passes(rng: np.random.Generator, case: Case, longest: int) -> list[list[Span]]:
    """Split all tokens of all sequences into random passes."""
    done = [0] * len(case.lengths)
    passes = []
    while any(at < total for at, (_, total) in zip(done, case.lengths, strict=True)):
        spans = []
        for sequence, (_, total) in enumerate(case.lengths):
            if done[sequence] < total and rng.random() < 0.7:
                stop = min(total, done[sequence] + int(rng.integers(1, longest)))
                spans.append((sequence, done[sequence], stop))
                done[sequence] = stop
        if spans:
            passes.append(spans)
    return passes


def whole(case: Case) -> list[Span]:
    return [(sequence, 0, total) for sequence, (_, total) in enumerate(case.lengths)]


def before_new(case: Case) -> list[Span]:
    """Return the tokens before the new ones."""
    return [
        (sequence, 0, total - new)
        for sequence, (new, total) in enumerate(case.lengths)
        if total > new
    ]


def decoded(
    keys: np.ndarray, values: np.ndarray, size: int, bits: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Decode one sequence's KV [tokens, heads, dim] to float64. Full blocks are quantized and
    decoded, the rest is unchanged.
    """
    tokens, heads, dim = keys.shape
    layout = code_layout(size, dim, bits)
    full = tokens // size
    shorts = [
        x[: full * size].astype(np.float16).reshape(full, size, heads, dim) for x in (keys, values)
    ]
    pool = KVPool(shorts[0].transpose(0, 2, 3, 1), shorts[1].transpose(0, 2, 1, 3))
    codes = np.zeros((full, heads, layout.nbytes), np.uint8)
    quantize_blocks(pool, np.arange(full), codes, np.arange(full), layout)
    out_keys = keys.astype(np.float64)
    out_values = values.astype(np.float64)
    for block in range(full):
        rows = slice(block * size, block * size + size)
        for head in range(heads):
            out_keys[rows, head], out_values[rows, head] = decode_block(codes[block, head], layout)
    return out_keys, out_values


def expected(
    case: Case, spans: Sequence[Span], params: AttentionParams, bits: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute dense float64 attention over decoded blocks before a query's block and float16 within
    it.
    """
    size = case.block_size
    results = []
    for sequence, start, stop in spans:
        coded = decoded(case.keys[sequence], case.values[sequence], size, bits)
        shorts = [
            x.astype(np.float16).astype(np.float64)
            for x in (case.keys[sequence], case.values[sequence])
        ]
        for position in range(start, stop):
            own = position // size * size
            keys, values = (
                np.concatenate([old[:own], new[own : position + 1]])
                for old, new in zip(coded, shorts, strict=True)
            )
            results.append(
                attend_densely(
                    case.queries[sequence][position : position + 1], keys, values, params
                )
            )
    return np.concatenate([out for out, _ in results]), np.concatenate([lse for _, lse in results])


def form_and_digest() -> tuple[str, str]:
    """Return the kernel variant of this process's byte dot product, and a digest of the attention
    results with each pair of bits.
    """
    case = make_case(
        np.random.default_rng(0),
        ((1, 30), (3, 600)),
        kv_heads=2,
        per_group=7,
        dim=64,
        block_size=16,
    )
    digest = hashlib.sha256()
    for bits in BIT_PAIRS:
        backend = make_backend("cpu", case, bits)
        for array in run(backend, case, whole(case), AttentionParams(0.125, window=300)):
            digest.update(array.tobytes())
        backend.close()
    return coded_dot_form(), digest.hexdigest()
