"""Rows of a table read one at a time: they equal those of the whole tensor, and a changed file
raises an error.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf.types import dequantized
from helpers.gguf.writer import K_SCALES, write_gguf
from helpers.models.awq_gptq_files import quantize_dir
from helpers.models.nvfp4_files import make_nvfp4
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.blocks import BLOCKS
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.packed.pack_plan import PackEntry, check_tensors
from kvboost_edge.models.weights import file_bytes
from kvboost_edge.models.weights.row_table import RowTable

TABLE = "model.embed_tokens.weight"  # any tensor with a row for each token
ROWS = 300
WIDTH = 64


def _gguf(directory, kind, **more):
    width = {"hidden_size": 256, "head_dim": 64} if kind in K_SCALES else {}
    source = save_tiny_model("qwen3", directory / "hf", **width)
    path = write_gguf(
        source,
        directory / "model.gguf",
        kind=lambda name: kind if name == "token_embd.weight" else "F32",
        more=more,
    )
    return Checkpoint.open(path, cache_dir=NO_CACHE)


def _safetensors(directory, dtype=torch.float32):
    save_tiny_model("qwen3", directory)
    path = directory / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    return Checkpoint.open(directory, cache_dir=NO_CACHE)


def _known(path, kind):
    """Return the floats of the table in a GGUF file."""
    tensor = read_gguf(path).tensors["token_embd.weight"]
    assert tensor.type == kind
    raw = np.fromfile(path, np.uint8)[tensor.start : tensor.stop]
    return dequantized(kind, raw.reshape(ROWS, -1))


@pytest.mark.parametrize("kind", BLOCKS)
def test_gguf_rows_equal_the_gguf_package(kind, tmp_path):
    model = _gguf(tmp_path, kind)
    expected = _known(model.path, kind)
    tokens = np.array([299, 0, 7, 7, 150], dtype=np.int64)
    with RowTable.open(model, TABLE, *expected.shape) as table:
        found = table.rows(tokens)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected[tokens])
        for token in (0, 299):
            np.testing.assert_array_equal(table.rows(np.array([token])), expected[[token]])
        assert table.rows(np.empty(0, np.int64)).shape == (0, expected.shape[1])


def test_rows_of_a_gguf_table_have_its_factor(tmp_path):
    model = _gguf(tmp_path, "NVFP4", **{"token_embd.scale": np.array([0.3], np.float32)})
    expected = _known(model.path, "NVFP4") * np.float32(0.3)
    with RowTable.open(model, TABLE, *expected.shape) as table:
        np.testing.assert_array_equal(table.rows(np.arange(ROWS)), expected)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_safetensors_rows_equal_the_whole_table(dtype, tmp_path):
    model = _safetensors(
        tmp_path, {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    )
    with model.open_source() as source:
        assert source.type_of(TABLE) == dtype
    expected = load_file(tmp_path / "model.safetensors")[TABLE].float().numpy()
    tokens = np.random.default_rng(1).integers(0, ROWS, 40)
    with RowTable.open(model, TABLE, ROWS, WIDTH) as table:
        np.testing.assert_array_equal(table.rows(tokens), expected[tokens])


def test_concurrent_reads_return_the_right_rows(tmp_path):
    model = _gguf(tmp_path, "Q8_0")
    with model.open_source() as source:
        expected = source.rows(TABLE)
    tokens = np.random.default_rng(2).integers(0, ROWS, (200, 3))
    with RowTable.open(model, TABLE, ROWS, WIDTH) as table, ThreadPoolExecutor(4) as pool:
        for ids, found in zip(tokens, pool.map(table.rows, tokens), strict=True):
            np.testing.assert_array_equal(found, expected[ids])


def test_only_the_requested_rows_are_read(tmp_path, monkeypatch):
    model = _gguf(tmp_path, "Q8_0")
    reads = []
    read_into = file_bytes.FileBytes.read_into
    with RowTable.open(model, TABLE, ROWS, WIDTH) as table:
        monkeypatch.setattr(
            file_bytes.FileBytes,
            "read_into",
            lambda file, buffer, start: (
                reads.append(buffer.nbytes),
                read_into(file, buffer, start),
            )[1],
        )
        table.rows(np.array([3, 299]))
    assert reads == [68, 68]


@pytest.mark.parametrize("has_advice", [True, False])
def test_rows_are_read_without_posix_fadvise(has_advice, tmp_path, monkeypatch):
    if has_advice:

        def refuse(*_):
            raise OSError("no such advice")

        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    model = _safetensors(tmp_path)
    with model.open_source() as source, RowTable.open(model, TABLE, ROWS, WIDTH) as table:
        np.testing.assert_array_equal(table.rows(np.array([1, 2])), source.rows(TABLE, 1, 3))


@pytest.mark.parametrize(("token", "named"), [(-1, "token -1 "), (ROWS, "token 300 ")])
def test_a_token_without_a_row_is_refused(token, named, tmp_path):
    with (
        RowTable.open(_safetensors(tmp_path), TABLE, ROWS, WIDTH) as table,
        pytest.raises(RequestError, match=f"{named}is outside the table's rows, 0..299"),
    ):
        table.rows(np.array([5, token]))


@pytest.mark.parametrize("shape", [(ROWS - 1, WIDTH), (ROWS, 2 * WIDTH)])
def test_another_shape_is_refused(shape, tmp_path):
    with pytest.raises(ModelFormatError, match=r"has shape \(300, 64\), expected"):
        RowTable.open(_safetensors(tmp_path), TABLE, *shape)


def test_missing_or_scalar_tensors_are_refused(tmp_path):
    for model in (_safetensors(tmp_path / "s"), _gguf(tmp_path / "g", "Q8_0")):
        with pytest.raises(ModelFormatError, match="single rows cannot be read"):
            RowTable.open(model, "model.norm.weight", WIDTH, 1)
        with pytest.raises(ModelFormatError, match="lack"):
            RowTable.open(model, "model.embed_tokens_per_layer.weight", ROWS, WIDTH)


def test_reordered_tensors_are_refused(tmp_path):
    path = write_gguf(save_tiny_model("llama", tmp_path / "hf"), tmp_path / "model.gguf")
    glm4 = Checkpoint.open(save_tiny_model("glm4", tmp_path / "glm4"), cache_dir=NO_CACHE)
    for model in (Checkpoint.open(path, cache_dir=NO_CACHE), glm4):
        with pytest.raises(
            ModelFormatError, match=r"'model.layers.0.self_attn.q_proj.weight' (has shape|stores)"
        ):
            RowTable.open(model, "model.layers.0.self_attn.q_proj.weight", WIDTH, WIDTH)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_transposed_tensors_are_refused(method, tmp_path):
    save_tiny_model("llama", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    quantize_dir(tmp_path, method, group=32, symmetric=True)
    model = Checkpoint.open(tmp_path, cache_dir=NO_CACHE)
    with pytest.raises(ModelFormatError, match="stores rows as columns"):
        RowTable.open(model, "model.layers.0.mlp.up_proj.weight", 256, 128)
    with model.open_source() as source, RowTable.open(model, TABLE, ROWS, 128) as table:
        np.testing.assert_array_equal(table.rows(np.array([7])), source.rows(TABLE, 7, 8))


def test_a_packed_table_is_refused_by_the_check_of_tensors(tmp_path):
    make_nvfp4(save_tiny_model("qwen3", tmp_path, intermediate_size=96), "modelopt")
    entry = PackEntry("table", "f32", (("model.layers.0.mlp.up_proj.weight", 96),), WIDTH)
    with (
        Checkpoint.open(tmp_path, cache_dir=NO_CACHE).open_source() as source,
        pytest.raises(ModelFormatError, match=r"up_proj.weight' is packed, so single rows"),
    ):
        check_tensors([], source, [entry])


@pytest.mark.parametrize("before", [True, False], ids=["before it is opened", "while it is open"])
@pytest.mark.parametrize("how", ["shrunk", "written", "grown"])
def test_a_file_that_changes_is_refused(how, before, tmp_path):
    model = _gguf(tmp_path, "Q4_0")
    model.fingerprint()
    table = None if before else RowTable.open(model, TABLE, ROWS, WIDTH)
    size = model.path.stat().st_size
    modified = model.path.stat().st_mtime_ns
    if how == "written":
        with open(model.path, "r+b") as file:
            file.seek(-100, 2)
            file.write(bytes(8))
        os.utime(model.path, ns=(modified + 1, modified + 1))  # file system clocks may be coarse
    else:
        os.truncate(model.path, size + 4096 if how == "grown" else 5000)
    if table is None:
        with pytest.raises(ModelFormatError, match=r"model\.gguf changed since"):
            RowTable.open(model, TABLE, ROWS, WIDTH)
        return
    with table, pytest.raises(ModelFormatError, match=r"model\.gguf (changed while|was truncated)"):
        table.rows(np.array([299]))


def test_a_replaced_file_is_refused_and_open_tables_keep_working(tmp_path):
    model = _safetensors(tmp_path)
    model.fingerprint()
    path = tmp_path / "model.safetensors"
    with model.open_source() as source:
        expected = source.rows(TABLE)
    with RowTable.open(model, TABLE, ROWS, WIDTH) as table:
        times = path.stat().st_mtime_ns
        save_file(
            {name: -tensor for name, tensor in load_file(path).items()},
            tmp_path / "new.safetensors",
        )
        os.replace(tmp_path / "new.safetensors", path)
        os.utime(path, ns=(times, times))
        np.testing.assert_array_equal(table.rows(np.array([9])), expected[[9]])
        with pytest.raises(
            ModelFormatError, match=r"model\.safetensors changed since the model was opened"
        ):
            RowTable.open(model, TABLE, ROWS, WIDTH)
        path.unlink()
        np.testing.assert_array_equal(table.rows(np.array([9])), expected[[9]])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors|has no weights"):
        RowTable.open(model, TABLE, ROWS, WIDTH)
