"""Detection of a transformers model's RoPE frequencies from its keys.

The probe computes the same token at several positions, where it attends only to itself. Its hidden
state is therefore equal everywhere, and its keys differ only by position. If one of the model's
frequency tables maps the keys to each other, it is the layer's table. If all keys are equal, the
layer has no RoPE. Otherwise the layer does not use plain RoPE.
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
"""Number of consecutive positions in the probe, from 0.

Transformers would treat positions with gaps as several sequences.
"""
# Relative distances. A wrong theta gives far larger ones.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.004}

Frequencies = npt.NDArray[np.float64]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class RopeFrequencies(NamedTuple):
    """RoPE frequencies of each layer.

    Attributes:
        layers: float64, radians per position. Empty for layers without RoPE.
        refusal: reason why frequencies cannot be determined, or None.
    """

    layers: list[Frequencies]
    refusal: str | None = None


def find_turning(
    model: PreTrainedModel, layers: Sequence[KeysAndValues], dtype: str
) -> RopeFrequencies:
    """Return the RoPE frequencies of each layer.

    Args:
        model: the transformers model.
        layers: keys and values of each layer, [num_kv_heads, num_positions, head_dim], for one
            token that attends only to itself at positions 0, 1, ...
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
            return RopeFrequencies([], f"layer {number} uses positions other than by RoPE")
        best = min(
            (one for one in known if 2 * len(one) <= keys.shape[-1]),
            key=lambda one: _misfit(keys, one),
        )
        if _misfit(keys, best) > tolerance:
            return RopeFrequencies(
                [],
                f"layer {number} does not apply plain RoPE to the halves of its key heads",
            )
        found.append(best)
    return RopeFrequencies(found)


def _misfit(keys: torch.Tensor, frequencies: Frequencies) -> float:
    """Return the relative distance between the keys and the first key rotated to all positions."""
    wide = keys.to("cpu", torch.float32)
    count = wide.shape[1]
    turned = turn_keys(
        wide[:, :1].expand_as(wide), np.arange(count), torch.arange(count), frequencies
    )
    return _distance(turned, wide)


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    """Return the relative distance, which is infinite if `others` is zero."""
    # `Tensor.norm` takes a deprecated path on Apple GPUs.
    size = float(torch.linalg.vector_norm(others.float()))
    return float(torch.linalg.vector_norm((some - others).float())) / size if size else math.inf
