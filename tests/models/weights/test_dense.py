"""The dense matrices after the pooling: they are read unchanged, and anything else is refused with
the folder's name.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.dense_folders import read_dense

SETTINGS = {
    "in_features": 6,
    "out_features": 4,
    "bias": False,
    "activation_function": "torch.nn.modules.linear.Identity",
}
WEIGHT = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def write(folder, settings, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_dense_matrices_are_read_in_folder_order(tmp_path):
    first = write(tmp_path / "2_Dense", SETTINGS, {"linear.weight": WEIGHT})
    second = write(
        tmp_path / "3_Dense",
        SETTINGS,
        {"linear.weight": np.ascontiguousarray(WEIGHT.T, np.float16)},
    )
    found = read_dense([first, second], {"hidden_size": 6})
    np.testing.assert_array_equal(found[0], WEIGHT)
    np.testing.assert_array_equal(found[1], WEIGHT.T.astype(np.float16).astype(np.float32))
    assert read_dense([], {"hidden_size": 6}) == ()


BAD = WEIGHT.copy()
BAD[1, 2] = np.nan


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (
            {"activation_function": "torch.nn.modules.activation.Tanh"},
            {"linear.weight": WEIGHT},
            "'Tanh' is not",
        ),
        (
            {"activation_function": "x.GELU"},
            {"linear.weight": WEIGHT},
            "2_Dense.*'GELU' is not supported",
        ),
        ({"bias": True}, {"linear.weight": WEIGHT}, "2_Dense.*a bias is not supported"),
        ({}, {"linear.weight": WEIGHT, "linear.bias": WEIGHT[0]}, "holds the tensors"),
        (
            {},
            {"linear.weight": WEIGHT.T.copy()},
            r"2_Dense: a matrix of shape \(6, 4\) does not fit 6 inputs",
        ),
        ({}, {"linear.weight": BAD}, "2_Dense holds NaN or infinity"),
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path, settings, tensors, message):
    folder = write(tmp_path / "2_Dense", {**SETTINGS, **settings}, tensors)
    with pytest.raises(ModelFormatError, match=message):
        read_dense([folder], {"hidden_size": 6})


def test_missing_settings_have_sentence_transformers_defaults(tmp_path):
    """In sentence-transformers' Dense, a bias and tanh are the defaults."""
    for name in ("bias", "activation_function"):
        settings = {key: value for key, value in SETTINGS.items() if key != name}
        with pytest.raises(ModelFormatError, match="is not supported"):
            read_dense(
                [write(tmp_path / name, settings, {"linear.weight": WEIGHT})], {"hidden_size": 6}
            )
