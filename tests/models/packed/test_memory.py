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
    directory = tmp_path_factory.mktemp("large")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (WIDE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, WIDE)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (directory / "config.json").write_text(json.dumps(CONFIG))
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
