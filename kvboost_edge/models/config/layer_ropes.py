"""RoPE of each layer, which may depend on the layer type or be absent in some layers.

longrope has one set of factors up to the original length and another beyond it. transformers
switches between them when a sequence exceeds the original length, which would invalidate cached
keys. An engine here uses one set for all its sequences, so results are exact at every length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.config.architectures import LONG_RANGE, PHI3_LENGTH, has_two_ranges
from kvboost_edge.models.config.json_readers import context_length
from kvboost_edge.models.config.nested import text_config
from kvboost_edge.models.config.rope_kinds import RopeKind, rope_kind
from kvboost_edge.models.families.fields import number_of, size_of
from kvboost_edge.models.families.windows import given_step, given_window

__all__ = ["RopeTraits", "layer_ropes", "rope_settings", "with_long_rope"]

Config = Mapping[str, Any]


class RopeTraits(Protocol):
    """RoPE settings of a family, see `Family`."""

    @property
    def theta(self) -> float: ...

    @property
    def partial(self) -> float: ...

    @property
    def fused(self) -> bool: ...

    @property
    def no_rope(self) -> str: ...

    @property
    def local_rope(self) -> bool: ...

    @property
    def local_theta(self) -> float: ...

    @property
    def layer_thetas(self) -> bool: ...


def layer_ropes(
    config: Config, family: RopeTraits, head_dims: Sequence[int]
) -> tuple[tuple[RopeKind, ...], Callable[[int, int], int]]:
    """Return the RoPE kinds of a model, and a function that selects one for a layer.

    Args:
        config: config of the language model.
        family: RoPE settings of its family.
        head_dims: head size of layers without a window, then of layers with one.

    Returns:
        The kinds, and a function (layer, window) -> index of the kind, -1 for a layer without RoPE.
    """
    longest = context_length(config)
    (head_dim, local_dim) = head_dims
    if family.local_rope:
        full, local = _local_rope_settings(config, family)
        return (
            rope_kind(full, head_dim, longest),
            rope_kind(local, local_dim, longest),
        ), lambda i, w: int(w > 0)
    if family.layer_thetas:
        return _ropes_by_theta(config, rope_settings(config, family), head_dim)
    ropes = (rope_kind(rope_settings(config, family), head_dim, longest),)
    if not family.no_rope:
        return ropes, lambda i, w: 0
    if family.no_rope == "full":
        mixed = given_window({"sliding_window": 4096, **config}, 0) > 0
        return ropes, lambda i, w: 0 if w or not mixed else -1
    if family.no_rope == "typed":
        kind = 0 if _has_rope(config) else -1
        return ropes, lambda i, w: kind
    layers = _num_layers(config)
    step = given_step(config, ("no_rope_layer_interval",), 4)
    uses = config.get("no_rope_layers") or [int((i + 1) % step != 0) for i in range(layers)]
    if (
        not isinstance(uses, (list, tuple))
        or len(uses) != layers
        or any(use not in (0, 1) for use in uses)
    ):
        raise ModelFormatError(
            f"no_rope_layers={uses!r:.200} must be 0 or 1 for each of the {layers} layers"
        )
    return ropes, lambda i, w: 0 if uses[i] else -1


def _has_rope(config: Config) -> bool:
    """Return whether `position_embedding_type` selects RoPE, the default."""
    kind = config.get("position_embedding_type", "rope")
    if kind not in ("rope", "nope", None):
        raise ModelFormatError(
            f"position_embedding_type={kind!r} is not supported (supported: rope, nope)"
        )
    return bool(kind == "rope")


def _ropes_by_theta(
    config: Config, settings: Mapping[str, Any], head_dim: int
) -> tuple[tuple[RopeKind, ...], Callable[[int, int], int]]:
    layers = _num_layers(config)
    thetas = config.get("layer_rope_theta") or [settings["rope_theta"]] * layers
    if not isinstance(thetas, (list, tuple)) or len(thetas) != layers:
        raise ModelFormatError(
            f"layer_rope_theta={thetas!r:.200} must be a number for each of the {layers} layers"
        )
    found = [
        number_of({"layer_rope_theta": theta}, "layer_rope_theta", 0.0, 1e12) for theta in thetas
    ]
    bases = sorted({theta for theta in found if theta}) or [settings["rope_theta"]]
    kinds = [
        rope_kind({**settings, "rope_theta": theta}, head_dim, context_length(config))
        for theta in bases
    ]
    return tuple(kinds), lambda i, w: bases.index(found[i]) if found[i] else -1


def rope_settings(config: Config, family: RopeTraits) -> dict[str, Any]:
    """Return the RoPE settings of a config.

    They are in `rope_parameters`, or in the older keys `rope_theta`, `rope_scaling` and
    `partial_rotary_factor`.

    Raises:
        ModelFormatError: the settings cannot be read, or `rope_scaling` contradicts
            `rope_parameters`.
    """
    theta = config.get("rope_theta")
    older = {"rope_theta": family.theta if theta is None else theta}
    if config.get("partial_rotary_factor") is not None:
        older["partial_rotary_factor"] = config["partial_rotary_factor"]
    newer = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(newer, Mapping) or any(
        isinstance(value, Mapping) for value in newer.values()
    ):
        raise ModelFormatError(
            f"RoPE settings {newer!r} are not supported by the native runner for this family"
        )
    _check_older_settings(newer, config.get("rope_scaling") or {})
    merged = {
        "partial_rotary_factor": family.partial,
        **older,
        **{key: value for key, value in newer.items() if value is not None},
    }
    name = "original_max_position_embeddings"
    outer = config.get("original_max_position_embeddings")
    if family.fused and merged.get("rope_type", merged.get("type")) in ("su", "yarn"):
        merged["rope_type"] = "longrope"  # names that Phi-3 configs use for longrope
    if merged.get("rope_type", merged.get("type")) == "longrope":
        # For longrope, transformers prefers the length outside the RoPE settings. Phi-3 has a
        # default length.
        merged[name] = (
            outer or (PHI3_LENGTH if family.fused else merged.get(name)) or context_length(config)
        )
        merged[LONG_RANGE] = bool(config.get(LONG_RANGE))
    else:
        merged[name] = merged.get(name) or outer or context_length(config)
    return merged


def _check_older_settings(newer: Mapping[str, Any], scaling: object) -> None:
    """Check that `rope_scaling` has no setting that `rope_parameters` lacks.

    transformers would use `rope_scaling` and drop `rope_parameters`, and with it the base.
    """
    if not isinstance(scaling, Mapping):
        raise ModelFormatError(f"rope_scaling={scaling!r:.200} must be an object")
    kinds = {"type": newer.get("rope_type", newer.get("type"))}
    known = {**newer, **kinds, "rope_type": kinds["type"]}
    differing = sorted(key for key, value in scaling.items() if known.get(key) != value)
    if differing:
        raise ModelFormatError(
            f"rope_scaling={dict(scaling)!r:.200} contradicts rope_parameters={dict(newer)!r:.200} "
            f"({', '.join(differing)}); give all RoPE settings in rope_parameters and remove "
            "rope_scaling"
        )


def _local_rope_settings(
    config: Config, family: RopeTraits
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the RoPE settings of full-attention layers, then of sliding-window layers."""
    newer = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kinds = ("full_attention", "sliding_attention")
    found = [newer.get(kind) or {} for kind in kinds] if isinstance(newer, Mapping) else [newer]
    if not all(isinstance(part, Mapping) for part in (*found, scaling)) or set(newer) - set(kinds):
        raise ModelFormatError(
            f"RoPE settings {newer or scaling!r:.200} are not supported by the native runner; this "
            f"family needs an object with the settings of {kinds[0]} and {kinds[1]}"
        )
    full, local = ({**part, **more} for part, more in zip(found, (scaling, {}), strict=True))
    if not newer:
        full["rope_theta"] = config.get("rope_theta")
        local["rope_theta"] = config.get("rope_local_base_freq")
    full["rope_theta"] = full.get("rope_theta") or family.theta
    local["rope_theta"] = local.get("rope_theta") or family.local_theta
    return full, local


def _num_layers(config: Config) -> int:
    layers = size_of(config, "num_hidden_layers")
    if layers is None:
        raise ModelFormatError("the config lacks the key 'num_hidden_layers'")
    return layers


def with_long_rope(config: Config) -> Config:
    """Return the config for rope_range="long".

    Raises:
        ConfigError: the model's RoPE is not of type longrope.
    """
    if not has_two_ranges(config):
        raise ConfigError(
            "rope_range='long' needs RoPE of type longrope, which the config of "
            f"model_type={text_config(config).get('model_type')!r} does not have; leave it out"
        )
    inner = config.get("text_config")
    nested = {"text_config": {**inner, LONG_RANGE: True}} if isinstance(inner, Mapping) else {}
    return {**config, **nested, LONG_RANGE: True}
