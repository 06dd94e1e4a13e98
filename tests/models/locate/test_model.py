"""Locating a model without network access, and clear errors if it cannot be found."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model


@pytest.fixture
def asked(monkeypatch):
    """Calls of the hub's client, which returns the working directory."""
    calls = []

    def snapshot_download(name, **options):
        calls.append({"name": name, **options})
        return str(Path.cwd())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_directories_are_found(tmp_path, asked, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (tmp_path, str(tmp_path), "owner/name", "./owner/name", "~/owner", Path("owner")):
        assert locate_model(name).is_dir()
    assert not asked


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["a.gguf"], "a.gguf"),
        (["a.gguf", "mmproj-a.gguf", "README.md"], "a.gguf"),
        (["b-00002-of-00002.gguf", "b-00001-of-00002.gguf"], "b-00001-of-00002.gguf"),
        (["a.gguf", "config.json"], "."),
        (["a.gguf", "genai_config.json"], "."),
        (["model.onnx"], "."),
        ([], "."),
    ],
)
def test_a_directory_with_one_gguf_model_is_that_model(tmp_path, files, found):
    for name in files:
        (tmp_path / name).touch()
    assert locate_model(tmp_path) == tmp_path / found


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (
            ["a-Q4_0.gguf", "a-Q8_0.gguf"],
            "contains 2 GGUF models: a-Q4_0.gguf, a-Q8_0.gguf; give one",
        ),
        ([f"{number:02}.gguf" for number in range(23)], "19.gguf and 3 more; give one"),
    ],
)
def test_several_gguf_models_of_a_directory_are_listed(tmp_path, names, words):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ModelFormatError, match=words):
        locate_model(tmp_path)


def test_the_bundled_model_needs_no_network(asked):
    try:
        directory = locate_model(BUNDLED_MODEL)
    except ModelFormatError as error:
        assert "bundled" in str(error)  # noqa: PT017 - a checkout may be without it
    else:
        assert (directory / "config.json").is_file()
    assert not asked


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/no/such/dir",
        "./missing",
        "../x",
        "~/missing-model",
        "a/b/c",
        "C:\\x",
        "owner/..",
        "a b",
        Path("owner/name"),
    ],
)
def test_invalid_hub_ids_never_reach_the_hub(name, asked, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # names such as ../x are relative to it
    with pytest.raises(ModelFormatError):
        locate_model(name)
    assert not asked


@pytest.mark.parametrize("name", [None, 5, b"owner/name", ["owner/name"], True])
def test_other_types_are_refused(name, asked):
    with pytest.raises(ConfigError, match="must be a string or a Path"):
        locate_model(name)
    assert not asked


def test_a_file_is_not_a_model_directory(tmp_path, asked):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is a file"):
        locate_model(tmp_path / "model.safetensors")
    assert not asked


def test_a_hub_id_downloads_only_needed_files(asked):
    found = locate_model("owner/name", revision="v1", token="secret")
    assert found == Path.cwd()
    (call,) = asked
    assert (call["name"], call["revision"], call["token"], call["local_files_only"]) == (
        "owner/name",
        "v1",
        "secret",
        False,
    )
    assert not any(
        pattern.endswith((".bin", ".py", ".pt")) or pattern == "*"
        for pattern in call["allow_patterns"]
    )


@pytest.mark.parametrize(
    ("offline", "options", "message"),
    [
        (False, {"local_files_only": True}, "local_files_only"),
        (True, {}, "HF_HUB_OFFLINE"),
        pytest.param(False, {}, "could not be downloaded", marks=pytest.mark.names_hub_model),
    ],
    ids=["the option", "the variable", "no network"],
)
def test_the_reason_for_a_failed_download_is_given(
    offline, options, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ModelFormatError, match=message):
        locate_model("owner/not-there", **options)


def test_a_model_in_the_hub_cache_is_found_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--owner--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert locate_model("owner/name", local_files_only=True) == snapshot


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.RepositoryNotFoundError, "no hub model with this name"),
        (errors.GatedRepoError, "gated"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.HFValidationError, "valid hub id"),
        (ConnectionError, "could not be downloaded"),
    ],
)
def test_errors_of_the_hub_are_explained(kind, words, monkeypatch):
    def refuse(*_, **__):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelFormatError, match=words):
        locate_model("owner/name", revision="v9")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\nGot: ConnectError: no route\nAn error happened while …", "ConnectError: no route"),
        ("", "ConnectionError"),
    ],
)
def test_the_first_line_of_the_hubs_answer_is_shown(text, shown, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError(text)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelFormatError, match=f"downloaded from the hub: {shown}$"):
        locate_model("owner/name")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3:0.6b", "did you mean ollama:qwen3:0.6b-mine or Qwen/Qwen3-0.6B-GGUF:Q8_0? "),
        ("Qwen3:4b", "did you mean Qwen/Qwen3-4B-GGUF:Q4_K_M? "),
        ("qwen3", "did you mean ollama:qwen3:0.6b-mine or Qwen/Qwen3-0.6B-GGUF:Q8_0 or Qwen/Qwen3"),
        ("mistral", "Ollama's models are written ollama:NAME, such as ollama:mistral, and the hub"),
    ],
)
def test_a_common_model_name_suggests_accepted_names(name, meant, monkeypatch):
    def unknown(*args, **options):
        raise errors.OfflineModeIsEnabled

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unknown)
    ours = ("ollama:qwen3:0.6b-mine", "ollama:qwen3moe:x")
    monkeypatch.setattr("kvboost_edge.models.locate.model.ollama_names", lambda: iter(ours))
    with pytest.raises(ModelFormatError) as caught:
        locate_model(name)
    said = str(caught.value)
    assert said.startswith(f"the model {name!r} was not found: {meant}")
    assert "`kvboost-edge models` lists" in said
    assert "(there is no " in said


@pytest.mark.parametrize("name", ["owner/name", "./qwen3", "a b"])
def test_other_names_suggest_nothing(name, monkeypatch):
    def unknown(*args, **options):
        raise errors.OfflineModeIsEnabled

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unknown)
    with pytest.raises(ModelFormatError) as caught:
        locate_model(name)
    assert "Ollama" not in str(caught.value)
