"""RoPE frequencies of a transformers model, found by observing keys.

The same token was computed at several positions, where it sees only itself. So its hidden state is
the same everywhere, and its keys differ only by their positions. Either one of the model's
frequency tables maps them to each other, or they are all equal (no RoPE), or the layer does not
use plain RoPE.
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
"""Positions of the probe, from 0 on; transformers would treat positions with gaps as several
sequences.
"""
# Relative. The error of another theta is far larger.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.004}

Frequencies = npt.NDArray[np.float64]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class RopeFrequencies(NamedTuple):
    """RoPE frequencies of each layer.

    Attributes:
        layers: float64, radians per position; empty for layers without RoPE.
        refusal: why frequencies cannot be determined, or None.
    """

    layers: list[Frequencies]
    refusal: str | None = None


def find_turning(
    model: PreTrainedModel, layers: Sequence[KeysAndValues], dtype: str
) -> RopeFrequencies:
    """Return the RoPE frequencies of each layer.

    Args:
        model: the transformers model.
        layers: keys and values of each layer, [num_kv_heads, num_positions, head_dim], of one
            token that sees only itself at positions 0, 1, ...
        dtype: compute dtype.
    """
    others = sorted(rope_types(model.config.to_dict()) - {"default"})
    if others:
        return RopeFrequencies(
            [], f"RoPE type {others[0]!r} cannot be shifted in the torch runner, only plain RoPE"
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
            return RopeFrequencies([], f"layer {number} uses positions in other ways than RoPE")
        best = min(
            (one for one in known if 2 * len(one) <= keys.shape[-1]),
            key=lambda one: _misfit(keys, one),
        )
        if _misfit(keys, best) > tolerance:
            return RopeFrequencies(
                [],
                f"layer {number} does not apply plain RoPE to its keys, in halves of a head",
            )
        found.append(best)
    return RopeFrequencies(found)


def _misfit(keys: torch.Tensor, frequencies: Frequencies) -> float:
    """Return the relative distance of the first key, rotated to all positions, from the keys."""
    wide = keys.to("cpu", torch.float32)
    count = wide.shape[1]
    turned = turn_keys(
        wide[:, :1].expand_as(wide), np.arange(count), torch.arange(count), frequencies
    )
    return _distance(turned, wide)


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """Return the relative distance; infinite if `others` is zero."""
    # Not `Tensor.norm`, which takes a deprecated path on Apple GPUs.
    size = float(torch.linalg.vector_norm(others.float()))
    return float(torch.linalg.vector_norm((some - others).float())) / size if size else math.inf
