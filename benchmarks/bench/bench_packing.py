"""Cost of a model's first load: checking, hashing and packing its weights, by file format.

    python benchmarks/bench/bench_packing.py

Files are random, in Qwen2-1.5B's shape with fewer layers. A separate process loads each into an
empty cache directory. Reports the CPU time of all threads (which other programs hardly affect),
wall time, bytes read and written, peak resident memory, and the memory that remains in addition to
the weights. Kernels are loaded before timing starts. MB are those of the file. At 5.7 ms of CPU
time per MB, two cores pack 350 MB of file per second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.data.random_model import add_tokenizer
from benchmarks.data.shapes import SHAPES, Shape

_TARGET_MS = 5.7
_SHAPE = Shape(1536, 8, 12, 2, 8960)
_CASES = (
    ("Q4_0", "auto"),
    ("Q4_K_M", "auto"),
    ("Q8_0", "auto"),
    ("BF16", "int8"),
    ("BF16", "int4"),
)
_WORK = """
import json, os, sys, time
from pathlib import Path
from kvboost_edge.host.memory import process_peak, process_rss
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.weight_file import load_packed
from kvboost_edge.models.packed.pack_plan import pack_plan

def io():
    lines = open("/proc/self/io").read().splitlines() if os.path.exists("/proc/self/io") else ()
    return {line.split(":")[0]: int(line.split(":")[1]) for line in lines}

