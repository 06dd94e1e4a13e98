"""Packing streams: its memory is bounded by the size of the packed weights plus a constant,
independent of the checkpoint.
"""

import json
import math
import subprocess
import sys
import tracemalloc

import pytest

from benchmarks.data.mixture_shapes import Experts, Qwen3MoeShape
from benchmarks.data.random_model import write_gguf
from helpers.models.gpt_oss_files import save_gpt_oss
from kvboost_edge.models.checkpoint import Checkpoint

LAYERS = 3
VOCAB = 49152
HIDDEN = 320
WIDE = 24576
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = 64
WIDTH = 1024
WEIGHTS = EXPERTS * 2 * WIDTH * HIDDEN
MIXTURE = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "num_hidden_layers": 1,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": WIDTH,
    "norm_topk_prob": True,
}
GPT_OSS = {
    **CONFIG,
    "model_type": "gpt_oss",
    "vocab_size": 512,
    "num_hidden_layers": 1,
    "head_dim": 64,
    "sliding_window": 32,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "intermediate_size": WIDTH,
    "quantization_config": {"quant_method": "mxfp4"},
}
PACK = """
import sys
from pathlib import Path
from kvboost_edge.engine.memory.check import packed_place
from kvboost_edge.host.memory import process_peak
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.stream import packing_entries
from kvboost_edge.models.packed.weight_file import load_packed
from kvboost_edge.models.packed.pack_plan import pack_plan
model = Checkpoint.open(sys.argv[1])
with model.open_source() as source:
    plan = pack_plan(describe_model(model.config), sys.argv[3], source)
    compile_ahead(packing_entries(plan, source), 2)
cache = Path(sys.argv[2])
model.fingerprint(cache_dir=cache)
before = process_peak()
load_packed(model, plan, weights=sys.argv[3], cache_dir=cache, num_threads=2).close()
print(process_peak() - before, packed_place(model, sys.argv[3], [], 2).peak)
"""
SCRIPT = """
import sys
from pathlib import Path
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.host.memory import process_peak
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.weight_file import load_packed
from kvboost_edge.models.packed.pack_plan import pack_plan
model, weights = Checkpoint.open(sys.argv[1]), sys.argv[3]
cache = Path(sys.argv[2]) if sys.argv[2] else NO_CACHE
plan = pack_plan(describe_model(model.config), weights)
packed = load_packed(model, plan, weights=weights, cache_dir=cache, num_threads=2)
max(packed.array(name).max() for entry in plan for name, _ in entry.sections)
print(process_peak(), packed.nbytes)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model with 400 MB of float32 weights, all 0. The file is sparse, but its mapped pages take
    memory like any others.
    """
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        shapes |= {
            f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")
        }
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, WIDE)
    return _save_zeros(tmp_path_factory.mktemp("large"), shapes, CONFIG)


def _save_zeros(directory, shapes, config):
    """Write zeros as float32, or as bytes for blocks and scales."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        is_bytes = name.endswith(("_blocks", "_scales"))
        start = end
        end = end + (1 if is_bytes else 4) * math.prod(shape)
        header[name] = {
            "dtype": "U8" if is_bytes else "F32",
            "shape": shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("is_kept", [True, pytest.param(False, marks=pytest.mark.full)])
def test_packing_memory_is_bounded(is_kept, model_dir, tmp_path):
    """All weights are read in the end. Pages of the mapped file count like private memory."""
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(model_dir),
        str(tmp_path) if is_kept else "",
        "int8",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, packed = (int(number) for number in done.stdout.split())
    assert (model_dir / "model.safetensors").stat().st_size > 400e6
    assert peak < packed + 250e6


def _around_experts():
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (512, HIDDEN),
        "lm_head.weight": (512, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    return shapes | {
        f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")
    }


def _mixture(kind, directory):
    """Write a model of one layer with experts, whose largest tensor has `WEIGHTS` weights."""
    at = "model.layers.0."
    directory.mkdir()
    if kind == "Q4_0":
        path = directory / "model.gguf"
        wide = 2 * WIDTH
        experts = Experts(EXPERTS, 4, wide)
        write_gguf(
            path,
            Qwen3MoeShape(HIDDEN, 1, 5, 5, wide, vocab=512, own_head_dim=64, experts=experts),
            kind,
        )
        return path
    if kind == "F32":
        shapes = {
            f"{at}mlp.gate.weight": (EXPERTS, HIDDEN),
            f"{at}mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
            f"{at}mlp.experts.down_proj": (EXPERTS, HIDDEN, WIDTH),
            **{f"{at}self_attn.{name}_norm.weight": (64,) for name in "qk"},
        }
        return _save_zeros(directory, {**_around_experts(), **shapes}, MIXTURE)
    shapes = {
        f"{at}mlp.router.{name}": (EXPERTS, HIDDEN)[: 1 + (name == "weight")]
        for name in ("weight", "bias")
    }
    shapes |= {f"{at}self_attn.{name}_proj.bias": (HIDDEN,) for name in "qkvo"} | {
        f"{at}self_attn.sinks": (5,)
    }
    for name, rows, inputs in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        whole = f"{at}mlp.experts.{name}"
        blocks = (EXPERTS, rows, inputs // 32)
        shapes |= {
            f"{whole}_blocks": (*blocks, 16),
            f"{whole}_scales": blocks,
            f"{whole}_bias": blocks[:2],
        }
    return _save_zeros(directory, {**_around_experts(), **shapes}, GPT_OSS)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "MXFP4"])
@pytest.mark.some(3)
def test_experts_are_packed_without_loading_the_whole_tensor(kind, tmp_path):
    """Packing reads one expert's rows at a time. In addition to the file it takes the memory that
    `doctor` reports, which is less than two threads would need to hold 4 bits and a code of each
    weight.
    """
    model = _mixture(kind, tmp_path / "model")
    weights = "int4" if kind == "F32" else "auto"
    command = [sys.executable, "-c", PACK, str(model), str(tmp_path / "cache"), weights]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    grown, bound = (int(number) for number in done.stdout.split())
    assert grown < bound < 2 * 1.5 * WEIGHTS < 1e9


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "MXFP4"])
def test_few_rows_of_an_expert_are_read_separately(kind, tmp_path):
    """Reading them takes less than half the memory of the expert's matrix in the file, so packing
    can split large matrices.
    """
    if kind == "MXFP4":
        sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_local_experts": 2}
        path = save_gpt_oss(tmp_path / "model", mxfp4=True, num_hidden_layers=1, **sizes)
    else:
        path = tmp_path / "model.gguf"
        shape = Qwen3MoeShape(
            256, 1, 4, 2, 2048, vocab=512, own_head_dim=64, experts=Experts(2, 2, 2048)
        )
        write_gguf(path, shape, kind)
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    with Checkpoint.open(path).open_source() as source:
        assert source.shape(name) == (2048, 256)
        for read in (source.quant_rows, source.rows):
            read(name, 0, 16)  # allocate what is made once
            tracemalloc.start()
            try:
                read(name, 1000, 1016)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert 16 * 256 // 2 < peak < 2048 * 256 // 2 // 2
