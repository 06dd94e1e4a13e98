"""Q4_K_M files: tensors of several block formats in one model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.gguf.writer import q4_k_m, write_gguf
from helpers.models.tiny_models import save_tiny_model
from helpers.oracles.bit_cases import logits_in_any_pass
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.families import describe_model
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.packed.plan import check_tensors, pack_plan, plan_bytes

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


def test_block_formats_take_little_more_than_the_file(tmp_path: Path) -> None:
    """Queries and keys of Q4_K and values of Q6_K are entries of their own; nothing becomes int8."""
    model = save_tiny_model("llama", tmp_path / "model", **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf", kind=q4_k_m)
    with GgufSource(read_gguf(path)) as source:
        plan = pack_plan(describe_model(Checkpoint.open(path).config), "auto", source)
        check_tensors(plan, source)
    found = {entry.name: (entry.kind, len(entry.parts)) for entry in plan if entry.name.startswith("layer1.")}
    assert found["layer1.qkv"] == ("q4k", 2)
    assert found["layer1.qkv+1"] == ("q6k", 1)
    assert {entry.kind for entry in plan} == {"q4k", "q6k", "vector"}
    assert plan_bytes(plan) <= 1.03 * Checkpoint.open(path).summary().nbytes


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_runs_of_block_formats_are_the_same_in_any_pass(name: str, tmp_path: Path) -> None:
    """Matrices in two formats, with a bias and without: prompts in pieces and at once; near the floats of the file."""
    model = save_tiny_model(name, tmp_path / "model", **WIDE)
    path = write_gguf(model, tmp_path / "m.gguf", kind=q4_k_m)
    found, exact = logits_in_any_pass(path)
    assert np.linalg.norm(found - exact) <= 3e-2 * np.linalg.norm(exact)
