"""Tests of a server's draft model, with one model and with several."""

import logging
import shutil
import threading

import pytest

from helpers.models.tiny_checkpoints import save_tiny_checkpoint
from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import shareable
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.__main__ import _engine_options, _load
from kvboost_edge.server.flags import parse_flags
from kvboost_edge.server.models.loader import reserved_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder with the directories of a model, its draft model, and a hybrid model."""
    root = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 2), ("draft", 1)):
        (root / name).mkdir()
        save_tiny_checkpoint("llama", root / name, num_hidden_layers=layers)
    save_tiny_model("lfm2", root / "hybrid")
    return root


def _options(folders, *models, **flags):
    named = [word for name in models for word in ("--model", str(folders / name))]
    flags = {"draft-model": folders / "draft", "draft-weights": "int8", **flags}
    more = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse_flags([*named, *more], "kvboost-server")


def test_a_single_model_is_loaded_with_its_draft_model(folders):
    options = _options(folders, "hybrid")
    engine, ignored = _engine_options(str(folders / "hybrid"), options)
    assert engine is options.engine, (
        "a single model's options must stay, so that a mismatch is an error"
    )
    assert engine["draft_model"] == str(folders / "draft")
    assert ignored == {}


def test_each_of_several_models_is_loaded_with_supported_options(folders):
    names = ("target", "draft", "hybrid")
    options = _options(folders, *names, **{"max-state-bytes": "1MB"})
    found = {name: _engine_options(str(folders / name), options) for name in names}
    engine, ignored = found["target"]
    assert engine["draft_model"] == str(folders / "draft")
    assert engine["draft_weights"] == "int8"
    assert ignored == {"--max-state-bytes": "the model has no recurrent state"}
    engine, ignored = found["draft"]
    assert not {"draft_model", "draft_weights", "max_state_bytes"} & engine.keys()
    assert ignored["--draft-model"] == "it is the draft model itself"
    assert ignored["--draft-weights"] == "it has no effect without draft_model"
    engine, ignored = found["hybrid"]
    assert engine["max_state_bytes"] == options.engine["max_state_bytes"]


def test_options_are_checked_again_if_the_models_files_change(folders, tmp_path):
    for name in ("model", "other"):
        shutil.copytree(folders / "target", tmp_path / name)
    flags = {"draft-model": folders / "draft", "max-state-bytes": "1MB"}
    options = _options(tmp_path, "model", "other", **flags)
    model = str(tmp_path / "model")
    assert list(_engine_options(model, options)[1]) == ["--max-state-bytes"]
    shutil.rmtree(model)
    shutil.copytree(folders / "hybrid", model)
    assert _engine_options(model, options) == (options.engine, {})


def test_a_draft_model_that_cannot_be_opened_is_an_error_with_several_models(folders, tmp_path):
    """The error is not remembered: the draft model is used once it is there."""
    path = tmp_path / "draft"
    options = _options(folders, "target", "hybrid", **{"draft-model": path})
    for name in ("target", "hybrid"):
        with pytest.raises(ConfigError, match="is refused: there is no model directory"):
            _engine_options(str(folders / name), options)
    shutil.copytree(folders / "hybrid", path)
    with pytest.raises(ConfigError, match="is refused: some of its layers have a recurrent state"):
        _engine_options(str(folders / "target"), options)
    shutil.rmtree(path)
    shutil.copytree(folders / "draft", path)
    engine, ignored = _engine_options(str(folders / "target"), options)
    assert (engine["draft_model"], ignored) == (str(path), {})


def test_models_without_a_drafter_are_loaded_without_a_short_vocabulary(folders):
    names = ("target", "draft")
    for mtp in ("auto", "off"):
        options = _options(folders, *names, **{"draft-vocabulary": 64, "mtp": mtp})
        engine, ignored = _engine_options(str(folders / "target"), options)
        assert (engine["draft_vocabulary"], ignored) == (64, {})
        engine, ignored = _engine_options(str(folders / "draft"), options)
        assert "draft_vocabulary" not in engine
        assert "it has no effect without draft_model" in ignored["--draft-vocabulary"]


def test_a_model_loaded_without_the_draft_model_is_logged_as_warning(folders, caplog):
    options = _options(folders, "target", "draft", **{"num-blocks": 16})
    with (
        caplog.at_level(logging.INFO),
        _load(str(folders / "draft"), options, threading.Event()) as engine,
    ):
        assert engine.paged_stats()["draft_weight_bytes"] == 0
    said = [one for one in caplog.records if "--draft-model is ignored" in one.getMessage()]
    assert [one.levelno for one in said] == [logging.WARNING]
    assert "it is the draft model itself" in said[0].getMessage()


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [("arithmetic", "wide", "recurrent state"), ("prefill", "sparse", "recurrent layers")],
)
def test_models_that_refuse_an_approximate_option_are_loaded_without_it(
    folders, monkeypatch, flag, value, reason
):
    monkeypatch.setattr(shareable, "FIRST_POSITION", 64)
    options = _options(folders, "target", "hybrid", **{flag: value})
    engine, ignored = _engine_options(str(folders / "target"), options)
    assert (engine[flag], ignored) == (value, {})
    engine, ignored = _engine_options(str(folders / "hybrid"), options)
    assert flag not in engine
    assert f"{flag}='{value}' is refused: " in ignored[f"--{flag}"]
    assert reason in ignored[f"--{flag}"]
    options = _options(folders, "hybrid", **{flag: value})
    assert _engine_options(str(folders / "hybrid"), options)[0][flag] == value


def test_the_memory_of_the_draft_model_is_reserved(folders):
    from kvboost_edge import CPUPagedEngine

    path = folders / "target"
    with CPUPagedEngine.from_pretrained(path, num_blocks=16) as engine:
        alone = reserved_bytes(engine)
    with CPUPagedEngine.from_pretrained(
        path, num_blocks=16, draft_model=folders / "draft"
    ) as engine:
        stats = engine.paged_stats()
        both = reserved_bytes(engine)
    assert both == alone + stats["draft_weight_bytes"] + stats["draft_pool_bytes"]
