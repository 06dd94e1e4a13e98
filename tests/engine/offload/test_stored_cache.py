"""Cached files of other versions: of an earlier commit, and of versions that compute other bits or
pack other bytes.

The stored disk cache was written by the commit that introduced version 3 of the numerics. It
holds four blocks of the bundled model, written with the options below by one call of
`generate(PROMPT, max_new_tokens=24, temperature=0)`. For the packed weights only name and digest
are stored.
"""

import hashlib
import tarfile
from functools import partial
from pathlib import Path

import pytest

from kvboost_edge import CPUPagedEngine
from kvboost_edge.models.packed import weight_file
from kvboost_edge.runners.native import runner

STORED = Path(__file__).parents[2] / "data" / "disk-cache-of-numerics-3.tar.xz"
PROMPT = "The prefix cache of this engine survives a restart. " * 3


def test_a_cache_directory_of_an_earlier_version_has_the_same_hits(tmp_path):
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
        ("int8", "0ed0a02cb01358f99c30ede3e7c5ded46a31ab2510531302bd360b4379c08b6b"),
        ("int4", "1f88165644b1a2d665d0dbe9c1d94342e9f797d705a49247e1fd4b7ebdd0adb3"),
    ],
)
def test_packed_weights_equal_those_of_an_earlier_version(tmp_path, monkeypatch, weights, digest):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    options = {"num_blocks": 32, "num_threads": 1, "weights": weights}
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options):
        pass
    (packed,) = (tmp_path / "packed").iterdir()
    assert packed.name == f"f518812092b5331e089716474b09ab0486437bfe-{weights}.kvpack"
    assert hashlib.sha256(packed.read_bytes()).hexdigest() == digest


STEPS = pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])


def ask(**options):
    options = {"num_blocks": 32, "block_size": 16, "num_threads": 1, **options}
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine:
        return engine.generate(PROMPT, max_new_tokens=24, temperature=0)


@STEPS
@pytest.mark.some(2)
def test_blocks_of_another_numerics_version_are_misses(tmp_path, monkeypatch, step):
    cached = partial(ask, disk_cache_dir=tmp_path)
    expected = ask().output_token_ids
    own = runner.NUMERICS_VERSION
    hits = []
    for version in (own, own + step, own + step, own):
        monkeypatch.setattr(runner, "NUMERICS_VERSION", version)
        answer = cached()
        assert answer.output_token_ids == expected
        hits.append(answer.cached_tokens)
    assert hits == [0, 0, 64, 64]  # each version finds its own blocks again


def test_blocks_computed_with_amx_are_found_without_it(tmp_path, monkeypatch):
    """Each start decides whether to use AMX, which changes no bit."""
    hits = []
    for path in ("amx+vnni512", "vnni512", "avx2"):
        monkeypatch.setattr(runner, "linear_path", lambda path=path: path)
        hits.append(ask(disk_cache_dir=tmp_path).cached_tokens)
    assert hits == [0, 64, 0]


@STEPS
@pytest.mark.some(2, 1)
def test_packed_weights_of_another_version_are_replaced(tmp_path, monkeypatch, caplog, step):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    own = weight_file.PACKED_VERSION
    answers, files = [], []
    for version in (own, own + step, own):
        for module in (weight_file, runner):
            monkeypatch.setattr(module, "PACKED_VERSION", version)
        answers.append(ask().output_token_ids)
        [path] = (tmp_path / "packed").glob("*.kvpack")
        files.append(path.read_bytes())
    assert answers[0] == answers[1] == answers[2]
    assert files[0] == files[2] != files[1]
    assert caplog.text.count("written by another version") == 2
