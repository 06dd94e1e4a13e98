"""Errors caused by converting the tensors of a quantized checkpoint to packed formats."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from kvboost_edge.kernels.linear.weight_formats import FORMATS, GROUP
from kvboost_edge.kernels.linear.weights import pack_rows, packed_sizes
from kvboost_edge.models.gguf.blocks import BLOCKS
from kvboost_edge.models.packed.pack_plan import VECTOR, PackEntry, holds_exactly, is_quantized
from kvboost_edge.models.weights.weight_source import WeightSource

__all__ = ["ConversionError", "conversion_error", "log_conversions"]

_LOG = logging.getLogger(__name__)
_SAMPLE_BYTES = 4 << 20
_MUCH = 1.2
# Size of an example matrix, whose packed bytes per weight are compared with those of the file.
_ROWS = 1024
_INPUTS = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class ConversionError:
    """Relative error of a converted tensor, |difference| / |tensor| in the Euclidean norm.

    It is 0 for an exact conversion.
    """

    type: str
    kind: str
    relative: float


def conversion_error(source: WeightSource, name: str, kind: str) -> ConversionError:
    """Return the error of a matrix in the packed format `kind`.

    It is measured on the first rows of the matrix, up to 4 MB of floats.
    """
    if FORMATS[kind].block_bytes:
        return ConversionError(source.type_of(name), kind, 0.0)  # the blocks of the file are kept
    count, width = source.shape(name)
    rows = max(1, min(count, _SAMPLE_BYTES // (4 * width)))
    stored = source.rows(name, 0, rows)
    if holds_exactly(kind, source.kind(name)):
        packed = source.quant_rows(name, 0, rows)
        table = packed.table if packed.table is not None else FORMATS[packed.kind].values
        if len(table):
            codes = np.take(np.array(table, np.float32), packed.codes)
        else:
            codes = packed.codes.astype(np.float32) - FORMATS[packed.kind].offset
        inputs = FORMATS[packed.kind].scale_inputs
        values = np.repeat(packed.scales.astype(np.float32), inputs, axis=1)[:, :width] * codes
        values = values * np.float32(packed.factor)
        if packed.minima is not None:
            values -= np.repeat(packed.minima.astype(np.float32), GROUP, axis=1)[:, :width]
        error = float(np.square(values - stored).sum())
        energy = float(np.square(stored).sum())
    else:
        found = pack_rows(stored, kind)
        error = found.error
        energy = found.energy
    return ConversionError(source.type_of(name), kind, (error / energy) ** 0.5 if energy else 0.0)


def log_conversions(plan: Sequence[PackEntry], source: WeightSource) -> None:
    """Log the conversions of a quantized checkpoint that lose precision or take more memory.

    There is one line for each pair of file type and packed format, with the number of tensors and
    the error of the first one. Exact conversions are logged if the result is more than `_MUCH`
    times as large. Float tensors are not logged, because the user chose their format. A tensor may
    be converted because it shares a matrix with a tensor in a wider format.
    """
    if not is_quantized(source):
        return
    found: dict[tuple[str, str], list[str]] = {}
    for entry in plan:
        for tensor, _ in entry.parts if entry.kind != VECTOR else ():
            found.setdefault((source.type_of(tensor), entry.kind), []).append(tensor)
    for (kind, packed), names in sorted(found.items()):
        error = conversion_error(source, names[0], packed).relative
        if error > 0:
            _LOG.info(
                "%s: %d tensors are converted to %s with a relative error of %.2g (measured on %s)",
                *(kind, len(names), packed, error, names[0]),
            )
            continue
        block = BLOCKS.get(kind)
        stored = 0.0 if block is None or block.kind is None else block.nbytes / block.weights
        each = sum(packed_sizes(_ROWS, _INPUTS, packed)) / (_ROWS * _INPUTS)
        if stored and not FORMATS[packed].is_float and each > _MUCH * stored:
            _LOG.info(
                "%s: %d tensors are converted to %s without loss, which takes %.2f bytes per "
                "weight instead of %.2f (such as %s)",
                *(kind, len(names), packed, each, stored, names[0]),
            )
