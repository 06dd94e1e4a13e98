"""Rows of a checkpoint's tensors, read as float32."""

import os
from pathlib import Path

import numpy as np
import pytest

from helpers.models.tiny_models import save_tiny_model
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource


def test_row_ranges_equal_the_whole_tensor(tmp_path):
    with SafetensorsSource(save_tiny_model("llama", tmp_path)) as source:
        name = "lm_head.weight"
        whole = source.rows(name)
        np.testing.assert_array_equal(source.rows(name, 5, 9), whole[5:9])
        assert source.shape(name) == (300, 64)


def test_a_directory_without_weights_is_refused():
    with pytest.raises(ModelFormatError):
        SafetensorsSource(Path(os.devnull).parent)
