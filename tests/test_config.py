"""The options of the engine: what is refused, by which name, and what a default config says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError

TEXT_OPTIONS = ("runner", "backend", "dtype", "device", "revision", "token", "tenant")
LATER = (
    "disk_cache_dir", "chunk_size", "chunk_boundary_window", "overlap_k", "sink_tokens",
    "recompute_strategy", "recompute_overlap", "recompute_ratio",
)  # fmt: skip


@pytest.mark.parametrize("name", TEXT_OPTIONS)
@pytest.mark.parametrize("value", [[], {}, 3, True, b"x", np.array(["auto", "cpu"])], ids=repr)
def test_what_is_no_text_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}\b.*must be a string"):
        EngineConfig.from_options(**{name: value})


@pytest.mark.parametrize("value", [[], {}, "16", 16.0, True, 0, 5, np.array([16, 16])], ids=repr)
def test_kv_cache_bits_are_16_or_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_bits="):
        EngineConfig.from_options(kv_cache_bits=value)


def test_a_token_is_never_shown() -> None:
    assert "hf_secret" not in repr(EngineConfig(token="hf_secret"))
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(token=["hf_secret"])
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize("name", LATER)
def test_options_of_later_features_are_told_from_misspelled_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^option '{name}' is refused: .* not built yet$"):
        EngineConfig.from_options(**{name: 1})


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown option 'chunk_sise'; known options: runner, backend"):
        EngineConfig.from_options(chunk_sise=1)
