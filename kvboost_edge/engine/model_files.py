"""A model on disk, whatever its form: a directory of safetensors (float, AWQ or GPTQ) or one GGUF file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.models.config.families import describe_model
from kvboost_edge.models.config.file import GenerationDefaults, read_config, read_generation_config
from kvboost_edge.models.fingerprint import model_fingerprint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.packed.plan import STORED, is_quantized, pack_plan, plan_bytes
from kvboost_edge.models.weights.safetensors_check import WeightSummary, check_weights
from kvboost_edge.models.weights.source import open_source
from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["ModelFiles"]


class ModelFiles:
    """What an engine reads of a model. Every method raises ModelFormatError that names the file.

    `path` is what `locate_model` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_gguf = path.is_file()

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The config as transformers writes it, from config.json or from the metadata of a GGUF file."""
        return read_config(self.path)

    @functools.cached_property
    def is_quantized(self) -> bool:
        """Whether weights are stored in a quantized format, which is then kept."""
        if not self.is_gguf and not self.config.get("quantization_config"):
            return False
        with open_source(self.path) as source:
            return is_quantized(source)

    def packed_bytes(self, weights: str) -> int:
        """Bytes of the weights once they are packed in a format, head and embedding in theirs."""
        spec = describe_model(self.config)
        if weights != STORED:
            return plan_bytes(pack_plan(spec, weights))
        with open_source(self.path) as source:
            return plan_bytes(pack_plan(spec, STORED, source))

    def summary(self) -> WeightSummary:
        """The weight files, checked against themselves and the config."""
        return check_weights(self.path, self.config)

    def tokenizer(self) -> Tokenizer:
        if not self.is_gguf:
            return Tokenizer.from_dir(self.path)
        header = read_gguf(self.path)
        keys = [key for key in header.values if key.startswith("tokenizer.") or key == "general.architecture"]
        metadata = {key: header.strings(key) if header.has_strings(key) else header.values[key] for key in keys}
        return gguf_tokenizer(metadata, name=self.path.name)

    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        return read_generation_config(self.path, self.config, tokenizer_eos=tokenizer_eos)

    def fingerprint(self) -> str:
        return model_fingerprint(self.path)
