"""Quantization configs of checkpoints: AWQ, GPTQ, MXFP4 and NVFP4 with 4 bits, and BitNet."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.families.registry import FAMILIES

__all__ = ["GROUP", "INSTEAD", "NVFP4_METHODS", "PackedLayout", "format_name", "packed_layout"]

GROUP = 32
"""Inputs per scale in the packed formats of AWQ, GPTQ and MXFP4.

The group size of an AWQ or GPTQ checkpoint must be a multiple of it.
"""

NVFP4_METHODS = {
    "modelopt": ("quant_algo", ("NVFP4", "W4A16_NVFP4", "NVFP4_W4A16")),
    "compressed-tensors": ("format", ("nvfp4-pack-quantized",)),
}
"""Methods of NVFP4 checkpoints, with the setting that declares NVFP4 and its values."""

INSTEAD = "use a GGUF file or the float checkpoint of this model"
"""Advice in messages about quantized checkpoints that are not supported."""

_WEIGHT_PLACES = ("weight_input", "weight_output")  # locations in `transform_config`
_METHODS = ("awq", "gptq", "mxfp4", "bitnet", *NVFP4_METHODS)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of a checkpoint's codes.

    Attributes:
        method: "awq", "gptq", "mxfp4", "nvfp4" or "bitnet".
        group_size: number of inputs that share a scale; not used by "bitnet".
        zero_offset: number to add to the stored zero points.
        divides: True if weights are divided by the stored scale of the matrix (BitNet, NVFP4).
        is_online: True if the files contain floats that become ternary when they are read (BitNet).
    """

    method: str
    group_size: int
    zero_offset: int
    divides: bool = False
    is_online: bool = False


def format_name(settings: Mapping[str, Any]) -> str:
    """Return the format of a quantization config for display, such as "awq" or "modelopt NVFP4"."""
    method = str(settings.get("quant_method") or "")
    if method not in NVFP4_METHODS:
        return method
    key, values = NVFP4_METHODS[method]
    return f"{method} {'NVFP4' if settings.get(key) in values else settings.get(key)}"


def packed_layout(config: Mapping[str, Any]) -> PackedLayout:
    """Return the layout that `quantization_config` describes.

    Raises:
        ModelFormatError: a method or setting is not supported; the message names it.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        raise ModelFormatError(
            f"quantization_config must be an object, got {type(settings).__name__}"
        )
    method = settings.get("quant_method")
    if method not in _METHODS:
        raise ModelFormatError(
            f"quantization_config: quant_method={method!r} is not supported by the native runner "
            f"(supported: {', '.join(_METHODS)}); {INSTEAD}"
        )
    of_mxfp4 = [name for name, family in FAMILIES.items() if family.mxfp4]
    if (method == "mxfp4") != (config.get("model_type") in of_mxfp4):
        names = ", ".join(of_mxfp4)
        raise ModelFormatError(
            f"quantization_config: quant_method={method!r} is not supported for "
            f"model_type={config.get('model_type')!r}: only {names} may be mxfp4, and must be "
            "mxfp4 or floats"
        )
    if method == "mxfp4":
        return PackedLayout("mxfp4", GROUP, 0)
    if method == "bitnet":
        return _bitnet_layout(config, settings)
    if method in NVFP4_METHODS:
        _allow(settings, *NVFP4_METHODS[method])
        _check_rotations(settings.get("transform_config"))
        return PackedLayout("nvfp4", 16, 0, divides=method == "compressed-tensors")
    _allow(settings, "bits" if "bits" in settings else "w_bit", (4,))
    key = "group_size" if "group_size" in settings else "q_group_size"
    group_size = settings.get(key)
    if (
        isinstance(group_size, bool)
        or not isinstance(group_size, int)
        or group_size < GROUP
        or group_size % GROUP
    ):
        raise ModelFormatError(
            f"quantization_config: {key}={group_size!r} must be a multiple of {GROUP}, and -1 is "
            f"not supported; {INSTEAD}"
        )
    if method == "awq":
        _allow(settings, "version", (None, "gemm", "GEMM"))
        _allow(settings, "zero_point", (None, True))
        return PackedLayout("awq", group_size, 0)
    form = settings.get("checkpoint_format")
    _allow(settings, "checkpoint_format", (None, "", "gptq", "gptq_v2"))
    return PackedLayout("gptq", group_size, 0 if form == "gptq_v2" else 1)


def _bitnet_layout(config: Mapping[str, Any], settings: Mapping[str, Any]) -> PackedLayout:
    """Return the layout of a BitNet checkpoint.

    BitLinear divides by the stored scale and has packed weights only. AutoBitLinear multiplies by
    it, or quantizes float weights when they are used ("online").
    """
    _allow(settings, "linear_class", (None, "bitlinear", "autobitlinear"))
    _allow(settings, "quantization_mode", (None, "offline", "online"))
    _allow(settings, "use_rms_norm", (None, False))
    divides = settings.get("linear_class") != "autobitlinear"
    is_online = not divides and settings.get("quantization_mode") == "online"
    family = FAMILIES.get(str(config.get("model_type")))
    if is_online:
        _allow(settings, "modules_to_not_convert", (None, [], ["lm_head"]))
        if family is not None and (family.experts or family.hybrid):
            raise ModelFormatError(
                "quantization_config: quantization_mode='online' is supported for dense models "
                f"only, not for model_type={config.get('model_type')!r}; use packed weights "
                "('offline')"
            )
    return PackedLayout("bitnet", GROUP, 0, divides, is_online)


def _check_rotations(transforms: Any) -> None:
    """Check that `transform_config` of compressed-tensors rotates weights only.

    Rotated weights are stored as such, but activations must be rotated when they are computed.
    """
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if not isinstance(groups, Mapping):
        return
    found = [str(name) for name, group in groups.items() if not _is_in_weights(group)]
    if found:
        raise ModelFormatError(
            f"quantization_config: transform_config has rotations of activations "
            f"({', '.join(found)}), which are not supported; {INSTEAD}"
        )


def _is_in_weights(group: Any) -> bool:
    places = group.get("apply") if isinstance(group, Mapping) else None
    return (
        isinstance(places, list)
        and bool(places)
        and all(
            isinstance(place, Mapping) and place.get("location") in _WEIGHT_PLACES
            for place in places
        )
    )


def _allow(settings: Mapping[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    if settings.get(key) not in allowed:
        known = ", ".join(repr(value) for value in allowed if value not in (None, ""))
        mixed = _layer_formats(settings)
        raise ModelFormatError(
            f"quantization_config: {key}={settings.get(key)!r} is not supported"
            f"{f' (its layers have {mixed})' if mixed else ''}; supported: {known}; {INSTEAD}"
        )


def _layer_formats(settings: Mapping[str, Any]) -> str:
    """Return the formats that a mixture lists for its layers, or ""."""
    lists = (
        (settings.get("quantized_layers"), "quant_algo"),
        (settings.get("config_groups"), "format"),
    )
    found = {
        str(one[key])
        for layers, key in lists
        if isinstance(layers, Mapping)
        for one in layers.values()
        if isinstance(one, Mapping) and one.get(key)
    }
    return ", ".join(sorted(found))
