"""Readers for config.json and generation_config.json that check their values."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.json_file import read_json_object
from kvboost_edge.models.config.architectures import SUPPORTED_ARCHITECTURES
from kvboost_edge.models.config.model_config import read_config_object
from kvboost_edge.models.config.nested import is_nested, text_config
from kvboost_edge.models.families.family import Family
from kvboost_edge.models.families.fields import number_of, positive, size_of
from kvboost_edge.models.families.registry import FAMILIES

__all__ = [
    "MULTIPLIERS",
    "GenerationDefaults",
    "context_length",
    "generation_defaults",
    "read_config",
    "read_generation_config",
    "stored_dtype",
    "text_config",
]

_LOG = logging.getLogger(__name__)

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
# If one of these numbers is damaged, every result is wrong, with any runner.
_NUMBERS = {"rms_norm_eps": (0.0, 1.0), **dict.fromkeys(MULTIPLIERS, (1e-6, 1e6))}
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


# Allowed range of each sampling value in a generation config.
_SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "top_p": (1e-9, 1),
    "top_k": (0, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.001, 1000),
}


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Special token ids and default sampling values of a model.

    Attributes:
        eos_token_ids: ids that end generation, sorted and unique; may be empty.
        bos_token_id: id of the beginning-of-sequence token.
        pad_token_id: id of the padding token.
        suppressed_token_ids: ids that are never generated, such as image placeholders; sorted and
            unique.
        sampling: values for temperature, top_p, top_k, min_p and repetition_penalty that the
            model's files give.
    """

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    suppressed_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)


def read_config(model_dir: Path | str) -> dict[str, Any]:
    """Return the object in config.json.

    For a supported family, the keys that every causal language model needs are checked. Other
    families are left to `check_model_compatibility`, whose message is more helpful than a missing
    key.

    Raises:
        ModelFormatError: the config is missing or invalid; the message names the file and the key.
    """
    path = Path(model_dir) / "config.json"
    config = read_config_object(Path(model_dir))
    settings = config.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise ModelFormatError(
            f"{path}: quantization_config must be an object, got {type(settings).__name__}"
        )
    if config["model_type"] not in SUPPORTED_ARCHITECTURES or config.get("is_encoder_decoder"):
        return config
    _complete(config)
    try:
        inner = text_config(config)
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from error
    complete = inner is config or is_nested(config)
    for name in _REQUIRED:
        # The config of a composite model may omit values that equal the architecture's defaults.
        if size_of(inner, name, path) is None and complete:
            raise ModelFormatError(f"{path} lacks the key {name!r}")
    for name, (low, high) in _NUMBERS.items():
        if inner.get(name) is not None:
            number_of(inner, name, low, high, path)
    if complete:
        context_length(config, path)
        _check_heads(inner, path)
    return config


def context_length(config: Mapping[str, Any], path: Path | str = "config") -> int:
    """Return the longest sequence, in tokens, that the model supports.

    A sliding window does not limit it.
    """
    inner = text_config(config)
    for key in _CONTEXT_KEYS:
        if inner.get(key) is not None:
            return positive(key, inner[key], path)
    raise ModelFormatError(
        f"{path} lacks the context length: it contains none of the keys {', '.join(_CONTEXT_KEYS)}"
    )


def stored_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of the weights according to the config, or "" if it gives none."""
    named = [
        part.get(key) for part in (text_config(config), config) for key in ("dtype", "torch_dtype")
    ]
    return next((str(name) for name in named if name), "")


def read_generation_config(
    model_dir: Path | str,
    config: Mapping[str, Any] | None = None,
    *,
    tokenizer_eos: int | None = None,
) -> GenerationDefaults:
    """Return the special token ids and default sampling values of a model directory.

    The directory need not contain generation_config.json.
    """
    path = Path(model_dir) / "generation_config.json"
    generation = read_json_object(path) if path.is_file() else {}
    if config is None:
        config = read_config(model_dir)
    return generation_defaults(config, generation, tokenizer_eos=tokenizer_eos, path=path)


def generation_defaults(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    tokenizer_eos: int | None = None,
    path: Path | str = "generation_config.json",
) -> GenerationDefaults:
    """Merge special token ids from the generation config, the model config and the tokenizer."""
    inner = text_config(config)
    eos = {*_ids(generation, "eos_token_id", path), *_ids(inner, "eos_token_id", "config.json")}
    eos.update(_ids(config, "eos_token_id", "config.json"))
    if tokenizer_eos is not None:
        eos.add(tokenizer_eos)
    first: dict[str, int | None] = {}
    for key in ("bos_token_id", "pad_token_id"):
        first[key] = next(
            iter([*_ids(generation, key, path), *_ids(inner, key, "config.json")]), None
        )
    suppressed = sorted(set(_ids(generation, "suppress_tokens", path)))
    vocab_size = size_of(inner, "vocab_size")
    if suppressed and vocab_size is not None and suppressed[-1] >= vocab_size:
        raise ModelFormatError(
            f"{path}: suppress_tokens contains the id {suppressed[-1]}, outside the vocabulary of "
            f"{vocab_size}"
        )
    return GenerationDefaults(
        tuple(sorted(eos)),
        first["bos_token_id"],
        first["pad_token_id"],
        tuple(suppressed),
        _sampling(generation, path),
    )


def _sampling(generation: Mapping[str, Any], path: Path | str) -> dict[str, float]:
    """Return the sampling values in a generation config.

    Invalid values are ignored with a warning. Null counts as absent, and `do_sample: false` means
    temperature 0.
    """
    found: dict[str, float] = {}
    for name, (low, high) in _SAMPLING_RANGES.items():
        value = generation.get(name)
        if value is None:
            continue
        kinds = int if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            _LOG.warning(
                "%s: %s=%.40r is not a number in [%g, %g]; requests use the default instead",
                path,
                name,
                value,
                low,
                high,
            )
            continue
        found[name] = value
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _complete(config: dict[str, Any]) -> None:
    """Add sizes that configs of this family omit or that follow from other keys."""
    family = _family_of(config)
    if family is None:
        return
    if family.kv_heads is not None:
        config.setdefault("num_key_value_heads", family.kv_heads)
    layers = family.num_layers(config) if family.num_layers else None
    if layers is not None:
        config["num_hidden_layers"] = layers


def _family_of(config: Mapping[str, Any]) -> Family | None:
    return FAMILIES.get(str(config.get("model_type")))


def _check_heads(config: Mapping[str, Any], path: Path) -> None:
    heads = size_of(config, "num_attention_heads", path)
    kv_heads = size_of(config, "num_key_value_heads", path)
    hidden = size_of(config, "hidden_size", path)
    if heads is None or hidden is None:
        return
    if kv_heads is not None and heads % kv_heads:
        raise ModelFormatError(
            f"{path}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    if config.get("head_dim") is not None:
        positive("head_dim", config["head_dim"], path)
    elif hidden % heads and not ((family := _family_of(config)) and family.odd_heads):
        raise ModelFormatError(
            f"{path}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
        )


def _ids(fields: Mapping[str, Any], key: str, path: Path | str) -> list[int]:
    """Return the token ids under a key, which may hold one id, a list or nothing.

    Negative ids, which mean "none" in some configs, are dropped.
    """
    value = fields.get(key)
    values: Iterable[Any] = (
        value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    )
    found: list[int] = []
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ModelFormatError(
                f"{path}: {key}={value!r} must be an integer or a list of integers"
            )
        if item >= 0:
            found.append(item)
    return found
