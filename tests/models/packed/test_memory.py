"""Packing streams: its memory is bounded by the packed weights and a constant, not by the checkpoint."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, VOCAB, HIDDEN, WIDE = 3, 49152, 320, 24576
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS, "num_attention_heads": 5, "num_key_value_heads": 5, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS, WIDTH = 64, 1024
MIXTURE = {
    **CONFIG, "model_type": "qwen3_moe", "vocab_size": 512, "num_hidden_layers": 1, "head_dim": 64,
    "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": WIDTH, "norm_topk_prob": True,
}  # fmt: skip
PACK = """
import sys
from pathlib import Path
from kvboost_edge.engine.fit import packed_place
from kvboost_edge.host.memory import process_peak
from kvboost_edge.kernels.ahead import compile_ahead
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.families import describe_model
from kvboost_edge.models.packed.entries import packing_entries
from kvboost_edge.models.packed.file import load_packed
from kvboost_edge.models.packed.plan import pack_plan
model = Checkpoint.open(sys.argv[1])
plan = pack_plan(describe_model(model.config), "int4")
with model.open_source() as source:
    compile_ahead(packing_entries(plan, source), 2)
cache = Path(sys.argv[2])
model.fingerprint(cache_dir=cache)
before = process_peak()
load_packed(model, plan, weights="int4", cache_dir=cache, num_threads=2).close()
print(process_peak() - before, packed_place(model, "int4", [], 2).peak)
"""
SCRIPT = """
import sys
from pathlib import Path
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.host.memory import process_peak
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.families import describe_model
from kvboost_edge.models.packed.file import load_packed
from kvboost_edge.models.packed.plan import pack_plan
model, weights = Checkpoint.open(sys.argv[1]), sys.argv[3]
cache = Path(sys.argv[2]) if sys.argv[2] else NO_CACHE
plan = pack_plan(describe_model(model.config), weights)
packed = load_packed(model, plan, weights=weights, cache_dir=cache, num_threads=2)
max(packed.array(name).max() for entry in plan for name, _ in entry.sections)
print(process_peak(), packed.nbytes)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 MB of float32 weights, all 0: the file is a hole, but its pages take memory like any other."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, WIDE)
    return _save_zeros(tmp_path_factory.mktemp("large"), shapes, CONFIG)


def _save_zeros(directory: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, object]) -> Path:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.alone
@pytest.mark.parametrize("is_kept", [True, False])
def test_peak_memory(is_kept: bool, model_dir: Path, tmp_path: Path) -> None:
    """All weights are read in the end: pages of the mapped file count as memory in private do."""
    command = [sys.executable, "-c", SCRIPT, str(model_dir), str(tmp_path) if is_kept else "", "int8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, packed = (int(number) for number in done.stdout.split())
    assert (model_dir / "model.safetensors").stat().st_size > 400e6
    assert peak < packed + 250e6


@pytest.mark.alone
def test_a_tensor_of_all_experts_is_never_held_whole(tmp_path: Path) -> None:
    """Packing reads one expert's rows at a time: beside the file it takes what `doctor` says, and less than one of the
    tensors."""
    at = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, HIDDEN), "lm_head.weight": (512, HIDDEN), "model.norm.weight": (HIDDEN,),
        f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN), f"{at}mlp.gate.weight": (EXPERTS, HIDDEN),
        f"{at}mlp.experts.gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN),
        f"{at}mlp.experts.down_proj": (EXPERTS, HIDDEN, WIDTH),
    }  # fmt: skip
    shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkv"}
    shapes |= {f"{at}self_attn.{name}_norm.weight": (64,) for name in "qk"}
    shapes |= {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    model = tmp_path / "model"
    model.mkdir()
    _save_zeros(model, shapes, MIXTURE)
    command = [sys.executable, "-c", PACK, str(model), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    grown, bound = (int(number) for number in done.stdout.split())
    assert grown < bound < 4 * math.prod(shapes[f"{at}mlp.experts.gate_up_proj"])
    assert bound < 1e9
