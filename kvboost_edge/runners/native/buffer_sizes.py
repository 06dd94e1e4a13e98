"""Buffer sizes of a pass, derived from a model's spec."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.kernels.linear.panel import COARSE_BYTES, SEED_BYTES
from kvboost_edge.kernels.linear.weight_formats import GROUP
from kvboost_edge.kernels.program.expert_routing import dispatch_numbers
from kvboost_edge.kernels.program.matrix_tiles import SCRATCH_BYTES
from kvboost_edge.kernels.program.states.sums import MOST_KEYS
from kvboost_edge.kernels.vectors import LANES
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.families.mixers import MIXER_NORMS, Mixer
from kvboost_edge.models.families.moe import Experts

__all__ = ["MixerSizes", "MixtureSizes", "Sizes", "padded"]

# A value head must fit in the scratch memory of a thread.
_MAX_KERNEL_WIDTH = 15
_MOST_DIM = SCRATCH_BYTES // 4


def padded(value: int, multiple: int) -> int:
    """Return the value rounded up to a multiple."""
    return -(-value // multiple) * multiple


class MixtureSizes(NamedTuple):
    """Buffer sizes of layers with experts.

    Attributes:
        experts_per_token: number of experts per token.
        routed: floats in a row of router logits, padded to tiles.
        numbers: length of the header of B_DISPATCH.
        routed_row_bytes: bytes of a routed input row, as codes or floats.
        inner_row_bytes: bytes of a routed row after gate and up.
        parallel_mlp: floats in a row of the parallel MLP, or 0 without one.
    """

    experts_per_token: int
    routed: int
    numbers: int
    routed_row_bytes: int
    inner_row_bytes: int
    parallel_mlp: int

    @classmethod
    def of(cls, experts: Experts, hidden: int, *, floats: bool) -> MixtureSizes:
        """Return the sizes for a layer's experts.

        Args:
            experts: the experts.
            hidden: padded hidden size.
            floats: whether the experts' weights are floats.
        """
        rows = experts.count + (1 if experts.names.shared_gate else 0)
        each = 4 * GROUP if floats else COARSE_BYTES + SEED_BYTES
        routed_row, inner_row = (count // GROUP * each for count in (hidden, experts.width))
        return cls(
            experts.used,
            padded(rows, LANES),
            dispatch_numbers(experts.count),
            routed_row,
            inner_row,
            hidden if experts.beside else 0,
        )


class MixerSizes(NamedTuple):
    """Floats per token in the buffers of a recurrent mixer.

    Attributes:
        projected: outputs of the input projections.
        gates: index of the first gate in `projected`.
        mixed: input of the output projection.
        key: queries, or keys.
        value: values and gates of `ScanInputsOp`.
    """

    projected: int
    gates: int
    mixed: int
    key: int = 0
    value: int = 0

    @classmethod
    def of(cls, mixer: Mixer) -> MixerSizes:
        """Return the sizes of a mixer; raise ModelFormatError if it is not supported."""
        width = mixer.value_heads * mixer.value_dim or mixer.channels
        uneven = (
            mixer.channels % LANES
            or mixer.key_dim % LANES
            or mixer.value_dim % LANES
            or width % GROUP
        )
        if (
            uneven
            or not 1 <= mixer.taps <= _MAX_KERNEL_WIDTH
            or mixer.key_dim > MOST_KEYS
            or mixer.value_dim > _MOST_DIM
        ):
            raise ModelFormatError(
                f"unsupported recurrent layer {mixer}: dims and channels must be multiples of "
                f"{LANES}, key dims at most {MOST_KEYS}, value dims at most {_MOST_DIM}, "
                f"their total ({width}) a multiple of {GROUP}, and the kernel width from 1 to "
                f"{_MAX_KERNEL_WIDTH}"
            )
        if mixer.kind == "conv":
            return cls(3 * mixer.channels, 0, width)
        _check_heads(mixer, width)
        gates = mixer.channels + width
        projected = gates + padded((2 if mixer.kind == "delta" else 1) * mixer.value_heads, LANES)
        return cls(
            projected, gates, width, mixer.key_heads * mixer.key_dim, width + 2 * mixer.value_heads
        )


def _check_heads(mixer: Mixer, width: int) -> None:
    """Raise ModelFormatError for inconsistent heads. `width` is the size of all value heads."""
    if mixer.key_heads < 1 or mixer.value_heads % mixer.key_heads:
        raise ModelFormatError(
            f"{mixer.value_heads} value heads are not a multiple of {mixer.key_heads} key heads"
        )
    if mixer.channels != width + 2 * mixer.key_heads * mixer.key_dim:
        raise ModelFormatError(
            f"the convolution has {mixer.channels} channels, but values, keys and queries need "
            f"{width + 2 * mixer.key_heads * mixer.key_dim}"
        )
    if mixer.norm not in MIXER_NORMS:
        raise ModelFormatError(f"mixer norm {mixer.norm!r} is not one of {MIXER_NORMS}")
    if mixer.norm_groups and width % (LANES * mixer.norm_groups):
        raise ModelFormatError(
            f"{width} values in {mixer.norm_groups} norm groups: the size of a group must be a "
            f"multiple of {LANES}"
        )
    least, most = mixer.time_limit
    if not 0 <= least <= most:
        raise ModelFormatError(
            f"time step limits ({least}, {most}) must satisfy 0 <= minimum <= maximum"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Floats in a row of each buffer, for the widest layer.

    Rows are padded, because vector operations and groups may extend past their end.

    Attributes:
        hidden: hidden state.
        normed: output of a norm or an activation.
        projected: output of the QKV, gate and up, or mixer projections.
        query: queries, or mixer buffers.
        key: keys.
        value: values.
        attended: padded attention output of each layer.
        mixed: output of a recurrent mixer in a layer that also attends, or 0 without such layers.
        per_layer: per-layer inputs of all layers.
        logits: padded vocabulary.
        groups: groups of 32 in the widest quantized row.
        mixture: sizes of layers with experts, or None.
    """

    hidden: int
    normed: int
    projected: int
    query: int
    key: int
    value: int
    attended: tuple[int, ...]
    mixed: int
    per_layer: int
    logits: int
    groups: int
    mixture: MixtureSizes | None

    @classmethod
    def of(cls, spec: ModelSpec, *, floats: bool = False) -> Sizes:
        """Return the sizes for a model. `floats` means that the experts' weights are floats."""
        query = max(spec.num_heads * layer.head_dim for layer in spec.layers)
        key = max(layer.num_kv_heads * layer.head_dim for layer in spec.layers)
        gated = 2 if spec.family.output_gate else 1
        qkv = max(
            (gated * spec.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
            for layer in spec.layers
        )
        mixer = MixerSizes(0, 0, 0) if spec.mixer is None else MixerSizes.of(spec.mixer)
        inner = max(layer.intermediate_size for layer in spec.layers)
        joined = 2 * spec.state_size if spec.joins_hidden_states else 0
        width = 0 if spec.per_layer is None else spec.per_layer.width
        hidden = padded(spec.hidden_size, GROUP)
        normed = padded(max(spec.hidden_size, inner, width), GROUP)
        projected = (
            padded(
                max(
                    qkv,
                    (1 + spec.family.gated) * inner,
                    spec.hidden_size,
                    joined,
                    width,
                    mixer.projected,
                ),
                GROUP,
            )
            + 2 * GROUP
        )
        query = max(query, mixer.key, mixer.mixed)
        value = max(key, mixer.value)
        key = max(key, mixer.key)
        attended = tuple(padded(spec.num_heads * layer.head_dim, GROUP) for layer in spec.layers)
        mixed = (
            mixer.mixed if any(layer.attends and layer.keeps_state for layer in spec.layers) else 0
        )
        groups = max(normed, mixer.mixed, padded(joined, GROUP), *attended) // GROUP
        per_layer = padded(len(spec.layers) * width, LANES) + GROUP * (width % GROUP > 0)
        mixture = (
            None if spec.experts is None else MixtureSizes.of(spec.experts, hidden, floats=floats)
        )
        logits = padded(spec.vocab_size, LANES)
        return cls(
            hidden,
            normed,
            projected,
            query,
            key,
            value,
            attended,
            mixed,
            per_layer,
            logits,
            groups,
            mixture,
        )
