"""The GGUF reader: its results equal those of the `gguf` package, and damage raises a
ModelFormatError that names the problem.
"""

import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter, quants

from helpers.gguf.writer import write_gguf
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.engine.build import load_tokenizer
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf

MAX_BYTES = 200e6


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A tiny quantized Llama, which tests must not change."""
    directory = tmp_path_factory.mktemp("gguf")
    shapes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    save_tiny_model("llama", directory / "model", **shapes)
    kinds = {
        "blk.0.attn_q.weight": "Q4_0",
        "blk.0.ffn_up.weight": "Q4_1",
        "blk.0.ffn_down.weight": "Q8_0",
    }
    return write_gguf(
        directory / "model", directory / "m.gguf", kind=lambda name: kinds.get(name, "F16")
    )


def test_keys_and_tensors_equal_the_package(tiny_gguf):
    ours = read_gguf(tiny_gguf)
    theirs = GGUFReader(tiny_gguf)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.values) == set(fields)
    assert ours.version == 3
    for name, field in fields.items():
        value = field.contents()
        if ours.has_strings(name):
            assert ours.strings(name) == value
        elif isinstance(ours.values[name], np.ndarray):
            assert ours.values[name].tolist() == value
        elif isinstance(value, float):
            assert np.float32(ours.values[name]) == np.float32(value)
        else:
            assert ours.values[name] == value
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert (found.type, found.start) == (tensor.tensor_type.name, tensor.data_offset)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.stop - found.start == tensor.n_bytes


def test_float32_metadata_is_read_as_short_decimals(tiny_gguf):
    assert read_gguf(tiny_gguf).values["llama.attention.layer_norm_rms_epsilon"] == 1e-6


def _patched(change):
    def patch(data):
        changed = bytearray(data)
        change(changed)
        return bytes(changed)

    return patch


def _number(data, after, skip, value, size):
    """Write an integer `skip` bytes after the first `after`."""
    at = data.index(after) + len(after) + skip
    data[at : at + size] = value.to_bytes(size, "little")


NAME = b"blk.0.attn_q.weight"
# After a tensor's name: u32 dimensions, u64 for each of the two, u32 type, u64 offset.
DAMAGE = {
    "magic": (_patched(lambda d: d.__setitem__(slice(0, 4), b"GGML")), "not a GGUF file"),
    "old version": (_patched(lambda d: d.__setitem__(slice(4, 8), b"\1\0\0\0")), "version 1"),
    "big-endian": (_patched(lambda d: d.__setitem__(slice(4, 8), b"\0\0\0\3")), "big-endian"),
    "tensor count": (
        _patched(lambda d: d.__setitem__(slice(8, 16), b"\xff" * 8)),
        "claims .* tensors",
    ),
    "key count": (
        _patched(lambda d: d.__setitem__(slice(16, 24), b"\xff" * 7 + b"\0")),
        "claims .* keys",
    ),
    "key length": (
        _patched(lambda d: d.__setitem__(slice(24, 32), b"\xff" * 8)),
        "key number 0.*limit",
    ),
    "value type": (
        _patched(lambda d: _number(d, b"llama.block_count", 0, 13, 4)),
        "llama.block_count.*type 13",
    ),
    "array length": (
        _patched(lambda d: _number(d, b"tokenizer.ggml.tokens", 8, 1 << 60, 8)),
        "tokenizer.ggml.tokens",
    ),
    "nested array": (
        _patched(lambda d: _number(d, b"tokenizer.ggml.tokens", 4, 9, 4)),
        "tokenizer.ggml.tokens.*needs",
    ),
    "not a boolean": (
        _patched(lambda d: _number(d, b"add_bos_token", 4, 7, 1)),
        "add_bos_token.*7",
    ),
    "twice the key": (
        _patched(
            lambda d: d.__setitem__(
                slice(d.index(b"bos_token_id"), d.index(b"bos_token_id") + 12), b"eos_token_id"
            )
        ),
        "eos_token_id.*twice",
    ),
    "not UTF-8": (
        _patched(lambda d: _number(d, b"general.architecture", 12, 0xFF, 1)),
        "not UTF-8",
    ),
    "dimensions": (_patched(lambda d: _number(d, NAME, 0, 5, 4)), "attn_q.*5 dimensions"),
    "no rows": (_patched(lambda d: _number(d, NAME, 12, 0, 8)), "attn_q.*invalid shape"),
    "overflow": (_patched(lambda d: _number(d, NAME, 12, 1 << 63, 8)), "attn_q.*invalid shape"),
    "part of a block": (_patched(lambda d: _number(d, NAME, 4, 33, 8)), "attn_q.*multiples of 32"),
    "too large": (_patched(lambda d: _number(d, NAME, 12, 1 << 40, 8)), "attn_q.*truncated"),
    "too small": (_patched(lambda d: _number(d, NAME, 12, 1, 8)), "unexpected bytes"),
    "type not read": (
        _patched(lambda d: _number(d, NAME, 20, 36, 4)),
        "attn_q.*I2_S.*use a TQ2_0",
    ),
    "type not known": (
        _patched(lambda d: _number(d, NAME, 20, 99, 4)),
        "attn_q.*type 99.*supported types are F32",
    ),
    "crooked offset": (
        _patched(lambda d: _number(d, NAME, 24, 33, 8)),
        "attn_q.*not a multiple of 32",
    ),
    "overlap": (_patched(lambda d: _number(d, NAME, 24, 0, 8)), "overlaps"),
    "beyond the end": (_patched(lambda d: _number(d, NAME, 24, 1 << 40, 8)), "truncated"),
    "twice the tensor": (
        _patched(
            lambda d: d.__setitem__(
                slice(d.index(NAME), d.index(NAME) + len(NAME)), b"blk.0.attn_k.weight"
            )
        ),
        "attn_k.weight.*twice",
    ),
    "header cut": (lambda data: data[:200], "truncated"),
    "data cut": (lambda data: data[:-40], "truncated"),
    "empty": (lambda data: b"", "truncated"),
    "more than there is": (lambda data: data + bytes(4128), "unexpected bytes"),
    "extra bytes at the end": (lambda data: data + bytes(50) + b"x", "unexpected bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name, tiny_gguf, tmp_path):
    damage, message = DAMAGE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(damage(tiny_gguf.read_bytes()))
    with pytest.raises(ModelFormatError, match=message) as caught:
        read_gguf(path)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("alignment", [0, 3, 1 << 21])
def test_invalid_alignments_are_refused(alignment, tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match=f"general.alignment={alignment}"):
        read_gguf(path)


@pytest.mark.parametrize("count", [1, 31, 32, 500, 4000])
def test_trailing_zeros_are_padding(count, tiny_gguf, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf.read_bytes() + bytes(count))
    assert read_gguf(path).tensors == read_gguf(tiny_gguf).tensors


def _text(value):
    return struct.pack("<Q", len(value)) + value


def _array(kind, *items):
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def _with_key(path, key, value):
    """Write a file of one tensor with a key of any value."""
    header = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 1, 2)
        + _text(b"general.architecture")
        + struct.pack("<I", 8)
    )
    header += _text(b"llama") + _text(key) + value + _text(b"a") + struct.pack("<IQIQ", 1, 32, 0, 0)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(128))
    return path


NUMBERS = _array(4, *(struct.pack("<I", n) for n in (1, 2, 3)))
WORDS = _array(8, _text(b"ab"), _text(b""))
NESTED = _array(9, NUMBERS, WORDS, _array(9), _array(9, _array(4), NUMBERS))


def test_nested_arrays_are_skipped(tmp_path):
    path = _with_key(tmp_path / "m.gguf", b"tool.notes", struct.pack("<I", 9) + NESTED)
    header = read_gguf(path)
    assert header.values["general.architecture"] == "llama"
    assert list(header.tensors) == ["a"]
    with pytest.raises(ModelFormatError, match=r"'tool.notes' must be int, got an array of arrays"):
        header.value("tool.notes", int)
    with pytest.raises(
        ModelFormatError, match=r"'tool.notes' must be an array of strings, got an array of arrays"
    ):
        header.strings("tool.notes")


def test_nested_arrays_are_bounded(tmp_path):
    many = struct.pack("<IQ", 9, 200_000) + _array(4) * 200_000
    with pytest.raises(ModelFormatError, match="more than 100000 nested arrays"):
        read_gguf(_with_key(tmp_path / "m.gguf", b"tool.notes", struct.pack("<I", 9) + many))
    deep = struct.pack("<IQ", 9, 1) * 50_000 + NUMBERS
    assert read_gguf(
        _with_key(tmp_path / "d.gguf", b"tool.notes", struct.pack("<I", 9) + deep)
    ).tensors
    for cut in (
        struct.pack("<IQ", 9, 1 << 60),
        struct.pack("<IQ", 9, 2) + NUMBERS + struct.pack("<IQ", 4, 1 << 60),
    ):
        with pytest.raises(ModelFormatError, match=r"tool.notes|truncated"):
            read_gguf(_with_key(tmp_path / "c.gguf", b"tool.notes", struct.pack("<I", 9) + cut))


def test_other_alignment_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    tensors = {name: np.arange(n, dtype=np.float32) for name, n in (("a", 3), ("b", 100))}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(path)
    for name, values in tensors.items():
        tensor = header.tensors[name]
        assert tensor.start % 256 == 0
        np.testing.assert_array_equal(
            np.frombuffer(path.read_bytes()[tensor.start : tensor.stop], "<f4"), values
        )


def test_very_many_keys_and_strings_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    keys = b"".join(_text(b"%d" % index) + struct.pack("<IB", 0, 1) for index in range(100_000))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 100_000) + keys)
    with pytest.raises(ModelFormatError, match=r"m\.gguf claims 100000 keys, more than the limit"):
        read_gguf(path)
    half = struct.pack("<IQ", 8, 2_500_000) + bytes(8 * 2_500_000)
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + _text(b"words")
        + struct.pack("<IIQ", 9, 9, 2)
        + half * 2
    )
    with pytest.raises(
        ModelFormatError, match=r"the file contains more than 4000000 strings, including .* 'words'"
    ):
        read_gguf(path)


def test_a_tensor_count_beyond_the_data_is_refused(tmp_path):
    count = 200_000
    infos = b"".join(
        _text(b"mm.%d" % index) + struct.pack("<IQIQ", 1, 1, 0, 32 * index)
        for index in range(count)
    )
    header = b"GGUF" + struct.pack("<IQQ", 3, count, 0) + infos
    path = tmp_path / "m.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(32 * count))
    with pytest.raises(
        ModelFormatError, match=r"m\.gguf claims 200000 tensors, too many for its \d+ bytes"
    ):
        read_gguf(path)


def _mutated(data, header_bytes, rng):
    """Return the data with bits flipped, bytes overwritten, moved, removed or inserted, or
    truncated, mostly in the header.
    """
    changed = bytearray(data)
    where = int(rng.integers(0, header_bytes if rng.random() < 0.8 else len(data)))
    kind = rng.integers(0, 6)
    if kind == 0:
        for at in rng.integers(0, header_bytes, int(rng.integers(1, 4))):
            changed[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        del changed[where:]
    elif kind == 2:
        length = int(rng.integers(1, 64))
        source = int(rng.integers(0, header_bytes))
        changed[where : where + length] = changed[source : source + length]
    elif kind == 3:
        changed[where : where + int(rng.integers(1, 9))] = b""
    elif kind == 4:
        changed[where:where] = rng.bytes(int(rng.integers(1, 9)))
    else:
        extreme = [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1][int(rng.integers(0, 6))]
        changed[where : where + 8] = struct.pack("<Q", extreme)
    return bytes(changed)


def _parse(path):
    """Read everything that loading reads: keys, config, tokenizer, tensors. Accepted tensors have
    the location and values that the `gguf` package finds.
    """
    tracemalloc.start()
    try:
        header = read_gguf(path)
        for key in header.values:
            if header.has_strings(key):
                header.strings(key)
    finally:
        # The bound holds whatever counts the file claims. Later reads are sized by values checked
        # here.
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MAX_BYTES
    checkpoint = Checkpoint.open(path)
    assert checkpoint.config["vocab_size"] > 0
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.vocab_size > 0
    checkpoint.generation(tokenizer_eos=tokenizer.eos_token_id)
    checkpoint.summary()
    with checkpoint.open_source() as source:
        for name in source.names():
            assert np.isfinite(source.rows(name)).all()
            if source.kind(name) is not None:
                source.quant_rows(name, 0, source.shape(name)[0])
        known = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        if "lm_head.weight" in source.names():
            expected = quants.dequantize(
                known["output.weight"].data, known["output.weight"].tensor_type
            )
            np.testing.assert_array_equal(source.rows("lm_head.weight"), expected)
    theirs = {name: (tensor.data_offset, tensor.n_bytes) for name, tensor in known.items()}
    assert theirs == {name: (t.start, t.stop - t.start) for name, t in header.tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mutations", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_mutations_are_refused_or_read_to_the_end(mutations, tiny_gguf, tmp_path):
    data = tiny_gguf.read_bytes()
    header_bytes = min(tensor.start for tensor in read_gguf(tiny_gguf).tensors.values())
    rng = np.random.default_rng(20)
    path = tmp_path / "m.gguf"
    refused = accepted = 0
    for _ in range(mutations):
        path.write_bytes(_mutated(data, header_bytes, rng))
        try:
            _parse(path)
        except ModelFormatError as error:
            refused += "m.gguf" in str(error)
        else:
            accepted += 1
    assert refused + accepted == mutations
    assert mutations // 2 < refused < mutations
