"""Which runner and weight format a model gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.runners.native.choice import choose_runner

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
UNKNOWN = {**LLAMA, "model_type": "gpt_neox"}


def _choose(model: dict[str, Any] = LLAMA, backend: str = "cpu", available: int = 10**9, **options: Any) -> Any:
    return choose_runner(EngineConfig.from_options(**options), model, backend, 10**8, available)


@pytest.mark.parametrize(
    ("available", "options", "expected"),
    [
        (10**9, {}, ("torch", "")),
        (10**9, {"runner": "native"}, ("native", "int8")),
        (4 * 10**8, {"runner": "native"}, ("native", "int4")),
        (10**9, {"weights": "bf16"}, ("native", "bf16")),
        (10**9, {"runner": "native", "dtype": "float32"}, ("native", "f32")),
        (10**9, {"dtype": "float32"}, ("torch", "")),
        (10**9, {"runner": "torch"}, ("torch", "")),
    ],
)
def test_choice(available: int, options: dict[str, Any], expected: tuple[str, str]) -> None:
    choice = _choose(available=available, **options)
    assert (choice.name, choice.weights) == expected
    assert choice.reason


def test_asked_for_by_name_and_not_applicable() -> None:
    with pytest.raises(ModelFormatError, match="gpt_neox"):
        _choose(UNKNOWN, runner="native")
    with pytest.raises(ConfigError, match="backend='cpu'"):
        _choose(backend="torch", weights="int8")
    with pytest.raises(ConfigError, match="weights='int8'"):
        _choose(runner="torch", weights="int8")
    with pytest.raises(ConfigError, match="float16"):
        _choose(runner="native", dtype="float16")
