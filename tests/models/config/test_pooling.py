"""Pooling of embedding models as their files define it. Unsupported settings raise errors."""

import json
from pathlib import Path

import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.architectures import check_model_compatibility
from kvboost_edge.models.config.pooling import UNSAID, Pooling, gguf_pooling, read_pooling

KINDS = ("Transformer", "Pooling", "Normalize")


def write(directory, settings, kinds=KINDS):
    modules = [
        {"path": "1_Pooling" if kind == "Pooling" else "", "type": f"models.{kind}"}
        for kind in kinds
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
    ],
)
def test_sentence_transformers_files_set_the_pooling(tmp_path, settings, kind):
    assert read_pooling(write(tmp_path, settings)) == Pooling(kind, "1_Pooling/config.json")


def test_a_directory_without_them_sets_no_pooling(tmp_path):
    assert read_pooling(tmp_path) == UNSAID


@pytest.mark.parametrize(
    ("settings", "kinds", "message"),
    [
        (
            {"pooling_mode_cls_token": True},
            KINDS,
            "selects pooling cls_token; exactly one of lasttoken and mean_tokens",
        ),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            KINDS,
            "selects pooling mean_tokens, max_tokens",
        ),
        ({}, KINDS, "selects pooling nothing"),
        ([], KINDS, "must hold a JSON object"),
        (
            {"pooling_mode": "lasttoken"},
            (*KINDS, "LSTM"),
            "the module 'LSTM' is not supported",
        ),
        (
            {"pooling_mode": "lasttoken"},
            ("Transformer", "Normalize", "Pooling"),
            "must be in the order",
        ),
        ({"pooling_mode": "lasttoken"}, (*KINDS[:2], "Pooling"), "must be in the order"),
    ],
)
def test_other_poolings_are_refused_by_name(tmp_path, settings, kinds, message):
    with pytest.raises(ModelFormatError, match=message):
        read_pooling(write(tmp_path, settings, kinds))


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"modules.json must contain a list of objects"):
        read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "1_Pooling", "type": "models.Pooling"}])
    )
    with pytest.raises(ModelFormatError, match=r"1_Pooling/config.json, which is missing"):
        read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": "../../elsewhere", "type": "models.Pooling"}])
    )
    with pytest.raises(ModelFormatError, match="missing"):
        read_pooling(tmp_path)


@pytest.mark.parametrize(
    ("number", "found"),
    [
        (0, UNSAID),
        (1, Pooling("mean", "key qwen3.pooling_type")),
        (3, Pooling("last", "key qwen3.pooling_type")),
    ],
)
def test_a_gguf_key_sets_the_pooling(number, found):
    values = {"general.architecture": "qwen3", "qwen3.pooling_type": number}
    assert gguf_pooling(values, Path("m.gguf")) == found
    assert gguf_pooling({"general.architecture": "qwen3"}, Path("m.gguf")) == UNSAID


@pytest.mark.parametrize(
    ("number", "message"), [(2, "first token"), (4, r"cls.output"), (9, "=9 is unknown")]
)
def test_other_poolings_of_a_gguf_file_are_refused(number, message):
    with pytest.raises(ModelFormatError, match=message):
        gguf_pooling(
            {"general.architecture": "qwen3", "qwen3.pooling_type": number}, Path("m.gguf")
        )


def test_dense_layer_folders_are_found_in_order(tmp_path):
    write(tmp_path, {"pooling_mode": "mean"})
    modules = [
        {"path": path, "type": f"models.{kind}"}
        for path, kind in (
            ("", "Transformer"),
            ("1_Pooling", "Pooling"),
            ("3_Dense", "Dense"),
            ("2_Dense", "Dense"),
        )
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelFormatError, match=r"3_Dense/config.json, which is missing"):
        read_pooling(tmp_path)
    for name in ("2_Dense", "3_Dense"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert read_pooling(tmp_path).dense == (tmp_path / "3_Dense", tmp_path / "2_Dense")


def test_unsupported_bidirectional_models_are_refused():
    check_model_compatibility({"model_type": "gemma3_text", "use_bidirectional_attention": True})
    for fields in (
        {"model_type": "gemma", "use_bidirectional_attention": True},
        {"model_type": "gemma3_text", "is_causal": False},
    ):
        with pytest.raises(ModelFormatError, match="bidirectional attention is supported"):
            check_model_compatibility(fields)
