"""Packing continues in memory if the disk is full, read-only or faulty, or if caching is off."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from helpers.models.packed_files import content, load, only_file
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_at import FileAt
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed import weight_file as packed_file
from kvboost_edge.models.packed.pack_plan import pack_plan
from kvboost_edge.models.packed.weight_file import load_packed


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("packed"))


@pytest.fixture
def good(model_dir, tmp_path):
    """The packed weights of an undisturbed run."""
    return content(load(model_dir, tmp_path / "good"))


def test_a_failed_write_keeps_the_weights_in_memory(model_dir, tmp_path, good, monkeypatch, caplog):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(packed_file, "_digest", fail)
    assert content(load(model_dir, tmp_path)) == good
    assert re.search(
        r"cannot be stored in .*packed \(disk full\).*in memory.*KVBOOST_EDGE_CACHE", caplog.text
    )
    assert list((tmp_path / "packed").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free disk space, or set KVBOOST_EDGE_CACHE"),
        (errno.EDQUOT, "Free disk space, or set KVBOOST_EDGE_CACHE"),
        (errno.EACCES, "Set KVBOOST_EDGE_CACHE"),
        (errno.ENOMEM, "Free memory"),
    ],
)
def test_the_advice_fits_the_error(model_dir, tmp_path, monkeypatch, caplog, number, advice):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(packed_file, "_digest", fail)
    load(model_dir, tmp_path).close()
    assert f"packed again at every start. {advice}" in caplog.text


def test_checkpoint_errors_are_not_reported_as_disk_errors(model_dir, tmp_path, monkeypatch):
    def fail(*_):
        raise ModelFormatError("a damaged tensor")

    monkeypatch.setattr(packed_file, "pack_stream", fail)
    with pytest.raises(ModelFormatError, match="a damaged tensor"):
        load(model_dir, tmp_path)
    assert list((tmp_path / "packed").iterdir()) == []


def test_a_full_disk_is_detected_before_packing(model_dir, tmp_path, good, monkeypatch, caplog):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert content(load(model_dir, tmp_path)) == good
    assert re.search(
        r"weights \(0\.\d MB\) cannot be stored in .*packed \(only 0\.0 MB are free\)", caplog.text
    )
    assert list((tmp_path / "packed").iterdir()) == []


def test_no_cache_reads_and_writes_nothing(model_dir, tmp_path, good, monkeypatch, caplog):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "cache"))
    checkpoint = Checkpoint.open(model_dir, cache_dir=NO_CACHE)
    checkpoint.summary()
    plan = pack_plan(describe_model(checkpoint.config), "int8")
    seen = []
    packed = load_packed(
        checkpoint,
        plan,
        weights="int8",
        cache_dir=NO_CACHE,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert all(packed.address(entry.name) % 64 == 0 for entry in plan)
    assert seen[-1] == (packed.nbytes, packed.nbytes)
    assert content(packed) == good
    assert not (tmp_path / "cache").exists()
    assert not caplog.records


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.weight_file import load_packed
from kvboost_edge.models.packed.pack_plan import pack_plan
model, cache = Checkpoint.open(sys.argv[1]), Path(sys.argv[2])
plan = pack_plan(describe_model(model.config), "f32")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
print(load_packed(model, plan, weights="f32", cache_dir=cache, num_threads=1).nbytes)
"""


def test_a_disk_that_fills_up_during_packing(model_dir, tmp_path):
    """A limit on file sizes stands in for the full disk: the system itself refuses the write."""
    # Compile the kernels first, because their cache consists of files too.
    load(model_dir, tmp_path / "other", "f32").close()
    command = [sys.executable, "-W", "error", "-c", _LIMITED, str(model_dir), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) > 100_000
    assert re.match(
        r"packed weights \(0\.\d MB\) cannot be stored in .*File too large.*KVBOOST_EDGE_CACHE",
        done.stderr,
    )
    assert list((tmp_path / "packed").iterdir()) == []


def test_a_file_that_does_not_read_back_is_removed(model_dir, tmp_path, monkeypatch):
    """Every byte is compared. A byte that the disk changes in any write aborts the packing."""
    load(model_dir, tmp_path / "good").close()
    size = only_file(tmp_path / "good").stat().st_size
    for at in (3, size // 2, size - 40):

        class Faulty(FileAt):
            """Flips a bit of byte `fault` whenever it is read back."""

            fault = at

            def read_into(self, view, start):
                count = super().read_into(view, start)
                if start <= self.fault < start + count:
                    view[self.fault - start] ^= 1
                return count

        monkeypatch.setattr(packed_file, "FileAt", Faulty)
        with pytest.raises(ModelFormatError, match="does not read back"):
            load(model_dir, tmp_path)
        assert list((tmp_path / "packed").iterdir()) == []


def test_an_unwritable_cache_directory_keeps_weights_in_memory(
    model_dir, tmp_path, good, monkeypatch, caplog
):
    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    assert content(load(model_dir, tmp_path / "bad")) == good
    assert "every start" in caplog.text


def test_a_directory_in_place_of_the_file(model_dir, tmp_path, caplog):
    good = content(load(model_dir, tmp_path))
    path = only_file(tmp_path)
    path.unlink()
    path.mkdir()
    assert content(load(model_dir, tmp_path)) == good
    assert f"{path} is a directory; remove it" in caplog.text
    path.rmdir()
    assert content(load(model_dir, tmp_path)) == good
    assert only_file(tmp_path).is_file()
