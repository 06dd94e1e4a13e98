"""How a model of transformers turns keys by their positions, and whether that is plain rope in
every layer.

Keys are looked at, not classes: the same token was computed at some positions, seeing only itself,
so that its hidden state is the same everywhere and its keys differ by their positions alone. A
table of frequencies that the model holds turns them into one another, or they are not turned at
all, or it is not plain rope and nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from kvboost_edge.backends.torch_backend import turn_keys
from kvboost_edge.models.config.architectures import rope_types

__all__ = ["NUM_PROBED", "RopeFrequencies", "find_turning"]

NUM_PROBED = 32
"""Positions, from 0 on: where they do not follow on one another transformers makes several
sequences of them.
"""
_TOLERANCE = {
    "float32": 1e-4,
    "bfloat16": 0.02,
    "float16": 0.004,
}  # relative; another theta is far above

Frequencies = npt.NDArray[np.float64]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class RopeFrequencies(NamedTuple):
    """Frequencies of each layer's plain rope, radians for each position, none where a layer has no
    rope; or why there are none to be had.
    """

    layers: list[Frequencies]
    refusal: str | None = None


def find_turning(
    model: PreTrainedModel, layers: Sequence[KeysAndValues], dtype: str
) -> RopeFrequencies:
    """What turns the keys of each layer.

    Args:
        layers: keys and values of each layer, [num_kv_heads, num_positions, head_dim]: of one token
            that sees itself, at positions 0, 1, ...
    """
    others = sorted(rope_types(model.config.to_dict()) - {"default"})
    if others:
        return RopeFrequencies(
            [], f"rope of type {others[0]!r} is not turned on the torch runner, plain rope alone is"
        )
    tables = [
        buffer
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and buffer.dim() == 1
    ]
    known = [np.zeros(0), *(table.cpu().to(torch.float64).numpy() for table in tables)]
    found: list[Frequencies] = []
    for number, (keys, values) in enumerate(layers):
        tolerance = _TOLERANCE[dtype]
        if _distance(values, values[:, :1].expand_as(values)) > tolerance:
            return RopeFrequencies([], f"layer {number} does not take positions from rope alone")
        best = min(
            (one for one in known if 2 * len(one) <= keys.shape[-1]),
            key=lambda one: _misfit(keys, one),
        )
        if _misfit(keys, best) > tolerance:
            return RopeFrequencies(
                [],
                f"layer {number} does not turn its keys by plain rope, half a head against the "
                "other",
            )
        found.append(best)
    return RopeFrequencies(found)


def _misfit(keys: torch.Tensor, frequencies: Frequencies) -> float:
    """How far the first key, turned to the other positions, is from those that are there."""
    wide = keys.to("cpu", torch.float32)
    count = wide.shape[1]
    turned = turn_keys(
        wide[:, :1].expand_as(wide), np.arange(count), torch.arange(count), frequencies
    )
    return _distance(turned, wide)


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """Relative; infinite where there is nothing to compare with."""
    # Not `Tensor.norm`, which takes a deprecated path on Apple GPUs.
    size = float(torch.linalg.vector_norm(others.float()))
    return float(torch.linalg.vector_norm((some - others).float())) / size if size else math.inf
