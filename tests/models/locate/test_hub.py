"""GGUF files of the hub: only the requested file is fetched, completely, and interrupted downloads
resume.
"""

import logging
import shutil

import pytest
from huggingface_hub import constants

from helpers.gguf.writer import write_gguf
from helpers.models.embedding_models import save_bidirectional_model
from helpers.models.fake_hub import fake_hub
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate.hub import gguf_models

REPO = "someone/Tiny-1B-GGUF"
FILES = {
    "README.md": b"words",
    "config.json": b"{}",
    "Tiny-1B-Q8_0.gguf": b"GGUF" + b"8" * 5000,
    "Tiny-1B-Q4_K_M.gguf": b"GGUF" + bytes(range(256)) * 400,
    "Tiny-1B-IQ4_K_M.gguf": b"GGUF" + b"i" * 5000,
    "mmproj-Tiny-1B-Q8_0.gguf": b"GGUF" + b"m" * 100,
    "BF16/Tiny-1B-BF16-00001-of-00002.gguf": b"GGUF" + b"1" * 3000,
    "BF16/Tiny-1B-BF16-00002-of-00002.gguf": b"GGUF" + b"2" * 3000,
    "F32/Tiny-1B-F32-00002-of-00002.gguf": b"GGUF" + b"3" * 3000,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with fake_hub(REPO, FILES, tmp_path / "hub", monkeypatch) as found:
        yield found


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("Q4_K_M", "Tiny-1B-Q4_K_M.gguf"),
        ("q4_k_m", "Tiny-1B-Q4_K_M.gguf"),
        ("Q8_0", "Tiny-1B-Q8_0.gguf"),
        ("Tiny-1B-IQ4_K_M.gguf", "Tiny-1B-IQ4_K_M.gguf"),
        ("BF16/Tiny-1B-BF16-00001-of-00002.gguf", "BF16/Tiny-1B-BF16-00001-of-00002.gguf"),
    ],
)
def test_only_the_matching_file_is_downloaded(wanted, name, hub):
    found = locate_model(f"{REPO}:{wanted}")
    assert found.read_bytes() == FILES[name]
    assert found.as_posix().endswith(name)
    assert set(hub.downloads()) == {other for other in FILES if other[:12] == name[:12]}
    before = len(hub.downloads())
    assert locate_model(f"{REPO}:{wanted}") == found
    assert len(hub.downloads()) == before


def test_all_parts_of_a_split_model_are_downloaded(hub):
    found = locate_model(f"{REPO}:bf16")
    assert sorted(path.name for path in found.parent.iterdir()) == [
        "Tiny-1B-BF16-00001-of-00002.gguf",
        "Tiny-1B-BF16-00002-of-00002.gguf",
    ]
    assert found.name.endswith("00001-of-00002.gguf")
    with pytest.raises(
        ModelFormatError, match=r"lacks F32/Tiny-1B-F32-00001-of-00002.gguf; the model has 2 parts"
    ):
        locate_model(f"{REPO}:F32")


def test_an_embedding_models_modules_are_downloaded(tmp_path, monkeypatch):
    source = save_bidirectional_model(tmp_path / "source")
    files = {
        path.relative_to(source).as_posix(): path.read_bytes()
        for path in source.rglob("*")
        if path.is_file()
    }
    others = (
        "onnx/model.json",
        "openvino/config.json",
        "2bit/model.safetensors",
        "4_LSTM/config.json",
        "4_Normalize/x",
        "consolidated.safetensors",
        "2_Dense/pytorch_model.bin",
    )
    with fake_hub(
        "someone/Vectors", {**files, **dict.fromkeys(others, b"{}")}, tmp_path / "hub", monkeypatch
    ) as hub:
        found = locate_model("someone/Vectors")
        assert set(hub.downloads()) == set(files)
    with CPUPagedEngine.from_pretrained(source) as engine:
        expected = engine.embed(["hello"])
    with CPUPagedEngine.from_pretrained(found) as engine:
        assert (engine.embed(["hello"]) == expected).all()


def test_an_interrupted_download_is_resumed(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut = 40_000
    name = "Tiny-1B-Q4_K_M.gguf"
    for _ in range(2):
        try:
            found = locate_model(f"{REPO}:Q4_K_M")
            break
        except ModelFormatError as error:
            # The client may retry by itself.
            assert "could not be downloaded" in str(error)  # noqa: PT017
    assert found.read_bytes() == FILES[name]
    assert [wanted for _, path, wanted in hub.asked if path == name and wanted] == ["bytes=40000-"]


def test_a_download_with_a_wrong_digest_is_removed(hub):
    hub.damaged = True
    with pytest.raises(
        ModelFormatError, match=r"Q4_K_M.gguf was damaged during the download: .* download it again"
    ):
        locate_model(f"{REPO}:Q4_K_M")
    hub.damaged = False
    assert locate_model(f"{REPO}:Q4_K_M").read_bytes() == FILES["Tiny-1B-Q4_K_M.gguf"]


def test_the_available_files_are_listed_in_the_error(hub):
    with pytest.raises(
        ModelFormatError, match=r"no GGUF file for 'Q5_0'; it contains: .*Tiny-1B-Q4_K_M.gguf"
    ):
        locate_model(f"{REPO}:Q5_0")
    with pytest.raises(
        ModelFormatError, match=rf"5 matching GGUF files: .*as in {REPO}:Tiny-1B-BF16"
    ):
        locate_model(REPO)
    with pytest.raises(ModelFormatError, match=r"no hub model with this name"):
        locate_model("someone/else-GGUF:Q4_K_M")
    assert not hub.downloads()


def test_a_single_file_needs_no_name(hub):
    hub.files = {"Tiny-1B-Q8_0.gguf": FILES["Tiny-1B-Q8_0.gguf"], "README.md": b""}
    assert locate_model(REPO).read_bytes() == FILES["Tiny-1B-Q8_0.gguf"]


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE", "no hub"])
def test_a_cached_model_needs_no_network(how, hub, monkeypatch, caplog):
    found = locate_model(f"{REPO}:Q8_0")
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "no hub":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="kvboost_edge"):
        assert locate_model(f"{REPO}:Q8_0", local_files_only=how == "local_files_only") == found
    assert ("using the copy in the hub cache" in caplog.text) == (how == "no hub")
    with pytest.raises(ModelFormatError, match=r"'Q4_K_M'; it contains: Tiny-1B-Q8_0.gguf"):
        locate_model(f"{REPO}:Q4_K_M", local_files_only=how == "local_files_only")


def test_a_downloaded_file_is_a_model(tmp_path, tiny_model_dir, monkeypatch):
    folder = tmp_path / "made"
    folder.mkdir()
    write_gguf(tiny_model_dir, folder / "Tiny-Q8_0.gguf", kind="Q8_0", split=9)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)
    with fake_hub(REPO, files, tmp_path / "hub", monkeypatch):
        checkpoint = Checkpoint.open(locate_model(f"{REPO}:Q8_0"))
    assert checkpoint.config["model_type"] == "llama"
    assert len(checkpoint.summary().files) == len(files)


def test_model_files_are_distinguished_from_other_files():
    names = [
        "a-Q4_0.gguf",
        "b-00002-of-00002.gguf",
        "b-00001-of-00002.gguf",
        "mmproj-F16.gguf",
        "x.imatrix.gguf",
        "c.md",
    ]
    assert gguf_models(names) == {
        "a-Q4_0.gguf": ["a-Q4_0.gguf"],
        "b": ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"],
    }
