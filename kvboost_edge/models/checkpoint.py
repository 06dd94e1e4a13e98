"""Checkpoints: a common interface to models in safetensors, GGUF and ONNX files."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import FileStamp
from kvboost_edge.models.config.json_readers import (
    GenerationDefaults,
    read_config,
    read_generation_config,
    stored_dtype,
)
from kvboost_edge.models.config.layer_ropes import with_long_rope
from kvboost_edge.models.config.mtp_spec import MtpSpec, describe_mtp
from kvboost_edge.models.config.pooling import UNSAID, Pooling, gguf_pooling, read_pooling
from kvboost_edge.models.config.quant_config import format_name, packed_layout
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
from kvboost_edge.models.gguf.ollama_layout import in_llama_cpp_layout
from kvboost_edge.models.gguf.source import GgufSource, is_mtp_file, own_layers, trimmed_tensor
from kvboost_edge.models.gguf.split import read_gguf_model
from kvboost_edge.models.gguf.tensor_check import check_gguf
from kvboost_edge.models.gguf.tensor_names import counted_parts, is_other_part
from kvboost_edge.models.onnx.file import read_onnx
from kvboost_edge.models.onnx.folder import OnnxFolder, find_onnx
from kvboost_edge.models.onnx.folder_config import outer_config
from kvboost_edge.models.onnx.graph_check import check_onnx, onnx_types
from kvboost_edge.models.onnx.native import OnnxDecoder, native_decoder
from kvboost_edge.models.onnx.past_kv import PastLayout, past_layout
from kvboost_edge.models.packed.pack_plan import (
    STORED,
    PackEntry,
    check_tensors,
    is_quantized,
    mtp_plan,
    pack_plan,
    plan_bytes,
)
from kvboost_edge.models.weights.awq_gptq import PackedQuantSource
from kvboost_edge.models.weights.bitnet import BitNetSource
from kvboost_edge.models.weights.dense_folders import Matrices, read_dense
from kvboost_edge.models.weights.modalities import assistant_names, mtp_names, text_names
from kvboost_edge.models.weights.nvfp4 import Nvfp4Source
from kvboost_edge.models.weights.output_head import with_found_head
from kvboost_edge.models.weights.reordered import in_kernel_order
from kvboost_edge.models.weights.safetensors_check import check_weights, weight_files
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.stacked_experts import ColumnExperts
from kvboost_edge.models.weights.weight_source import WeightSource, WeightSummary

__all__ = ["Checkpoint"]

_MTP_PARTS = ("mtp", "nextn")  # names of `Checkpoint.other_parts`


class Checkpoint(abc.ABC):
    """Model on disk.

    The config, spec, pack plans, GGUF header and fingerprint are read on first use and cached. No
    file stays open or mapped. If the model is damaged or not supported, methods and properties
    raise ModelFormatError, which names the file.

    Attributes:
        is_gguf: True for a GGUF file.
        rope_range: "short" or "long", see `EngineConfig`.
        native_refusal: reason why the native runner cannot read files in this format; "" if it can.
        onnx_refusal: reason why the ONNX runner cannot run the file; "" if it can, None if the
            model is not in ONNX format.
    """

    is_gguf: bool
    rope_range = "short"
    native_refusal = ""
    onnx_refusal: str | None = None

    def __init__(self, path: Path, cache_dir: Path | None = None) -> None:
        self.path = path
        self.cache_dir = cache_dir
        self._stamps: tuple[FileStamp, ...] = ()  # taken before the files were read
        self._fingerprint = ""
        self._plans: dict[str, list[PackEntry]] = {}

    @staticmethod
    def open(
        model: Checkpoint | Path | str, *, cache_dir: Path | None = None, rope_range: str = "short"
    ) -> Checkpoint:
        """Open the model at a path that `locate_model` returned.

        Args:
            model: path of a file or directory. An open checkpoint is returned unchanged.
            cache_dir: directory for digests, check results and packed weights. With `NO_CACHE`,
                nothing is cached.
            rope_range: see `EngineConfig`. Reading `config` raises ConfigError if the model does
                not support "long".
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
        """Config in transformers' format, from config.json, GGUF metadata or an ONNX directory."""
        return (
            with_long_rope(self._read_config())
            if self.rope_range == "long"
            else self._read_config()
        )

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """Description of the model for the native runner.

        Raises:
            ModelFormatError: the native runner does not support the model; the message says why.
        """
        return describe_model(self.config)

    def plan(self, weights: str) -> list[PackEntry]:
        """Return the pack plan for the weight format `weights`, see `pack_plan`."""
        if weights not in self._plans:
            self._plans[weights] = self._make_plan(weights)
        return self._plans[weights]

    def _make_plan(self, weights: str) -> list[PackEntry]:
        if weights != STORED:
            return pack_plan(self.spec, weights)
        with self.open_source() as source:
            return pack_plan(self.spec, STORED, source)

    @property
    def is_mtp_file(self) -> bool:
        """True for a file that contains an MTP head without its model."""
        return False

    @property
    def num_mtp_tensors(self) -> int:
        """Number of tensors for multi-token prediction (MTP) in the files."""
        return sum(self.other_parts.get(part, 0) for part in _MTP_PARTS)

    @property
    def unused_parts(self) -> Mapping[str, int]:
        """The `other_parts` that no runner uses. MTP heads of some families are used."""
        if self.spec.family.mtp is None:
            return self.other_parts
        return {part: n for part, n in self.other_parts.items() if part not in _MTP_PARTS}

    @functools.cached_property
    def mtp(self) -> MtpSpec | None:
        """Description of the MTP head.

        It is None if the files contain no head, or if heads of the family are not supported.
        """
        if self.spec.family.mtp is None or not self.num_mtp_tensors:
            return None
        with self._open_mtp_files() as source:
            return describe_mtp(self.spec, source.names())

    def open_mtp_source(self) -> WeightSource:
        """Open the tensors of the MTP head in the layout of the native runner's kernels, as a
        context manager.

        Raises:
            ModelFormatError: there is no head that is supported.
        """
        head = self.mtp
        if head is None:
            raise ModelFormatError(
                f"{self.path} contains no multi-token prediction head that is supported"
            )
        return in_kernel_order(self._open_mtp_files, self.config, lambda _: head.model)

    def mtp_plan(self, weights: str) -> list[PackEntry]:
        """Return the pack plan of the MTP head, see `pack_plan.mtp_plan`.

        Raises:
            ModelFormatError: there is no head that is supported, or its tensors do not match the
                plan.
        """
        with self.open_mtp_source() as source:
            assert self.mtp is not None  # otherwise there is no source
            return mtp_plan(self.mtp, weights, source)

    def _open_mtp_files(self) -> WeightSource:
        """Open the tensors of the MTP head in the layout of the files."""
        raise ModelFormatError(f"{self.path}: heads are not supported in {self.format} files")

    def open_assistant_source(self) -> WeightSource:
        """Open the tensors of an assistant in the layout of the native runner's kernels, as a
        context manager.

        Raises:
            ModelFormatError: assistants are not supported in this file format.
        """
        raise ModelFormatError(f"{self.path}: assistants are not supported in {self.format} files")

    @abc.abstractmethod
    def _read_config(self) -> Mapping[str, Any]: ...

    @property
    @abc.abstractmethod
    def is_quantized(self) -> bool:
        """True if the weights are stored in a quantized format, which the runners then keep."""

    @property
    @abc.abstractmethod
    def format(self) -> str:
        """File format and stored types for display, such as "GGUF Q4_K, Q6_K" or "safetensors
        bfloat16".

        Only headers are read.
        """

    @property
    def file_bytes(self) -> int:
        """Total size in bytes of the files that the fingerprint covers."""
        return sum(stamp.size for stamp in self._current_stamps())

    def gguf_metadata(self) -> Mapping[str, Any] | None:
        """Return the tokenizer metadata of a GGUF file, with string arrays as lists.

        The result is None for other formats, which store the tokenizer in separate files.
        """
        return None

    def gguf_settings(self) -> Mapping[str, Any]:
        """Return `gguf_metadata` without the string arrays, which are large.

        The result is empty for other formats.
        """
        return {}

    @property
    def other_parts(self) -> Mapping[str, int]:
        """Number of tensors in each part besides the language model, such as {"visual": 316}."""
        return {}

    @property
    def declared_name(self) -> str:
        """The model's name in its files, or "" if they do not contain it."""
        return str(self.config.get("_name_or_path") or "")

    @property
    def pooling(self) -> Pooling:
        """Pooling of an embedding model; `UNSAID` for other models."""
        return UNSAID

    def dense(self) -> Matrices:
        """Return the dense projections that are applied after pooling, in order."""
        return read_dense(self.pooling.dense, self.config)

    @abc.abstractmethod
    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        """Return the special token ids and the default sampling values.

        Args:
            tokenizer_eos: end-of-sequence id of the tokenizer, added to the ids in the model's
                files.
        """

    @abc.abstractmethod
    def summary(self) -> WeightSummary:
        """Check that the weight files are valid and match the config, and return a summary."""

    def open_source(self) -> WeightSource:
        """Open the tensors in the layout of the native runner's kernels, as a context manager."""
        return in_kernel_order(self._open_files, self.config, self._describe)

    def _describe(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the cached spec, for a `config` that is the checkpoint's own."""
        return self.spec

    @abc.abstractmethod
    def _open_files(self) -> WeightSource:
        """Open the tensors in the layout of the files."""

    @property
    def onnx_file(self) -> Path:
        """Path of the ONNX file.

        Raises:
            ModelFormatError: the model is not in ONNX format.
        """
        raise ModelFormatError(f"{self.path} is not an ONNX model")

    def past_layout(self) -> PastLayout:
        """Return the layout of the KV inputs of the ONNX file.

        Raises:
            ModelFormatError: the layout is not supported, or the model is not in ONNX format.
        """
        raise ModelFormatError(f"{self.path} is not an ONNX model")

    def packed_bytes(self, weights: str) -> int:
        """Return the size of the packed weights in bytes, in the weight format `weights`."""
        return plan_bytes(self.plan(weights))

    def fingerprint(self, *, cache_dir: Path | None = None) -> str:
        """Return the fingerprint of the model, 64 hexadecimal digits.

        Args:
            cache_dir: directory for the digests of large files; by default the checkpoint's own.

        Raises:
            ModelFormatError: a file changed while it was being read.
        """
        if not self._fingerprint:
            self._stamps = self._stamps or self._current_stamps()
            found = self._read_fingerprint(self.cache_dir if cache_dir is None else cache_dir)
            for path in self.changed_files():
                raise ModelFormatError(
                    f"{path} changed while it was being read; load it again when it is complete"
                )
            self._fingerprint = found
        return self._fingerprint

    def changed_files(self) -> list[str]:
        """Return the paths of files that changed since the fingerprint was computed."""
        return sorted({stamp.path for stamp in set(self._stamps) ^ set(self._current_stamps())})

    def _current_stamps(self) -> tuple[FileStamp, ...]:
        try:
            return tuple(FileStamp.of(path) for path in self._files())
        except OSError as error:
            raise ModelFormatError(f"{self.path} cannot be read: {error}") from error

    @abc.abstractmethod
    def weight_files(self) -> list[Path]:
        """Return the files of the weights."""

    @abc.abstractmethod
    def _files(self) -> list[Path]:
        """Return all files that the fingerprint covers."""

    @abc.abstractmethod
    def _read_fingerprint(self, cache_dir: Path | None) -> str: ...


class _Directory(Checkpoint):
    """Directory with config.json, tokenizer files and safetensors (float, AWQ, GPTQ, MXFP4, NVFP4
    or BitNet).
    """

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
    def native_refusal(self) -> str:  # type: ignore[override]
        if not self.config.get("quantization_config"):
            return ""
        try:
            packed_layout(self.config)
        except ModelFormatError as error:
            return str(error)
        return ""

    @functools.cached_property
    def is_quantized(self) -> bool:
        if not self.config.get("quantization_config"):
            return False
        if self.native_refusal:
            return True
        with self.open_source() as source:
            return is_quantized(source)

    @property
    def format(self) -> str:
        quantized = self.config.get("quantization_config")
        kind = (
            format_name(quantized) if isinstance(quantized, Mapping) else stored_dtype(self.config)
        )
        return f"safetensors {kind or 'float32'}"

    def generation(self, *, tokenizer_eos: int | None = None) -> GenerationDefaults:
        return read_generation_config(self.path, self.config, tokenizer_eos=tokenizer_eos)

    def summary(self) -> WeightSummary:
        return check_weights(self.path, self.config, cache_dir=self.cache_dir)

    def _open_files(self) -> WeightSource:
        if (family := FAMILIES.get(str(self.config.get("model_type")))) and family.in_columns:
            return ColumnExperts(self.path)
        if not self.config.get("quantization_config"):
            return SafetensorsSource(self.path)
        layout = packed_layout(self.config)
        if layout.method == "bitnet":
            return BitNetSource(SafetensorsSource(self.path), layout)
        return self._open_packed(text_names)

    def _open_packed(
        self, select: Callable[[Iterable[str]], Mapping[str, str]], *, may_be_float: bool = False
    ) -> WeightSource:
        """Open the tensors that `select` returns, see `SafetensorsSource`; some are quantized.

        Args:
            select: selection of tensors.
            may_be_float: see `Nvfp4Source`. Sources of other methods always accept floats.
        """
        layout = packed_layout(self.config)
        if layout.method == "nvfp4":
            files = SafetensorsSource(self.path, select=select)
            return Nvfp4Source(files, layout, may_be_float=may_be_float)
        return PackedQuantSource(self.path, self.config, select=select)

    def _open_mtp_files(self) -> WeightSource:
        stored = self.spec.family.mtp
        assert stored is not None  # see `mtp`
        select = functools.partial(mtp_names, stored=stored, layers=len(self.spec.layers))
        if self.config.get("quantization_config"):
            return self._open_packed(select, may_be_float=True)
        return SafetensorsSource(self.path, select=select)

    def open_assistant_source(self) -> WeightSource:
        if self.config.get("quantization_config"):
            return self._open_packed(assistant_names)
        return SafetensorsSource(self.path, select=assistant_names)

    def weight_files(self) -> list[Path]:
        return weight_files(self.path)

    def _files(self) -> list[Path]:
        return fingerprinted_files(self.path)

    def _read_fingerprint(self, cache_dir: Path | None) -> str:
        return fingerprint_of_directory(self.path, cache_dir=cache_dir)


class _GgufFile(Checkpoint):
    """GGUF model in one file or in several split files.

    Headers are parsed on opening. The vocabulary is read on first use.
    """

    is_gguf = True

    def __init__(self, path: Path, cache_dir: Path | None = None) -> None:
        super().__init__(path, cache_dir)
        self._header = in_llama_cpp_layout(read_gguf_model(path))
        self._stamps = tuple(part.stamp for part in self._header.parts)

    def _read_config(self) -> Mapping[str, Any]:
        return gguf_config(self._header, self._vocabulary)

    @functools.cached_property
    def is_quantized(self) -> bool:
        with self.open_source() as source:
            return is_quantized(source)

    @property
    def declared_name(self) -> str:
        return str(self._header.values.get("general.name") or "")

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
        if self.is_mtp_file:
            raise ModelFormatError(
                f"{self.path} contains only a multi-token prediction head "
                f"({self.num_mtp_tensors} tensors); give its model as the model, and this file as "
                "draft_model"
            )
        return check_gguf(self._source, self.config, self._describe, cache_dir=self.cache_dir)

    @functools.cached_property
    def _source(self) -> GgufSource:
        return GgufSource(self._header)

    def _open_files(self) -> WeightSource:
        self._source.check_unchanged()
        return self._source

    @property
    def is_mtp_file(self) -> bool:
        return is_mtp_file(self._header)

    def _open_mtp_files(self) -> WeightSource:
        if trimmed := trimmed_tensor(self._header, self.config["vocab_size"]):
            raise ModelFormatError(
                f"{self.path}: tensor {trimmed!r} belongs to an LM head for a part of the "
                "vocabulary, which is not supported in a multi-token prediction head; give a head "
                "for the whole vocabulary"
            )
        return GgufSource(self._header, mtp=True)

    def open_assistant_source(self) -> WeightSource:
        return self._open_files()

    def weight_files(self) -> list[Path]:
        return [part.path for part in self._header.parts]

    def _files(self) -> list[Path]:
        return self.weight_files()

    def _read_fingerprint(self, cache_dir: Path | None) -> str:
        return fingerprint_of_files(self._files(), cache_dir=cache_dir)


class _OnnxFile(Checkpoint):
    """ONNX file with its external data, config.json or genai_config.json, and tokenizer files.

    The graph is parsed on opening and matched against known decoders on first use.
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
        """Decoder for the native runner, or the error that says why the graph is not supported."""
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

    def weight_files(self) -> list[Path]:
        return [part.path for part in self._model.files]

    def _files(self) -> list[Path]:
        return fingerprinted_files(self.path, self.weight_files())

    def _read_fingerprint(self, cache_dir: Path | None) -> str:
        return fingerprint_of_onnx(self.path, self.weight_files(), cache_dir=cache_dir)
