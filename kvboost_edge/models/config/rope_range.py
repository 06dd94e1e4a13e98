"""Which of longrope's two ranges a model is loaded for: up to its original length, or beyond it as well.

transformers takes other factors once a sequence is longer than the original length, which would change keys that are
cached. Here an engine has one range for all its sequences, so results stay exact whatever their lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ConfigError
from kvboost_edge.models.config.architectures import LONG_RANGE, has_two_ranges
from kvboost_edge.models.config.nested import text_config

__all__ = ["with_long_rope"]


def with_long_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the same model for rope_range="long". ConfigError where rope has one range only."""
    if not has_two_ranges(config):
        raise ConfigError(
            f"rope_range='long' takes the long factors of rope of type longrope, and model_type="
            f"{text_config(config).get('model_type')!r} has none in its config; leave it out"
        )
    inner = config.get("text_config")
    nested = {"text_config": {**inner, LONG_RANGE: True}} if isinstance(inner, Mapping) else {}
    return {**config, **nested, LONG_RANGE: True}
