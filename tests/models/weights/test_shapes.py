"""Layers of a checkpoint against its config: missing tensors are found without iterating up to the
config's claimed counts.
"""

import time
from pathlib import Path

import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.shapes import check_shapes

FILE = Path("model") / "model.safetensors"


def test_a_claim_of_many_layers_is_cheap_to_refuse():
    shapes = {"model.embed_tokens.weight": (FILE, (10, 4))}
    shapes |= {f"model.layers.{layer}.input_layernorm.weight": (FILE, (4,)) for layer in (0, 1, 3)}
    started = time.process_time()
    with pytest.raises(
        ModelFormatError, match=r"layer 2 has no tensors, but config\.json gives num"
    ):
        check_shapes(shapes, {"num_hidden_layers": 10_000}, FILE.parent)
    assert time.process_time() - started < 0.5
    with pytest.raises(ModelFormatError, match="must be an integer from 1 to 10000"):
        check_shapes(shapes, {"num_hidden_layers": 2**31}, FILE.parent)


@pytest.mark.parametrize("given", ["1", [[]], {"a": 1}, 1.5, -1, True])
def test_mtp_layers_are_counted_separately(given):
    shapes = {
        "model.embed_tokens.weight": (FILE, (10, 4)),
        "model.layers.0.input_layernorm.weight": (FILE, (4,)),
    }
    shapes |= {"model.layers.1.input_layernorm.weight": (FILE, (4,))}
    config = {"num_hidden_layers": 1, "num_nextn_predict_layers": given}
    with pytest.raises(
        ModelFormatError, match=r"model: num_nextn_predict_layers=.* must be an integer"
    ):
        check_shapes(shapes, config, FILE.parent)
    check_shapes(shapes, {**config, "num_nextn_predict_layers": 1}, FILE.parent)
    with pytest.raises(ModelFormatError, match="belongs to layer 1, but"):
        check_shapes(shapes, {**config, "num_nextn_predict_layers": None}, FILE.parent)


def test_errors_name_the_source_of_the_config():
    shapes = {"model.embed_tokens.weight": (Path("m.gguf"), (10, 4))}
    with pytest.raises(
        ModelFormatError, match=r"m\.gguf: .*has 10 rows, but m\.gguf gives vocab_size=11"
    ):
        check_shapes(shapes, {"vocab_size": 11}, Path("m.gguf"), "m.gguf")
