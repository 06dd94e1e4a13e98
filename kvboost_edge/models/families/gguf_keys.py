"""Readers for the metadata keys "ARCHITECTURE.KEY" of a GGUF file that check the values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.fields import MAX_LAYERS

__all__ = ["Keys", "layer_types"]

MAX_SIZE = 1 << 31
_AHEAD = "nextn_predict_layers"
_BACKBONE = "embedding_length_out"  # hidden size of the model that an assistant drafts for


class Tensor(Protocol):
    """Tensor described in a header."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Header(Protocol):
    """Parts of a GGUF header that families read, see `gguf.file.GgufHeader`."""

    @property
    def path(self) -> Path: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def value(self, key: str, *kinds: type) -> Any: ...


class Keys:
    """Metadata keys "ARCHITECTURE.KEY" of a GGUF file.

    Errors name the file, the key and its value.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.prefix = str(header.value("general.architecture", str))

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def error(self, key: str, value: Any, wanted: str) -> ModelFormatError:
        return ModelFormatError(f"{self.header.path}: {self.name(key)}={value!r} {wanted}")

    def size(self, key: str) -> int:
        """Return the size under a key.

        Raises:
            ModelFormatError: the key is missing or its value is not a size.
        """
        found = self.optional_size(key)
        if found is None:
            raise ModelFormatError(f"{self.header.path} lacks the key {self.name(key)!r}")
        return found

    def layers(self) -> int:
        """Return the number of layers, without layers for multi-token prediction.

        All layers of an assistant are for multi-token prediction, and count.

        The number is limited, because lists with an entry per layer are built.
        """
        found = self.blocks()
        ahead = self.optional_size(_AHEAD, 0) or 0
        if ahead == found and self.name(_BACKBONE) in self.header.values:
            return found  # those of an assistant
        if ahead >= found:
            raise self.error(_AHEAD, ahead, f"must be less than block_count={found}")
        return found - ahead

    def blocks(self) -> int:
        """Return the number of layers, including layers for multi-token prediction."""
        found = self.size("block_count")
        if found > MAX_LAYERS:
            raise self.error("block_count", found, f"must be an integer from 1 to {MAX_LAYERS}")
        return found

    def first_block(self) -> str:
        """Return the name prefix of the first block, "blk.0.".

        A file that contains only a head for multi-token prediction begins with the head's block.
        """
        first = "blk.0."
        has_layers = any(name.startswith(first) for name in self.header.tensors)
        return first if has_layers else f"blk.{self.layers()}."

    def optional_size(self, key: str, least: int = 1) -> int | None:
        value = self.header.values.get(self.name(key))
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # an array with equal numbers counts as one number
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
            raise self.error(key, value, f"must be an integer from {least} to {MAX_SIZE}")
        return value

    def sizes(self, key: str, least: int = 1) -> list[int]:
        """Return the size that a required key gives for each layer.

        The value is one number for all layers, or an array with an entry per layer. The array may
        also cover the layers for multi-token prediction.
        """
        value = self.header.values.get(self.name(key))
        layers = self.layers()
        if not isinstance(value, np.ndarray):
            return [self.size(key)] * layers
        found: list[int] = value.tolist()
        if len(found) not in (layers, self.blocks()):
            raise self.error(
                key, found[:8], f"has {len(found)} entries, but the model has {layers} layers"
            )
        found = found[:layers]
        for one in found:
            if isinstance(one, bool) or not isinstance(one, int) or not least <= one <= MAX_SIZE:
                raise self.error(key, one, f"must be an integer from {least} to {MAX_SIZE}")
        return found

    def sliding(self, key: str) -> list[bool] | None:
        """Return a list that is True for layers with a window, or None if the key holds no
        booleans.
        """
        given = self.header.values.get(self.name(key))
        layers = self.layers()
        if not isinstance(given, np.ndarray) or given.dtype != np.bool_:
            return None
        if len(given) != layers:
            raise self.error(
                key, given.tolist(), f"must have an entry for each of the {layers} layers"
            )
        return [bool(one) for one in given]

    def check_values(self, suffix: str, head_dim: int) -> None:
        """Raise ModelFormatError if value heads and key heads have different sizes."""
        found = self.optional_size(f"attention.value_length{suffix}")
        if found not in (None, head_dim):
            raise self.error(
                f"attention.value_length{suffix}",
                found,
                f"must equal the key head size, {head_dim}",
            )

    def number(self, key: str, least: float = 0.0) -> float | None:
        """Return a finite number above `least`, or None if the key is missing."""
        value = self.header.value(self.name(key), float, int)
        if value is not None and not (math.isfinite(value) and value > least):
            raise self.error(key, value, f"must be a number above {least:g}")
        return None if value is None else float(value)


def layer_types(keys: Keys, config: dict[str, Any], *, default_period: int) -> dict[str, Any]:
    """Return config entries that say which layers have a window.

    The key holds either an array of booleans, or a number n if every n-th layer has full attention.
    """
    key = "attention.sliding_window_pattern"
    layers = config["num_hidden_layers"]
    sliding = keys.sliding(key)
    if sliding is None:
        period = keys.optional_size(key) or default_period
        sliding = [(index + 1) % period != 0 for index in range(layers)]
    return {
        "layer_types": ["sliding_attention" if local else "full_attention" for local in sliding]
    }
