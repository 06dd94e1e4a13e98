"""Files written before the package was restructured (commit 6a22bdef).

The stored disk cache holds four blocks of the bundled model, written with the options below by one
call of `generate(PROMPT, max_new_tokens=24, temperature=0)`. Of the packed weights only name and
digest are stored.
"""

import hashlib
import tarfile
from pathlib import Path

import pytest

from kvboost_edge import CPUPagedEngine

STORED = Path(__file__).parents[2] / "data" / "disk-cache-of-0.1.0.tar.xz"
PROMPT = "The prefix cache of this engine survives a restart. " * 3


def test_a_cache_directory_of_an_earlier_commit_has_the_same_hits(tmp_path):
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    options = {"num_blocks": 32, "block_size": 16, "num_threads": 1, "kv_cache_bits": 4}

    def answer(**more):
        with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options, **more) as engine:
            return engine.generate(PROMPT, max_new_tokens=24, temperature=0)

    uncached = answer()
    cached = answer(disk_cache_dir=tmp_path)
    assert (uncached.cached_tokens, cached.cached_tokens) == (0, 64)
    assert cached.hit_tokens == {"pool": 0, "disk": 64}
    assert cached.output_token_ids == uncached.output_token_ids


@pytest.mark.parametrize(
    ("weights", "digest"),
    [
        ("int8", "cdc7cf7e20d055a3eb309afbe57bbb9fc91b6b4a384e51f3239b2d2d1083dc59"),
        ("int4", "c8e06a95dc8100b7c2c5c48a7e248fe43c752e190ed212b8fe48cb20c9c98620"),
    ],
)
def test_packed_weights_are_those_of_an_earlier_commit(tmp_path, monkeypatch, weights, digest):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    options = {"num_blocks": 32, "num_threads": 1, "weights": weights}
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options):
        pass
    (packed,) = (tmp_path / "packed").iterdir()
    assert packed.name == f"f518812092b5331e089716474b09ab0486437bfe-{weights}.kvpack"
    assert hashlib.sha256(packed.read_bytes()).hexdigest() == digest
