"""Accuracy and speed of quantized KV: candidate schemes, the chosen scheme and its kernels.

Keys are synthetic, with biases like Qwen2's in slow, middle and fast RoPE pairs, or real keys of
the bundled model. Each candidate stores blocks of 16 keys of one head. As in the cache, a query's
own block is exact.

    token        one scale per token
    centred      the block's mean key is subtracted, and q . mean is added back
    smoothed     channels are divided by sqrt(max |k| / max |q|) of their RoPE pair over the text,
                 then one scale per token
    channel      zero point and step for each channel in the block (KIVI's axis)

Queries have 8 bits (one scale per head and block) or 16 bits (two bytes). The error of the scores
is the root mean square error of differences between a query's scores, because a constant does not
change the softmax. The error of the output is the relative L2 error with exact values.

Then the compiled backend is measured with each pair of bits for keys and values. Its float16 error
is visible only where biases make keys large. Finally, its speed is measured at the shape of
Qwen2-0.5B (24 layers, 14 query heads, 2 KV heads, head_dim 64).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvboost_edge
from kvboost_edge.backends.base import AttentionParams, BatchLayout, KVSpec, LayerKVSpec
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.kernels.quantized_kv.code_layout import BIT_PAIRS
from kvboost_edge.runners.base import ForwardBatch
from kvboost_edge.runners.native.runner import NativeRunner
from kvboost_edge.text.tokenizer import Tokenizer

Array = npt.NDArray[np.float64]
BLOCK = 16


class Case(NamedTuple):
    """Queries, keys and values of one KV head and its query heads.

    Their shapes are [heads, tokens, dim], [tokens, dim] and [tokens, dim].
    """

    name: str
    queries: Array
    keys: Array
    values: Array


def rotate(rows: Array, positions: npt.NDArray[np.int64], base: float) -> Array:
    """Apply RoPE to [..., tokens, dim], pairing the two halves of a head."""
    half = rows.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)
    cos = np.cos(angles)
    sin = np.sin(angles)
    first = rows[..., :half]
    second = rows[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def synthetic(
    name: str, pairs: slice, size: float, *, tokens: int = 1024, dim: int = 64, heads: int = 7
) -> Case:
    """Return content of unit variance with a bias in some RoPE pairs of keys and queries.

    Args:
        name: Name of the case.
        pairs: RoPE pairs with a bias. Pair 0 rotates fastest.
        size: Size of the bias.
    """
    rng = np.random.default_rng(1)
    content = rng.standard_normal((tokens, 8)) @ rng.standard_normal(
        (8, dim)
    ) / 2 + rng.standard_normal((tokens, dim))
    bias = np.zeros(dim)
    query_bias = np.zeros(dim)
    where = np.concatenate([np.arange(dim // 2)[pairs], np.arange(dim // 2, dim)[pairs]])
    bias[where] = size * rng.choice([-1.0, 1.0], where.size) * rng.uniform(0.3, 1.0, where.size)
    query_bias[where] = 4.0 * rng.standard_normal(where.size)
    positions = np.arange(tokens)
    keys = rotate(content + bias, positions, 1e6)
    queries = rotate(2.0 * rng.standard_normal((heads, tokens, dim)) + query_bias, positions, 1e6)
    return Case(name, queries, keys, rng.standard_normal((tokens, dim)))


def _blocks(rows: Array) -> Array:
    return rows.reshape(-1, BLOCK, rows.shape[-1])


def _half(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float64)


def _codes(values: Array, axis: int, bits: int) -> Array:
    """Quantize symmetrically with one float16 scale along an axis, and dequantize."""
    top = 2.0 ** (bits - 1) - 1
    scale = _half(np.maximum(np.abs(values).max(axis=axis, keepdims=True) / top, 1e-7))
    return np.clip(np.rint(values / scale), -top, top) * scale


def _short_up(values: Array) -> Array:
    """Round up to floats with 3 mantissa bits, like the key steps in stored records."""
    fraction, exponent = np.frexp(np.maximum(values, 2.0**-18))
    return np.ldexp(np.ceil(fraction * 16) / 16, exponent)


class Stored(NamedTuple):
    """Quantized keys of each block: key = centre + factor * coded.

    Attributes:
        centre: [blocks, dim], added after the product with the codes.
        factor: [blocks, dim], multiplied with the query before it is quantized.
        coded: [blocks, BLOCK, dim], multiplied with the quantized query.
    """

    centre: Array
    factor: Array
    coded: Array


def by_token(keys: Array, queries: Array, bits: int) -> Stored:
    blocks = _blocks(keys)
    zero = np.zeros((len(blocks), keys.shape[1]))
    one = np.ones((len(blocks), keys.shape[1]))
    return Stored(zero, one, _codes(blocks, 2, bits))


def centred(keys: Array, queries: Array, bits: int) -> Stored:
    blocks = _blocks(keys)
    mean = _half(blocks.mean(axis=1))
    return Stored(mean, np.ones_like(mean), _codes(blocks - mean[:, None], 2, bits))


def smoothed(keys: Array, queries: Array, bits: int) -> Stored:
    half = keys.shape[1] // 2

    def largest(rows: Array) -> Array:
        top = np.abs(rows.reshape(-1, rows.shape[-1])).max(axis=0)
        return np.tile(np.maximum(top[:half], top[half:]), 2)

    factor = np.sqrt(largest(keys) / largest(queries))
    stored = by_token(keys / factor, queries, bits)
    return stored._replace(factor=np.broadcast_to(factor, stored.factor.shape))


def by_channel(keys: Array, queries: Array, bits: int) -> Stored:
    blocks = _blocks(keys)
    top = 2.0**bits - 1
    zero = blocks.min(axis=1)
    step = _short_up((blocks.max(axis=1) - zero) / top)
    codes = np.clip(np.rint((blocks - zero[:, None]) / step[:, None]), 0, top)
    return Stored(zero, step, codes)


CANDIDATES: dict[str, Callable[[Array, Array, int], Stored]] = {
    "token": by_token,
    "centred": centred,
    "smoothed": smoothed,
    "channel": by_channel,
}


def scores_of(queries: Array, stored: Stored, q_bits: int) -> Array:
    """Return the scores [heads, tokens, tokens] of queries quantized to `q_bits`."""
    heads, tokens, dim = queries.shape
    out = np.empty((heads, tokens, tokens))
    for block in range(tokens // BLOCK):
        folded = queries * stored.factor[block]
        top = 127.0 if q_bits == 8 else 32512.0
        scale = np.abs(folded).max(axis=2, keepdims=True) / top
        folded = np.rint(folded / scale) * scale
        at = slice(block * BLOCK, block * BLOCK + BLOCK)
        out[..., at] = folded @ stored.coded[block].T + (queries @ stored.centre[block])[..., None]
    return out / np.sqrt(dim)


def _own_block_exact(approximate: Array, exact: Array) -> Array:
    own = np.arange(exact.shape[1]) // BLOCK
    return np.where(own[:, None] == own[None, :], exact, approximate)


def _softmax(scores: Array) -> Array:
    seen = np.tril(np.ones(scores.shape[1:], dtype=bool))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True)


def errors(case: Case, stored: Stored, q_bits: int) -> tuple[float, float]:
    """Return the RMS error of score differences and the relative L2 error of the output."""
    exact = case.queries @ case.keys.T / np.sqrt(case.keys.shape[1])
    got = _own_block_exact(scores_of(case.queries, stored, q_bits), exact)
    seen = np.tril(np.ones(exact.shape[1:], dtype=bool))
    wrong = np.where(seen, got - exact, 0.0)
    counts = seen.sum(axis=1)
    mean = wrong.sum(axis=2, keepdims=True) / counts[None, :, None]
    spread = float(
        np.sqrt((np.where(seen, wrong - mean, 0.0) ** 2).sum() / (seen.sum() * len(exact)))
    )
    out = _softmax(got) @ case.values
    expected = _softmax(exact) @ case.values
    return spread, float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def real_cases(model_dir: Path, text: str, tokens: int) -> Iterator[Case]:
    """Yield queries, keys and values of every layer and KV head of a model.

    They are captured at the backend of the native runner.
    """
    caught: dict[int, list[Any]] = {}

    class Catching(CPUBackend):
        kernel_access = None  # forces one kernel call per layer

        def write_kv(self, layer: int, keys: Any, values: Any, batch: Any) -> None:
            caught[layer] = [keys.copy(), values.copy()]
            super().write_kv(layer, keys, values, batch)

        def attention(self, layer: int, queries: Any, batch: Any, params: AttentionParams) -> Any:
            caught[layer].append(queries.copy())
            return super().attention(layer, queries, batch, params)

    runner = NativeRunner.from_dir(model_dir, weights="f32")
    ids = np.array(Tokenizer.from_dir(model_dir).encode(text), dtype=np.int64)
    ids = ids[: min(len(ids), tokens) // BLOCK * BLOCK]
    spec = dataclasses.replace(runner.info.kv_spec, dtype="float32", bits=(16, 16))
    backend = Catching(spec, len(ids) // BLOCK, num_threads=1)
    runner.bind(backend)
    runner.forward(
        ForwardBatch(ids, np.arange(len(ids)), _layout(0, len(ids)), np.zeros(0, np.int64))
    )
    for layer, (keys, values, queries) in caught.items():
        group = queries.shape[1] // keys.shape[1]
        for head in range(keys.shape[1]):
            mine = queries[:, head * group : (head + 1) * group].transpose(1, 0, 2)
            rows = (x.astype(np.float64) for x in (mine, keys[:, head], values[:, head]))
            yield Case(f"layer {layer} head {head}", *rows)
    runner.close()
    backend.close()


def _layout(start: int, stop: int) -> BatchLayout:
    """Return the layout of one sequence in blocks 0, 1, ..., with new tokens [start, stop)."""
    tables = np.arange(-(-stop // BLOCK), dtype=np.int32)[None]
    return BatchLayout(
        np.array([0, stop - start], np.int32),
        np.array([stop], np.int32),
        tables,
        np.arange(start, stop),
    )


def backend_error(case: Case, bits: tuple[int, int]) -> float:
    """Return the relative L2 error of the compiled backend against float64 attention."""
    _, tokens, dim = case.queries.shape
    backend = CPUBackend(
        KVSpec((LayerKVSpec(1, dim),), BLOCK, "float16", bits), tokens // BLOCK, num_threads=1
    )
    batch = backend.prepare(_layout(0, tokens))
    rows = [x.astype(np.float32)[:, None] for x in (case.keys, case.values)]
    backend.write_kv(0, *rows, batch)
    queries = np.ascontiguousarray(case.queries.transpose(1, 0, 2), dtype=np.float32)
    out, _ = backend.attention(0, queries, batch, AttentionParams(dim**-0.5))
    backend.close()
    exact = _softmax(case.queries @ case.keys.T / np.sqrt(dim)) @ case.values
    return float(np.linalg.norm(out.transpose(1, 0, 2) - exact) / np.linalg.norm(exact))


def speeds(bits: tuple[int, int], dtype: str, threads: int, layers: int = 24) -> dict[str, float]:
    """Return the milliseconds of attention in all layers, the best of several runs.

    One figure is a prefill of 2,112 tokens. The other is a decode step at depth 8,192, whose pool
    is larger than the CPU caches.
    """
    rng = np.random.default_rng(0)
    spec = KVSpec((LayerKVSpec(2, 64),) * layers, BLOCK, dtype, bits)
    backend = CPUBackend(spec, 8208 // BLOCK, num_threads=threads)
    params = AttentionParams(0.125)
    rows = rng.standard_normal((3, 2112, 2, 64), dtype=np.float32)
    queries = rng.standard_normal((2112, 14, 64), dtype=np.float32)
    batch = backend.prepare(_layout(0, 2112))
    backend.write_kv(0, rows[0], rows[1], batch)
    prefill = (
        min(_timed(lambda: backend.attention(0, queries, batch, params)) for _ in range(4)) * layers
    )
    backend.release_blocks(range(8208 // BLOCK))
    for start in range(0, 8192, 2048):
        batch = backend.prepare(_layout(start, start + 2048))
        for layer in range(layers):
            backend.write_kv(layer, rows[0][:2048], rows[1][:2048], batch)
    batch = backend.prepare(_layout(8192, 8193))
    for layer in range(layers):
        backend.write_kv(layer, rows[0][:1], rows[1][:1], batch)

    def step() -> None:
        for layer in range(layers):
            backend.attention(layer, queries[:1], batch, params)

    decode = min(_timed(step) for _ in range(12))
    backend.close()
    gigabytes = spec.bytes_per_block * 8192 / BLOCK / 1e9
    return {
        "prefill_ms": prefill * 1e3,
        "decode_ms": decode * 1e3,
        "decode_gb_per_s": gigabytes / decode,
    }


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _table(cases: list[Case], result: dict[str, Any]) -> None:
    for case in cases:
        print(f"\n{case.name}: largest key {np.abs(case.keys).max():.0f}, {len(case.keys)} tokens")
        for bits in (8, 4):
            for name, store in CANDIDATES.items():
                stored = store(case.keys, case.queries, bits)
                pairs = {q_bits: errors(case, stored, q_bits) for q_bits in (8, 16)}
                text = "   ".join(
                    f"q{q_bits}: score {s:7.4f} out {o:7.4f}" for q_bits, (s, o) in pairs.items()
                )
                print(f"  k{bits} {name:9s} {text}")
                result[f"{case.name}/k{bits}/{name}"] = pairs
        backend = {str(bits): backend_error(case, bits) for bits in ((16, 16), *BIT_PAIRS)}
        print(
            "  backend, keys and values: "
            + "  ".join(f"{bits} {error:.4f}" for bits, error in backend.items())
        )
        result[f"{case.name}/backend"] = backend


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1024,
        help="length of the text for real keys, in tokens (default: 1024)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="number of compute threads (default: %(default)s)"
    )
    parser.add_argument(
        "--only", choices=("errors", "speed"), help="part to measure (default: both)"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only != "speed":
        cases = [
            synthetic("no bias", slice(0, 0), 0.0),
            synthetic("bias of slow pairs", slice(26, 32), 300.0),
            synthetic("bias of middle pairs", slice(8, 12), 100.0),
            synthetic("bias of fast pairs", slice(0, 3), 100.0),
        ]
        text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
        real = list(
            real_cases(Path(kvboost_edge.__file__).parent / "assets" / "demo", text, options.tokens)
        )
        _table(cases + real[::3], result)
    if options.only != "errors":
        print()
        for bits, dtype in (
            ((16, 16), "float32"),
            ((16, 16), "float16"),
            *((pair, "float16") for pair in BIT_PAIRS),
        ):
            speed = speeds(bits, dtype, options.threads)
            print(
                f"{bits} {dtype}: prefill of 2,112 {speed['prefill_ms']:.0f} ms, decode at 8,192 "
                f"{speed['decode_ms']:.1f} ms = {speed['decode_gb_per_s']:.1f} GB/s on "
                f"{options.threads} threads"
            )
            result[f"speed/{bits}/{dtype}"] = speed
    print(json.dumps(result))


if __name__ == "__main__":
    main()
