"""Layers of a checkpoint against its config: what is missing is found without counting to what the config claims."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.shapes import check_shapes

FILE = Path("model") / "model.safetensors"


def test_a_claim_of_many_layers_costs_nothing() -> None:
    shapes = {"model.embed_tokens.weight": (FILE, (10, 4))}
    shapes |= {f"model.layers.{layer}.input_layernorm.weight": (FILE, (4,)) for layer in (0, 1, 3)}
    started = time.process_time()
    with pytest.raises(ModelFormatError, match=r"no tensor of layer 2 is there, but config\.json says num"):
        check_shapes(shapes, {"num_hidden_layers": 10_000}, FILE.parent)
    assert time.process_time() - started < 0.5
    with pytest.raises(ModelFormatError, match="must be an integer from 1 to 10000"):
        check_shapes(shapes, {"num_hidden_layers": 2**31}, FILE.parent)


def test_messages_say_where_the_config_comes_from() -> None:
    shapes = {"model.embed_tokens.weight": (Path("m.gguf"), (10, 4))}
    with pytest.raises(ModelFormatError, match=r"m\.gguf: .*has 10 rows, but m\.gguf says vocab_size=11"):
        check_shapes(shapes, {"vocab_size": 11}, Path("m.gguf"), "m.gguf")