def load(path, cache):
    os.environ["KVBOOST_EDGE_CACHE"] = cache
    marks = [("", time.perf_counter(), time.process_time())]
    def mark(name):
        marks.append((name, time.perf_counter(), time.process_time()))
    model = Checkpoint.open(Path(path))
    model.summary()
    mark("check")
    model.fingerprint()
    mark("hash")
    with model.open_source() as source:
        plan = pack_plan(describe_model(model.config), sys.argv[3], source)
    packed = load_packed(model, plan, weights=sys.argv[3], num_threads=2)
    mark("pack")
    spans = [(b[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(marks, marks[1:])]
    return packed, {name: {"seconds": wall, "cpu": cpu} for name, wall, cpu in spans}

load(sys.argv[2], sys.argv[4] + "/small")[0].close()
before, rss = io(), process_rss()
packed, spans = load(sys.argv[1], sys.argv[4] + "/large")
after = io()
print(json.dumps({
    "spans": spans, "packed": packed.nbytes, "peak": process_peak(),
    "rss_before": rss, "rss": process_rss(),
    "read": after.get("rchar", 0) - before.get("rchar", 0),
    "written": after.get("wchar", 0) - before.get("wchar", 0),
}))
"""


def random_file(directory: Path, shape: Shape, quant: str) -> Path:
    """Write a random model with ordinary scales: a GGUF file, or safetensors for "BF16"."""
    made = (
        directory
        / f"packing-{shape.hidden}x{shape.layers}-{quant}{'' if quant == 'BF16' else '.gguf'}"
    )
    if made.exists():
        return made
    directory.mkdir(parents=True, exist_ok=True)
    partial = made.with_suffix(".partial")
    (_write_safetensors if quant == "BF16" else _write_gguf)(partial, shape, quant)
    return partial.rename(made)


def _type_of(name: str, index: int, quant: str) -> str:
    if quant != "Q4_K_M":
        return quant
    more = name.endswith(("ffn_down.weight", "attn_v.weight")) and index % 2 == 0
    return "Q6_K" if more or name == "token_embd.weight" else "Q4_K"


def _blocks(rng: np.random.Generator, kind: str, dims: tuple[int, int]) -> np.ndarray:
    weights, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (math.prod(dims) // weights, nbytes), dtype=np.uint8)
    for at in {"Q6_K": (208,), "Q4_K": (0, 2)}.get(kind, (0,)):
        blocks[:, at : at + 2] = np.array([1e-3], dtype=np.float16).view(np.uint8)
    return blocks.reshape(dims[0], -1)


def _write_gguf(path: Path, shape: Shape, quant: str) -> None:
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, value in (
        (writer.add_context_length, shape.context),
        (writer.add_embedding_length, shape.hidden),
        (writer.add_block_count, shape.layers),
        (writer.add_feed_forward_length, shape.wide),
        (writer.add_head_count, shape.heads),
        (writer.add_head_count_kv, shape.kv_heads),
        (writer.add_rope_freq_base, 1e6),
        (writer.add_layer_norm_rms_eps, 1e-6),
    ):
        add(value)
    add_tokenizer(writer, shape.vocab)
    rng = np.random.default_rng(0)
    for index, (name, dims) in enumerate(shape.tensors()):
        if len(dims) == 1:
            writer.add_tensor(name, rng.standard_normal(dims, np.float32))
        else:
            kind = _type_of(name, index, quant)
            writer.add_tensor(
                name, _blocks(rng, kind, dims), raw_dtype=gguf.GGMLQuantizationType[kind]
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _hf_tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    given = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    inner = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for name, dims in shape.tensors():
        if name in given:
            yield given[name], dims
        else:
            _, layer, module, what = name.split(".")
            yield f"model.layers.{layer}.{inner[module]}.{what}", dims


def _write_safetensors(path: Path, shape: Shape, quant: str) -> None:
    path.mkdir()
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.wide,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rope_theta": 1e6,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, dims in _hf_tensors(shape):
        start = end
        end = end + 2 * math.prod(dims)
        header[name] = {"dtype": quant, "shape": dims, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, dims in _hf_tensors(shape):
            rows = dims if len(dims) == 2 else (1, *dims)
            for start in range(0, rows[0], 4096):
                values = rng.standard_normal(
                    (min(4096, rows[0] - start), rows[1]), np.float32
                ) * np.float32(0.03)
                file.write((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16).tobytes())


def measure(large: Path, small: Path, weights: str) -> dict[str, Any]:
    """Load `large` in a new process, after a load of `small` with the same formats."""
    with tempfile.TemporaryDirectory(dir=large.parent) as cache:
        command = [sys.executable, "-c", _WORK, str(large), str(small), weights, cache]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=dict(os.environ)
        )
    found = json.loads(done.stdout)
    file = large / "model.safetensors" if large.is_dir() else large
    megabytes = file.stat().st_size / 1e6
    spans = found["spans"]
    return {
        "file": f"{large.stem.rpartition('-')[2]} -> {weights}",
        "MB": megabytes,
        "packed MB": found["packed"] / 1e6,
        **{f"{name} ms/MB": 1000 * span["cpu"] / megabytes for name, span in spans.items()},
        "CPU ms/MB": 1000 * sum(span["cpu"] for span in spans.values()) / megabytes,
        "target": _TARGET_MS,
        "seconds": sum(span["seconds"] for span in spans.values()),
        "read MB": found["read"] / 1e6,
        "written MB": found["written"] / 1e6,
        "peak beside weights MB": (found["peak"] - found["packed"]) / 1e6,
        "stays MB": (found["rss"] - found["rss_before"]) / 1e6,
    }


def main() -> None:
    options: argparse.ArgumentParser = harness.parser(__doc__ or "")
    options.add_argument(
        "--models",
        type=Path,
        default=Path(__file__).parents[1] / "models",
        help="directory for the files",
    )
    options.add_argument("--only", default="", help="measure only this format")
    chosen = options.parse_args()
    shape = SHAPES["tiny"] if chosen.quick else _SHAPE
    rows = []
    for quant, weights in _CASES:
        if chosen.only in quant:
            large, small = (
                random_file(chosen.models, one, quant) for one in (shape, SHAPES["tiny"])
            )
            rows.append(measure(large, small, weights))
    harness.report("bench_packing", rows, options=chosen)


if __name__ == "__main__":
    main()
