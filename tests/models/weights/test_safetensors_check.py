"""Weight files: sound ones pass, and each kind of damage is refused with a message that names file
and tensor.
"""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from helpers.raising import assert_raises
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.finite_check import first_non_finite
from kvboost_edge.models.weights.safetensors_check import check_weights, read_header, weight_files

HIDDEN = 32
VOCAB = 48
LAYERS = 2
HEADS = 4
KV_HEADS = 2
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
}
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def tensors(**changes):
    rng = np.random.default_rng(0)
    shapes = {EMBEDDING: (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found.update({name.replace("__", "."): value for name, value in changes.items()})
    return {name: value for name, value in found.items() if value is not None}


@pytest.fixture
def model(tmp_path):
    """A directory with one sound weight file."""
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


def split(model):
    """Turn the single file into two shards and an index."""
    parts = list(tensors().items())
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {}
    for name, part in zip(names, (dict(parts[:4]), dict(parts[4:])), strict=True):
        save_file(part, model / name)
        weight_map |= dict.fromkeys(part, name)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def write(path, header, data=b"", *, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def check(model, **changes):
    return check_weights(model, {**CONFIG, **changes})


def test_a_valid_file_passes(model):
    summary = check(model)
    count = sum(value.size for value in tensors().values())
    assert (summary.num_params, summary.nbytes, summary.dtypes) == (
        count,
        4 * count,
        {"F32": count},
    )
    assert summary.files == (model / "model.safetensors",)


def test_valid_shards_pass(model):
    whole = check(model)
    split(model)
    summary = check(model)
    assert (summary.num_params, summary.nbytes) == (whole.num_params, whole.nbytes)
    assert [path.name for path in summary.files] == sorted(
        path.name for path in model.glob("*.safetensors")
    )


def test_a_tiny_model_passes(tiny_model_dir):
    config = json.loads((tiny_model_dir / "config.json").read_text())
    assert check_weights(tiny_model_dir, config).num_params > 10_000


def test_every_truncation_is_refused(model):
    path = model / "model.safetensors"
    good = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        assert_raises(ModelFormatError, r"model\.safetensors", check, model)
    path.write_bytes(good + b"\0")
    assert_raises(ModelFormatError, "after the last tensor", check, model)


@given(data=st.data())
def test_garbage_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "garbage.safetensors"
    raw = data.draw(st.binary(max_size=80))
    if data.draw(st.booleans()):
        write(path, raw)
    else:
        path.write_bytes(raw)
    with pytest.raises(ModelFormatError, match=r"garbage\.safetensors"):
        read_header(path)


def test_a_bit_flipped_in_the_header_never_crashes(model):
    path = model / "model.safetensors"
    good = bytearray(path.read_bytes())
    length = int.from_bytes(good[:8], "little")
    rng = np.random.default_rng(1)
    for bit in rng.integers(0, 8 * (8 + length), 300):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(bad)
        try:
            entries = read_header(path)
        except ModelFormatError as error:
            # A bit flipped inside a name may go unnoticed.
            assert "model.safetensors" in str(error)  # noqa: PT017
        else:
            assert all(8 <= entry.start <= entry.stop <= len(good) for entry in entries)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 0, 1])
def test_header_length_is_checked_before_allocation(model, length):
    write(model / "model.safetensors", {"a": {}}, length=length)
    with pytest.raises(ModelFormatError, match=str(length)):
        check(model)


def test_a_header_over_the_limit_is_refused(model):
    with open(model / "model.safetensors", "wb") as file:
        file.write((150_000_000).to_bytes(8, "little"))
        file.truncate(150_000_100)
    with pytest.raises(ModelFormatError, match="100000000"):
        check(model)


@pytest.mark.parametrize("size", [0, 1])
def test_a_large_header_without_data_is_refused(model, size):
    """Checking many tensors with zero or one element each would take many seconds."""
    names = [f"x{index}" for index in range(25_000)]
    header = {
        name: {
            "dtype": "F32",
            "shape": [size],
            "data_offsets": [4 * size * index, 4 * size * (index + 1)],
        }
        for index, name in enumerate(names)
    }
    write(model / "model.safetensors", header, bytes(4 * size * len(names)))
    with pytest.raises(ModelFormatError, match=f"describes only {100_000 * size} bytes of data"):
        read_header(model / "model.safetensors")


def test_a_large_header_with_data_is_read(model):
    """A mixture of experts has thousands of tensors in a file."""
    nbytes = 256
    names = [f"model.layers.0.mlp.experts.{index}.up_proj.weight" for index in range(20_000)]
    header = {
        name: {
            "dtype": "I8",
            "shape": [nbytes * 2],
            "data_offsets": [2 * nbytes * index, 2 * nbytes * (index + 1)],
        }
        for index, name in enumerate(names)
    }
    write(model / "model.safetensors", header, bytes(2 * nbytes * len(names)))
    assert len(json.dumps(header)) > 1 << 20
    assert [entry.name for entry in read_header(model / "model.safetensors")] == names


def test_a_repeated_name_among_many_is_found(model):
    """Counting each name separately would take minutes."""
    text = "".join(f'"x{index}": 0, ' for index in range(100_000))
    write(
        model / "model.safetensors",
        b"{%s}" % (text + '"last": 0, "last": 0').encode(),
        b"\0" * 8_000_000,
    )
    with pytest.raises(ModelFormatError, match="'last' appears twice"):
        read_header(model / "model.safetensors")


def test_an_index_over_the_limit_is_refused(model):
    split(model)
    with open(model / "model.safetensors.index.json", "r+b") as file:
        file.truncate(64_000_001)
    with pytest.raises(ModelFormatError, match=r"index\.json has 64000001 bytes, over the limit"):
        check(model)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_HEADERS = {
    "offset after the end": ({"w": {**ENTRY, "shape": [4], "data_offsets": [0, 16]}}, 8),
    "offset far after the end": (
        {"w": {**ENTRY, "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        8,
    ),
    "starts late": ({"w": {**ENTRY, "data_offsets": [4, 12]}}, 12),
    "backwards": ({"w": {**ENTRY, "data_offsets": [8, 0]}}, 8),
    "negative": ({"w": {**ENTRY, "data_offsets": [-8, 0]}}, 8),
    "three offsets": ({"w": {**ENTRY, "data_offsets": [0, 8, 16]}}, 8),
    "offsets are floats": ({"w": {**ENTRY, "data_offsets": [0.0, 8.0]}}, 8),
    "size is not the shape's": ({"w": {**ENTRY, "shape": [3]}}, 8),
    "negative shape": ({"w": {**ENTRY, "shape": [-2]}}, 8),
    "huge shape": ({"w": {**ENTRY, "shape": [1 << 61] * 32}}, 8),
    "too many dimensions": ({"w": {**ENTRY, "shape": [1] * 5000}}, 8),
    "shape is a bool": ({"w": {**ENTRY, "shape": [True, 2]}}, 8),
    "unknown dtype": ({"w": {**ENTRY, "dtype": "F33"}}, 8),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "entry is a list": ({"w": [1, 2]}, 8),
    "overlap": ({"v": ENTRY, "w": {**ENTRY, "data_offsets": [4, 12]}}, 12),
    "same place": ({"v": ENTRY, "w": ENTRY}, 8),
    "hole": ({"v": ENTRY, "w": {**ENTRY, "data_offsets": [12, 20]}}, 20),
    "no tensor": ({"__metadata__": {"format": "pt"}}, 0),
    "a list": (b"[1, 2]", 0),
    "twice": (b'{"w": %s, "w": %s}' % (json.dumps(ENTRY).encode(), json.dumps(ENTRY).encode()), 8),
    "deep": (b"[" * 200_000, 0),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_invalid_layouts_are_refused(model, name):
    header, size = BAD_HEADERS[name]
    write(model / "model.safetensors", header, b"\0" * size)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors") as raised:
        check(model)
    if isinstance(header, dict) and "w" in header:
        assert "'w'" in str(raised.value)


def test_a_valid_layout_is_read(tmp_path):
    values = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.zeros((0, 4), np.float16),
        "c": np.array(7),
    }
    save_file(values, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    found = {entry.name: entry for entry in read_header(tmp_path / "x.safetensors")}
    assert {name: entry.shape for name, entry in found.items()} == {
        name: value.shape for name, value in values.items()
    }
    for name, value in values.items():
        assert raw[found[name].start : found[name].stop] == value.tobytes()


BAD_CONFIGS = {
    "vocab_size": ({"vocab_size": VOCAB + 1}, EMBEDDING, "vocab_size"),
    "hidden_size": ({"hidden_size": HIDDEN * 2}, EMBEDDING, "hidden_size"),
    "more layers": ({"num_hidden_layers": 3}, "layer 2", "num_hidden_layers"),
    "fewer layers": ({"num_hidden_layers": 1}, "model.layers.1.", "num_hidden_layers"),
    "kv heads": ({"num_key_value_heads": 4}, "k_proj", "num_key_value_heads"),
    "head_dim": ({"head_dim": 16}, "_proj", "head_dim=16"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_config_that_contradicts_the_weights_is_refused(model, name):
    changes, tensor, key = BAD_CONFIGS[name]
    with pytest.raises(ModelFormatError) as raised:
        check(model, **changes)
    assert tensor in str(raised.value)
    assert key in str(raised.value)


def test_a_missing_or_one_dimensional_embedding_is_refused(model):
    for value in (None, np.zeros(VOCAB, np.float32)):
        save_file(tensors(model__embed_tokens__weight=value), model / "model.safetensors")
        with pytest.raises(ModelFormatError, match="embed"):
            check(model)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 5, -1])
def test_nan_and_infinity_are_found_in_every_float_type(model, dtype, bad, where):
    values = np.random.default_rng(2).standard_normal(HIDDEN * HIDDEN)
    values[where] = bad
    if dtype == "BF16":
        raw = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]).tobytes()
    header = {}
    data = b""
    for name, value in tensors().items():
        piece, kind = (raw, dtype) if name == QUERY else (value.tobytes(), "F32")
        header[name] = {
            "dtype": kind,
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(piece)],
        }
        data += piece
    write(model / "model.safetensors", header, data)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors.*q_proj.*NaN"):
        check(model)
    assert check_weights(model, CONFIG, check_finite=False).num_params > 0


def test_the_mask_constant_of_old_checkpoints_may_be_infinite(model):
    constant = {"model__layers__0__attention__masked_bias": np.array(-np.inf, np.float16)}
    save_file(tensors(**constant), model / "model.safetensors")
    assert check(model).dtypes["F16"] == 1


@given(
    count=st.integers(1, 300_000),
    bad=st.lists(st.integers(0, 299_999), max_size=3),
    dtype=st.sampled_from(["F32", "F16", "BF16"]),
    offset=st.integers(0, 9),
)
def test_first_non_finite_equals_numpy(tmp_path_factory, count, bad, dtype, offset):
    values = np.full(count, 3.0e4, dtype=np.float32)
    values[[i for i in bad if i < count]] = np.nan
    path = tmp_path_factory.getbasetemp() / "values"
    raw = values.astype(np.float16).tobytes() if dtype == "F16" else values.tobytes()
    if dtype == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    path.write_bytes(b"\xff" * offset + raw + b"\xff" * 8)
    truth = np.flatnonzero(~np.isfinite(values))
    expected = int(truth[0]) if len(truth) else None
    assert first_non_finite(path, dtype, offset, offset + len(raw)) == expected
    assert first_non_finite(path, "I32", 0, offset) is None


def test_a_passed_check_is_cached_until_the_file_changes(model, monkeypatch):
    from kvboost_edge.models.weights import safetensors_check

    calls = []
    real = safetensors_check.first_non_finite

    def counted(path, *args):
        calls.append(path.name)
        return real(path, *args)

    monkeypatch.setattr(safetensors_check, "first_non_finite", counted)
    check(model)
    assert len(calls) == len(tensors())
    check(model)
    assert len(calls) == len(tensors())
    bad = tensors()
    bad[QUERY][3, 3] = np.nan
    save_file(bad, model / "model.safetensors")
    for _ in range(2):  # a damaged file is not recorded as sound
        with pytest.raises(ModelFormatError, match="q_proj"):
            check(model)


def _drop_shard(model):
    (model / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors"


def _shard_of_other_tensors(model):
    shutil.copy(
        model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors"
    )
    return "model-00002-of-00002.safetensors"


def _lacks_a_tensor(model):
    save_file(
        {"model.layers.1.extra": np.zeros(1, np.float32)},
        model / "model-00002-of-00002.safetensors",
    )
    return "model-00002-of-00002.safetensors"


def _edit_index(model, value):
    (model / "model.safetensors.index.json").write_text(json.dumps(value))
    return "index.json"


SHARD_FAULTS = {
    "missing": _drop_shard,
    "tensor in two shards": _shard_of_other_tensors,
    "tensor in no shard": _lacks_a_tensor,
    "index without map": lambda model: _edit_index(model, {"metadata": {}}),
    "index is a list": lambda model: _edit_index(model, []),
    "index leaves the directory": lambda model: _edit_index(
        model, {"weight_map": {"a": "../x.safetensors"}}
    ),
    "index names a pickle": lambda model: _edit_index(model, {"weight_map": {"a": "x.bin"}}),
}


@pytest.mark.parametrize("name", SHARD_FAULTS)
def test_faults_of_shards_name_the_file(model, name):
    split(model)
    file = SHARD_FAULTS[name](model)
    with pytest.raises(ModelFormatError) as raised:
        check(model)
    assert file in str(raised.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_by_name_and_not_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(ModelFormatError, match=name):
        check(tmp_path)


def test_missing_weights_are_refused(tmp_path):
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        weight_files(tmp_path)
