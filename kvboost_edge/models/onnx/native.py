"""ONNX decoders for the native runner, each with a config that is checked against the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.spec import ModelSpec, describe_model
from kvboost_edge.models.onnx.decoder import recognise
from kvboost_edge.models.onnx.file import OnnxModel
from kvboost_edge.models.onnx.folder import OnnxFolder
from kvboost_edge.models.onnx.folder_config import check_spec, onnx_config
from kvboost_edge.models.onnx.graph import Rows
from kvboost_edge.models.onnx.source import OnnxSource, tensors_of

__all__ = ["OnnxDecoder", "native_decoder"]


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxDecoder:
    """Recognized decoder.

    Attributes:
        tensors: for each tensor that the family needs, its rows in the matrices of the file.
        zeros: sizes of biases that the family needs and the file omits because they are zero.
    """

    model: OnnxModel
    config: Mapping[str, Any]
    spec: ModelSpec
    tensors: Mapping[str, tuple[Rows, ...]]
    zeros: Mapping[str, int]

    def open_source(self) -> OnnxSource:
        return OnnxSource(
            self.model, self.tensors, zeros=self.zeros, norm_offset=self.spec.family.norm_offset
        )


def native_decoder(folder: OnnxFolder, model: OnnxModel) -> OnnxDecoder:
    """Return the decoder in an ONNX file.

    Raises:
        ModelFormatError: the native runner does not support a part of the graph, or would compute
            it differently; the message names the part.
    """
    found = recognise(model)
    config = onnx_config(folder, found)
    spec = describe_model(config)
    if spec.family.paired_rope or (spec.family.mlp and not spec.family.fused):
        raise ModelFormatError(
            f"{model.path}: model_type={spec.model_type!r} is not supported in ONNX files"
        )
    check_spec(spec, found)
    tensors = tensors_of(found, fused=spec.family.fused)
    return OnnxDecoder(model, config, spec, tensors, _left_out(spec, tensors))


def _left_out(spec: ModelSpec, tensors: Mapping[str, tuple[Rows, ...]]) -> dict[str, int]:
    has = {"self_attn.o_proj": spec.output_bias, "mlp": spec.mlp_bias, "self_attn": spec.qkv_bias}
    found = {}
    for name, parts in tensors.items():
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            inner = name.removesuffix(".weight").split(".", 3)[3]
            wanted = next(value for start, value in has.items() if inner.startswith(start))
            bias = f"{name.removesuffix('.weight')}.bias"
            if wanted and bias not in tensors:
                found[bias] = sum(part.stop - part.start for part in parts)
    return found
