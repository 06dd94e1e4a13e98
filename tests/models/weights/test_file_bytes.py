"""File contents read into own buffers: they equal the file, and a file that ends early raises an
error.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.file_bytes import FileBytes, read_bytes


@pytest.mark.parametrize("has_preadv", [True, False])
def test_concurrent_reads_return_the_requested_bytes(has_preadv, tmp_path, monkeypatch):
    if not has_preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    data = np.arange(50_000, dtype=np.uint32)
    data.tofile(tmp_path / "f")
    file = FileBytes(tmp_path / "f")

    def read(start):
        found = np.empty((10, 30), dtype=np.uint32)
        file.read_into(found, 4 * start)
        return bool((found.reshape(-1) == data[start : start + 300]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, np.random.default_rng(0).integers(0, 49_700, 300).tolist()))
    assert file.stamp.size == 200_000
    file.read_into(np.empty(0), 0)
    file.close()


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    file = FileBytes(path)
    os.truncate(path, 10)
    with pytest.raises(
        ModelFormatError, match="weights was truncated while it was being read: 6 bytes are missing"
    ):
        file.read_into(np.empty(8, np.uint8), 8)
    file.close()
    with pytest.raises(ModelFormatError, match="cannot be read"):
        FileBytes(tmp_path / "none")


def test_a_range_is_read(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(100)))
    assert read_bytes(path, 10, 14).tobytes() == bytes([10, 11, 12, 13])
    with pytest.raises(ModelFormatError, match="weights was truncated while it was being read"):
        read_bytes(path, 90, 101)
