"""A model on disk, opened and parsed once, for safetensors, GGUF and ONNX alike."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp
from kvboost_edge.models.config.file import (
    GenerationDefaults,
    read_config,
    read_generation_config,
    stored_dtype,
)
from kvboost_edge.models.config.layer_ropes import with_long_rope
from kvboost_edge.models.config.pooling import UNSAID, Pooling, gguf_pooling, read_pooling
from kvboost_edge.models.config.spec import ModelSpec, describe_model
from kvboost_edge.models.families.registry import FAMILIES
from kvboost_edge.models.fingerprint import (
    fingerprint_of_directory,
    fingerprint_of_files,
    fingerprint_of_onnx,
    fingerprinted_files,
)
from kvboost_edge.models.gguf.dense_tensors import gguf_dense
from kvboost_edge.models.gguf.metadata_config import TOKENS, gguf_config, gguf_generation
from kvboost_edge.models.gguf.source import GgufSource, own_layers
from kvboost_edge.models.gguf.split import read_gguf_model
from kvboost_edge.models.gguf.tensor_check import check_gguf
from kvboost_edge.models.gguf.tensor_names import counted_parts, is_other_part
from kvboost_edge.models.onnx.file import read_onnx
from kvboost_edge.models.onnx.folder import OnnxFolder, find_onnx
from kvboost_edge.models.onnx.folder_config import outer_config
from kvboost_edge.models.onnx.graph_check import check_onnx, onnx_types
from kvboost_edge.models.onnx.native import OnnxDecoder, native_decoder
from kvboost_edge.models.onnx.past import PastLayout, past_layout
from kvboost_edge.models.packed.pack_plan import (
    STORED,
    PackEntry,
    check_tensors,
    is_quantized,
    pack_plan,
    plan_bytes,
)
from kvboost_edge.models.weights.awq_gptq import PackedQuantSource
from kvboost_edge.models.weights.dense_folders import Matrices, read_dense
from kvboost_edge.models.weights.head import with_found_head
from kvboost_edge.models.weights.ordered import in_kernel_order
from kvboost_edge.models.weights.safetensors_check import check_weights
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.source import WeightSource, WeightSummary
from kvboost_edge.models.weights.stacked_experts import ColumnExperts

__all__ = ["Checkpoint"]


class Checkpoint(abc.ABC):
    """Contents of a model. Errors are ModelFormatError and name the file.

    The config, its spec, the plans of packed weights, the header of a GGUF file and the fingerprint
    are computed once. No file stays open or mapped.
    """

    is_gguf: bool
    rope_range = "short"
    native_refusal = ""
    """Why the native runner cannot read the files, whatever the config says; "" where it can."""
    onnx_refusal: str | None = None
    """Why the ONNX runner cannot run the file; "" where it can, None where there is no ONNX file.
    """

    def __init__(self, path: Path, cache_dir: Path | None = None) -> None:
        self.path = path
        self.cache_dir = cache_dir
        self._stamps: tuple[FileStamp, ...] = ()  # of the files, before they were read
        self._fingerprint = ""
        self._plans: dict[str, list[PackEntry]] = {}

    @staticmethod
    def open(
        model: Checkpoint | Path | str, *, cache_dir: Path | None = None, rope_range: str = "short"
    ) -> Checkpoint:
        """Return the checkpoint at a path that `locate_model` returned; an open one is returned as
        it is.

        Args:
            cache_dir: directory for digests and packed weights; `NO_CACHE`: none.
            rope_range: see `EngineConfig`. `config` raises ConfigError for a model that has only
                one range.
        """
        if isinstance(model, Checkpoint):
            return model
        path = Path(model)
        onnx = find_onnx(path)
        found: Checkpoint
        if onnx is not None:
            found = _OnnxFile(onnx, cache_dir)
        else:
            found = _GgufFile(path, cache_dir) if path.is_file() else _Directory(path, cache_dir)
        found.rope_range = rope_range
        return found

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """Config in transformers' format, from config.json or the metadata of a GGUF file."""
        return (
            with_long_rope(self._read_config())
            if self.rope_range == "long"
            else self._read_config()
        )

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Spec of the model for the native runner.

        Raises ModelFormatError with the reason if that runner does not support the model.
        """
        return describe_model(self.config)

    def plan(self, weights: str) -> list[PackEntry]:
        """Return the entries of the packed weights in a format, see `pack_plan`."""
        if weights not in self._plans:
            self._plans[weights] = self._make_plan(weights)
        return self._plans[weights]

    def _make_plan(self, weights: str) -> list[PackEntry]:
        if weights != STORED:
            return pack_plan(self.spec, weights)
        with self.open_source() as source:
            return pack_plan(self.spec, STORED, source)

    @abc.abstractmethod
    def _read_config(self) -> Mapping[str, Any]: ...

    @property
    @abc.abstractmethod
    def is_quantized(self) -> bool:
        """True if weights are stored in a quantized format, which is then kept."""

    @property
    @abc.abstractmethod
    def format(self) -> str:
        """Name of the file format, such as "GGUF Q4_K, Q6_K" or "safetensors bfloat16", from
        headers alone.
        """

    @property
    def file_bytes(self) -> int:
        """Size of all files that the fingerprint covers."""
        return sum(stamp.size for stamp in self._current_stamps())

    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Return a GGUF file's tokenizer metadata, arrays of strings as lists; None: there are
        tokenizer files.
        """
        return None

    def gguf_settings(self) -> Mapping[str, Any]:
        """Return `gguf_metadata` without the arrays of strings, which are large; {} with tokenizer
        files.
        """
        return {}

    @property
    def other_parts(self) -> Mapping[str, int]:
        """Number of tensors in each unused part other than the language model, such as {"visual":
        316}.
        """
        return {}

    @property
    def pooling(self) -> Pooling:
        """Pooling of an embedding model."""
        return UNSAID

    def dense(self) -> Matrices:
        """Return the matrices that turn a pooled vector into the embedding, in order."""
        return read_dense(self.pooling.dense, self.config)

    @abc.abstractmethod
    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        """Return the end-of-sequence and other special ids, and the sampling defaults."""

    @abc.abstractmethod
    def summary(self) -> WeightSummary:
        """Return a summary of the weight files after checking them against the config."""

    def open_source(self) -> WeightSource:
        """Return the tensors, as a context manager, in the order of the native runner's kernels."""
        return in_kernel_order(self._open_files, self.config, self._describe)

    def _describe(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the spec of a config."""
        return self.spec

    @abc.abstractmethod
    def _open_files(self) -> WeightSource:
        """Return the tensors in the order of the files."""

    @property
    def onnx_file(self) -> Path:
        """The ONNX file; raises ModelFormatError if there is none."""
        raise ModelFormatError(f"{self.path} is no ONNX model")

    def past_layout(self) -> PastLayout:
        """Return the layout of KV in the ONNX file's inputs and outputs.

        Raises ModelFormatError if it is not supported, or if there is no ONNX file.
        """
        raise ModelFormatError(f"{self.path} is no ONNX model")

    def packed_bytes(self, weights: str) -> int:
        """Return the bytes of the weights packed in a format; head and embedding keep their own
        formats.
        """
        return plan_bytes(self.plan(weights))

    def fingerprint(self, *, cache_dir: Path | None = None) -> str:
        """Return the SHA-256 of everything that identifies the model.

        Args:
            cache_dir: directory for digests of large files; None: the checkpoint's own.
        """
        if not self._fingerprint:
            self._stamps = self._stamps or self._current_stamps()
            found = self._read_fingerprint(self.cache_dir if cache_dir is None else cache_dir)
            for path in self.changed_files():
                raise ModelFormatError(
                    f"{path} changed while it was read; load it when it is complete"
                )
            self._fingerprint = found
        return self._fingerprint

    def changed_files(self) -> list[str]:
        """Return the files that changed since the fingerprint was taken."""
        return sorted({stamp.path for stamp in set(self._stamps) ^ set(self._current_stamps())})

    def _current_stamps(self) -> tuple[FileStamp, ...]:
        try:
            return tuple(FileStamp.of(path) for path in self._files())
        except OSError as error:
            raise ModelFormatError(f"{self.path} cannot be read: {error}") from error

    @abc.abstractmethod
    def _files(self) -> list[Path]:
        """Return every file that the fingerprint covers."""

    @abc.abstractmethod
    def _read_fingerprint(self, cache_dir: Path | None) -> str: ...


class _Directory(Checkpoint):
    """A directory of safetensors (float, AWQ, GPTQ or MXFP4), config.json and tokenizer files."""

    is_gguf = False

    def _read_config(self) -> Mapping[str, Any]:
        return with_found_head(
            read_config(self.path), self.path, is_embedding=bool(self.pooling.source)
        )

    @property
    def other_parts(self) -> Mapping[str, int]:
        with SafetensorsSource(self.path, split_experts=False) as source:
            return source.parts

    @functools.cached_property
    def pooling(self) -> Pooling:
        return read_pooling(self.path)

    @functools.cached_property
    def is_quantized(self) -> bool:
        if not self.config.get("quantization_config"):
            return False
        with self.open_source() as source:
            return is_quantized(source)

    @property
    def format(self) -> str:
        quantized = self.config.get("quantization_config")
        kind = (
            quantized.get("quant_method")
            if isinstance(quantized, Mapping)
            else stored_dtype(self.config)
        )
        return f"safetensors {kind or 'float32'}"

    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        return read_generation_config(self.path, self.config, tokenizer_eos=tokenizer_eos)

    def summary(self) -> WeightSummary:
        return check_weights(self.path, self.config, cache_dir=self.cache_dir)

    def _open_files(self) -> WeightSource:
        if (family := FAMILIES.get(str(self.config.get("model_type")))) and family.in_columns:
            return ColumnExperts(self.path)
        is_packed = bool(self.config.get("quantization_config"))
        return (
            PackedQuantSource(self.path, self.config) if is_packed else SafetensorsSource(self.path)
        )

    def _files(self) -> list[Path]:
        return fingerprinted_files(self.path)

    def _read_fingerprint(self, cache_dir: Path | None) -> str:
        return fingerprint_of_directory(self.path, cache_dir=cache_dir)


class _GgufFile(Checkpoint):
    """One GGUF file that holds everything, or its parts in one directory.

    The headers are parsed on opening, the vocabulary when it is first needed.
    """

    is_gguf = True

    def __init__(self, path: Path, cache_dir: Path | None = None) -> None:
        super().__init__(path, cache_dir)
        self._header = read_gguf_model(path)
        self._stamps = tuple(part.stamp for part in self._header.parts)

    def _read_config(self) -> Mapping[str, Any]:
        return gguf_config(self._header, self._vocabulary)

    @functools.cached_property
    def is_quantized(self) -> bool:
        with self.open_source() as source:
            return is_quantized(source)

    @property
    def pooling(self) -> Pooling:
        return gguf_pooling(self._header.values, self.path)

    def dense(self) -> Matrices:
        return gguf_dense(self._header, self.config)

    @functools.cached_property
    def _vocabulary(self) -> list[str]:
        return self._header.strings(TOKENS) if self._header.has_strings(TOKENS) else []

    @property
    def other_parts(self) -> Mapping[str, int]:
        return counted_parts(self._header.tensors, own_layers(self._header))

    @property
    def format(self) -> str:
        counts: dict[str, int] = {}
        for name, tensor in self._header.tensors.items():
            if len(tensor.shape) > 1 and not is_other_part(name):
                counts[tensor.type] = counts.get(tensor.type, 0) + math.prod(tensor.shape)
        return f"GGUF {', '.join(sorted(counts, key=lambda kind: -counts[kind]))}"

    def gguf_metadata(self) -> Mapping[str, Any]:
        keys = [
            key
            for key in self._header.values
            if key.startswith("tokenizer.") and self._header.has_strings(key)
        ]
        strings = {
            key: self._vocabulary if key == TOKENS else self._header.strings(key) for key in keys
        }
        return {**self.gguf_settings(), **strings}

    def gguf_settings(self) -> Mapping[str, Any]:
        return {
            key: value
            for key, value in self._header.values.items()
            if (key.startswith("tokenizer.") and not self._header.has_strings(key))
            or key == "general.architecture"
        }

    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        return gguf_generation(self._header, self.config, tokenizer_eos)

    def summary(self) -> WeightSummary:
        return check_gguf(self._source, self.config, self._describe, cache_dir=self.cache_dir)

    @functools.cached_property
    def _source(self) -> GgufSource:
        return GgufSource(self._header)

    def _open_files(self) -> WeightSource:
        self._source.check_unchanged()
        return self._source

    def _files(self) -> list[Path]:
        return [part.path for part in self._header.parts]

    def _read_fingerprint(self, cache_dir: Path | None) -> str:
        return fingerprint_of_files(self._files(), cache_dir=cache_dir)


class _OnnxFile(Checkpoint):
    """An ONNX file with external data, config.json or genai_config.json, and tokenizer files.

    Its graph is read on opening, and matched to a family when that is first needed.
    """

    is_gguf = False

    def __init__(self, folder: OnnxFolder, cache_dir: Path | None = None) -> None:
        super().__init__(folder.root, cache_dir)
        self._folder = folder
        self._model = read_onnx(folder.model)
        self._small = tuple(FileStamp.of(path) for path in fingerprinted_files(folder.root, []))
        self._stamps = (*self._small, *(part.stamp for part in self._model.files))

    @functools.cached_property
    def _decoder(self) -> OnnxDecoder | ModelFormatError:
        """Spec and weights for the native runner, or the error that says why there are none."""
        try:
            decoder = native_decoder(self._folder, self._model)
            with decoder.open_source() as source:
                check_tensors(pack_plan(decoder.spec, "f32"), source)
        except ModelFormatError as error:
            return error
        return decoder

    @property
    def native_refusal(self) -> str:  # type: ignore[override]
        return str(self._decoder) if isinstance(self._decoder, ModelFormatError) else ""

    @functools.cached_property
    def onnx_refusal(self) -> str:  # type: ignore[override]
        try:
            self.past_layout()
        except ModelFormatError as error:
            return str(error)
        return ""

    @property
    def onnx_file(self) -> Path:
        return self._folder.model

    def past_layout(self) -> PastLayout:
        return past_layout(self._model, self.config)

    def _read_config(self) -> Mapping[str, Any]:
        if isinstance(self._decoder, ModelFormatError):
            return outer_config(self._folder)
        return self._decoder.config

    @functools.cached_property
    def is_quantized(self) -> bool:
        if isinstance(self._decoder, ModelFormatError):
            return False
        with self._decoder.open_source() as source:
            return is_quantized(source)

    @property
    def format(self) -> str:
        return f"ONNX {', '.join(sorted(onnx_types(self._model)))}"

    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        return read_generation_config(self.path, self.config, tokenizer_eos=tokenizer_eos)

    def summary(self) -> WeightSummary:
        found = None if isinstance(self._decoder, ModelFormatError) else self._decoder
        return check_onnx(self._model, found, self.config, cache_dir=self.cache_dir)

    def _open_files(self) -> WeightSource:
        if isinstance(self._decoder, ModelFormatError):
            raise self._decoder
        return self._decoder.open_source()

    def _files(self) -> list[Path]:
        return fingerprinted_files(self.path, [part.path for part in self._model.files])

    def _read_fingerprint(self, cache_dir: Path | None) -> str:
        return fingerprint_of_onnx(
            self.path, [part.path for part in self._model.files], cache_dir=cache_dir
        )
