"""How fast the native runner is on this machine, at the shape of Qwen2-0.5B with random weights.

    python benchmarks/bench_linear.py [--weights int4] [--threads 2] [--prefill 512] [--decode 24] [--layers 24]

Prints decode tokens per second at a few depths, the time of a prefill, and the bandwidth of one large matrix alone;
ends in one JSON line. Weights are random: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.cpu import CPUBackend
from kvboost_edge.runners.base import ForwardBatch
from kvboost_edge.runners.native.runner import NativeRunner

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
BLOCK = 16


def write_random_model(directory: Path, layers: int) -> None:
    """A checkpoint of random float16 weights in the shape of CONFIG."""
    rng = np.random.default_rng(0)
    hidden, wide, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 128

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) / columns**0.5).astype(np.float16)

    tensors = {"model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden)}
    tensors["model.norm.weight"] = np.ones(hidden, np.float16)
    for index in range(layers):
        at = f"model.layers.{index}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, hidden)
            tensors[f"{at}self_attn.{name}_proj.bias"] = np.zeros(rows, np.float16)
        tensors[f"{at}self_attn.o_proj.weight"] = matrix(hidden, hidden)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            tensors[f"{at}mlp.{name}_proj.weight"] = matrix(*shape)
        for name in ("input", "post_attention"):
            tensors[f"{at}{name}_layernorm.weight"] = np.ones(hidden, np.float16)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def batch(start: int, stop: int) -> ForwardBatch:
    """Tokens [start, stop) of one sequence whose blocks are 0, 1, 2, ..."""
    positions = np.arange(start, stop, dtype=np.int64)
    layout = BatchLayout(
        cu_seqlens_q=np.array([0, stop - start], np.int32),
        seq_lens=np.array([stop], np.int32),
        block_tables=np.arange(-(-stop // BLOCK), dtype=np.int32)[None],
        slot_mapping=positions,
    )
    return ForwardBatch(positions * 7919 % 1000, positions, layout, np.array([stop - start - 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="int4", choices=("f32", "bf16", "int8", "int4"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=24)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--model", type=Path, help="keep the random model here between runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        if not (directory / "config.json").exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_random_model(directory, options.layers)
        start = time.perf_counter()
        runner = NativeRunner.from_dir(
            directory, weights=options.weights, num_threads=options.threads, cache_dir=directory / "cache"
        )
        result: dict[str, object] = {"weights": options.weights, "threads": options.threads}
        result["load_s"] = round(time.perf_counter() - start, 2)
        num_blocks = -(-(options.prefill + 2 * options.decode) // BLOCK) + 1
        runner.bind(CPUBackend(runner.info.kv_spec, num_blocks, num_threads=options.threads))
        runner.forward(batch(0, 16))  # compiles
        times = []
        for depth in range(16, 16 + options.decode):
            start = time.perf_counter()
            runner.forward(batch(depth, depth + 1))
            times.append(time.perf_counter() - start)
        result["decode_tok_s_shallow"] = round(1 / statistics.median(times), 1)
        result["decode_tok_s_shallow_best"] = round(1 / min(times), 1)
        start = time.perf_counter()
        for first in range(0, options.prefill, 512):
            runner.forward(batch(first, min(first + 512, options.prefill)))
        result["prefill_s"] = round(time.perf_counter() - start, 3)
        result["prefill_tok_s"] = round(options.prefill / (time.perf_counter() - start), 1)
        times = []
        for depth in range(options.prefill, options.prefill + options.decode):
            start = time.perf_counter()
            runner.forward(batch(depth, depth + 1))
            times.append(time.perf_counter() - start)
        result[f"decode_tok_s_at_{options.prefill}"] = round(1 / statistics.median(times), 1)
        result["weight_mb"] = round(runner.info.weight_bytes / 1e6, 1)
        runner.close()
    for name, value in result.items():
        print(f"{name:28} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
