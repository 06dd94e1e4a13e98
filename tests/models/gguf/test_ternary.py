"""Files of Q2_0, of which early ones have larger blocks under the same type number, and types of
llama.cpp's forks.
"""

import numpy as np
import pytest

from helpers.gguf.types import TYPES, dequantized
from helpers.gguf.writer import save_gguf, write_gguf
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
UP = b"blk.0.ffn_up.weight"
# After a tensor's name: u32 dimensions, u64 for each of the two, u32 type, u64 offset.
TYPE_AT = len(UP) + 20


@pytest.mark.parametrize("kind", ["Q2_0", "Q2_0_g128"])
def test_tensor_offsets_determine_the_block_size(kind, tmp_path):
    """Files of both block sizes have the same type number. The rule also holds next to tensors of
    another type.
    """
    of = {"blk.0.attn_q.weight": "Q8_0"}
    path = save_gguf("llama", tmp_path, SIZES, kind=lambda name: of.get(name, kind))
    data = path.read_bytes()
    at = data.index(UP) + TYPE_AT
    assert int.from_bytes(data[at : at + 4], "little") == TYPES[kind][0] == 42
    header = read_gguf(path)
    found = {name: tensor.type for name, tensor in header.tensors.items() if len(tensor.shape) == 2}
    assert found == {name: of.get(name, kind) for name in found}
    tensor = header.tensors[UP.decode()]
    raw = np.frombuffer(data[tensor.start : tensor.stop], np.uint8).reshape(384, -1)
    with GgufSource(header) as source:
        found = source.rows("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(found, dequantized(kind, raw))


def _cut(data):
    return data[:-64]


def _longer(data):
    return data + bytes(40) + b"x"


def _moved(data):
    """Set the offset of one tensor to that of another."""
    at = data.index(UP) + TYPE_AT + 4
    return data[:at] + (32).to_bytes(8, "little") + data[at + 8 :]


@pytest.mark.parametrize("damage", [_cut, _longer, _moved])
@pytest.mark.parametrize("kind", ["Q2_0", "Q2_0_g128"])
def test_a_file_that_fits_neither_size_is_refused(kind, damage, tmp_path):
    path = save_gguf("llama", tmp_path, SIZES, kind=kind)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelFormatError, match=r"m\.gguf.*(tensor|unexpected bytes)"):
        read_gguf(path)


def test_rows_of_half_a_block_of_128_use_blocks_of_64(tmp_path):
    path = save_gguf("llama", tmp_path, {**SIZES, "intermediate_size": 192}, kind="Q2_0")
    header = read_gguf(path)
    assert header.tensors["blk.0.ffn_down.weight"].shape == (128, 192)
    assert header.tensors["blk.0.ffn_down.weight"].type == "Q2_0"


def test_models_with_rotated_activations_are_refused(tmp_path):
    model = save_gguf("llama", tmp_path, SIZES, kind="Q2_0").with_name("model")
    path = write_gguf(model, tmp_path / "r.gguf", general={"prism.hadamard.size": 128})
    with pytest.raises(
        ModelFormatError, match=r"r\.gguf: key 'prism.hadamard.size'.*not supported"
    ):
        read_gguf(path)


@pytest.mark.parametrize(
    ("number", "message"), [(36, "I2_S.*bitnet.cpp"), (43, "type 43"), (44, "type 44")]
)
def test_types_of_other_projects_are_refused(number, message, tmp_path):
    path = save_gguf("llama", tmp_path, SIZES, kind="Q2_0")
    data = bytearray(path.read_bytes())
    at = data.index(UP) + TYPE_AT
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match=rf"ffn_up.*{message}"):
        read_gguf(path)


@pytest.mark.parametrize("kind", ["Q2_0", "Q2_0_g128", "Q1_0", "TQ1_0"])
def test_mutations_are_refused_or_have_finite_weights(kind, tmp_path):
    """Mutations flip bits in the header or the data, or truncate the file."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 256}
    path = save_gguf("llama", tmp_path, sizes, kind=kind, tokenizer=False)
    sound = path.read_bytes()
    start = min(tensor.start for tensor in read_gguf(path).tensors.values())
    rng = np.random.default_rng(9)
    refused = 0
    for number in range(40):
        data = bytearray(sound)
        for at in rng.integers(0, start if number % 2 else len(data), 3):
            data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data[: len(data) - 40 * (number % 10 == 0)])
        try:
            checkpoint = Checkpoint.open(path, cache_dir=NO_CACHE)
            checkpoint.summary()
            with checkpoint.open_source() as source:
                for name in source.names():
                    assert np.isfinite(source.rows(name)).all()
        except ModelFormatError as error:
            refused += "m.gguf" in str(error)
    assert 5 < refused < 40
