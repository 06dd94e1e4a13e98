"""Digests of large files: the digest of all parts for any number of threads; a file that is too
short is an error.
"""

import hashlib
import os

import pytest

from kvboost_edge.host.file_digest import digest_in_parts


@pytest.mark.parametrize("has_preadv", [True, False])
@pytest.mark.parametrize(("stop", "part"), [(0, 10), (1, 10), (100, 10), (101, 10), (99, 1000)])
def test_the_digest_is_computed_over_the_digests_of_parts(
    has_preadv, stop, part, tmp_path, monkeypatch
):
    data = os.urandom(120)
    (tmp_path / "file").write_bytes(data)
    if not has_preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    expected = hashlib.sha256(
        b"".join(
            hashlib.sha256(data[start : min(start + part, stop)]).digest()
            for start in range(0, stop, part)
        )
    ).hexdigest()
    with open(tmp_path / "file", "rb") as file:
        for num_threads in (1, 3):
            assert digest_in_parts(file, stop, part_bytes=part, num_threads=num_threads) == expected


def test_a_truncated_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(50))
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="ends 30 bytes early"):
        digest_in_parts(file, 80, part_bytes=40, num_threads=2)
