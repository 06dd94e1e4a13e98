"""A split GGUF model equals the model in one file, and parts that do not belong together are
refused by name.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from helpers.gguf.writer import write_gguf
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate.split_files import part_name


@pytest.fixture(scope="module")
def parts(tiny_model_dir, tmp_path_factory):
    """The parts of a tiny model, whose folder tests must not change."""
    folder = tmp_path_factory.mktemp("parts")
    write_gguf(tiny_model_dir, folder / "m.gguf", kind="Q8_0", split=7)
    return sorted(folder.iterdir())


def _copies(parts, folder):
    return [Path(shutil.copy(part, folder)) for part in parts]


def test_split_files_are_one_model(parts, tiny_model_dir, tmp_path):
    assert len(parts) >= 3
    whole = Checkpoint.open(write_gguf(tiny_model_dir, tmp_path / "whole.gguf", kind="Q8_0"))
    split = Checkpoint.open(locate_model(parts[0]))
    assert split.config == whole.config
    summary = split.summary()
    assert [file.name for file in summary.files] == [part.name for part in parts]
    assert dataclasses.replace(summary, files=()) == dataclasses.replace(whole.summary(), files=())
    with whole.open_source() as ours, split.open_source() as theirs:
        assert ours.names() == theirs.names()
        assert len({theirs.file_of(name) for name in theirs.names()}) == len(parts)
        for name in ours.names():
            rows = ours.shape(name)[0]
            np.testing.assert_array_equal(
                theirs.rows(name, 0, rows), ours.rows(name, 0, rows), err_msg=name
            )
    assert (split.gguf_metadata() or {}).keys() == (whole.gguf_metadata() or {}).keys()


def test_any_part_names_the_model(parts):
    prints = {Checkpoint.open(part).fingerprint() for part in parts}
    assert len(prints) == 1


def test_every_part_is_in_the_fingerprint(parts, tmp_path):
    copies = _copies(parts, tmp_path)
    before = Checkpoint.open(copies[0])
    fingerprint = before.fingerprint()
    assert fingerprint == Checkpoint.open(parts[0]).fingerprint()
    data = bytearray(copies[-1].read_bytes())
    data[-1] ^= 1
    copies[-1].write_bytes(data)
    assert before.changed_files() == [str(copies[-1])]
    assert Checkpoint.open(copies[0]).fingerprint() != fingerprint
    with pytest.raises(
        ModelFormatError, match=f"{copies[-1].name} changed since its header was read"
    ):
        before.open_source()


def test_a_missing_part_is_named(parts, tmp_path):
    copies = _copies(parts, tmp_path)
    copies[1].unlink()
    with pytest.raises(ModelFormatError, match=rf"missing in its directory: {copies[1].name}$"):
        Checkpoint.open(copies[0])


def test_parts_of_different_models_are_refused(parts, tiny_model_dir, tmp_path):
    copies = _copies(parts, tmp_path)
    shutil.copy(parts[1], copies[2])
    with pytest.raises(
        ModelFormatError, match=rf"{copies[2].name}: key 'split.no' is 1, expected 2"
    ):
        Checkpoint.open(copies[0])
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(tiny_model_dir, other / "m.gguf", kind="Q8_0")
    shutil.copy(other / "m.gguf", copies[2])
    with pytest.raises(ModelFormatError, match=rf"{copies[2].name}: key 'split.no' is None"):
        Checkpoint.open(copies[0])


def test_a_non_finite_number_is_found_in_its_part(parts, tmp_path):
    copies = _copies(parts, tmp_path)
    checkpoint = Checkpoint.open(copies[0])
    with checkpoint.open_source() as source:
        norm = next(
            n
            for n in sorted(source.names())
            if n.endswith("norm.weight") and source.file_of(n) != copies[0]
        )
        part = source.file_of(norm)
        start = source._tensor(norm).start
    with open(part, "r+b") as file:
        file.seek(start)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(ModelFormatError, match=f"{part.name}: tensor .* holds NaN"):
        Checkpoint.open(copies[0]).summary()


def test_part_names_are_parsed():
    found = part_name("a/m-Q4_K_M-00002-of-00003.gguf")
    assert found is not None
    assert found.names() == [f"a/m-Q4_K_M-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for name in (
        "m.gguf",
        "m-00000-of-00003.gguf",
        "m-00004-of-00003.gguf",
        "m-1-of-3.gguf",
        "m-00001-of-00003.bin",
    ):
        assert part_name(name) is None, name
