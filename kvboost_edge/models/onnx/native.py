"""An ONNX decoder as the native runner takes it: recognised, described by a config, and both compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvboost_edge.models.config.families import ModelSpec, describe_model
from kvboost_edge.models.onnx.config import check_spec, onnx_config
from kvboost_edge.models.onnx.decoder import recognise
from kvboost_edge.models.onnx.file import OnnxModel
from kvboost_edge.models.onnx.folder import OnnxFolder
from kvboost_edge.models.onnx.graph import Rows
from kvboost_edge.models.onnx.source import OnnxSource, tensors_of

__all__ = ["OnnxDecoder", "native_decoder"]


@dataclasses.dataclass(frozen=True, slots=True)
class OnnxDecoder:
    """`tensors`: the rows of the file's matrices that make each tensor of the family in transformers."""

    model: OnnxModel
    config: Mapping[str, Any]
    spec: ModelSpec
    tensors: Mapping[str, tuple[Rows, ...]]

    def open_source(self) -> OnnxSource:
        return OnnxSource(self.model, self.tensors, norm_offset=self.spec.family.norm_offset)


def native_decoder(folder: OnnxFolder, model: OnnxModel) -> OnnxDecoder:
    """The decoder of a file. ModelFormatError names what the native runner does not know, or would compute in another
    way than the graph."""
    found = recognise(model)
    config = onnx_config(folder, found)
    spec = describe_model(config)
    check_spec(spec, found)
    return OnnxDecoder(model, config, spec, tensors_of(found, fused=spec.family.fused))
