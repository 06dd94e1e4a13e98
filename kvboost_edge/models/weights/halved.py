"""Checkpoints whose rope turns neighbouring channels (2i, 2i + 1), read in the order that turns (i,
i + half).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.weights.source import QuantRows, StoredRows, WeightSource, WrappedSource

__all__ = ["HalvedSource"]

Floats = npt.NDArray[np.float32]
_TURNED = tuple(f".self_attn.{name}_proj.{what}" for name in "qk" for what in ("weight", "bias"))


class HalvedSource(WrappedSource):
    """`source` with the rows of queries and keys reordered within each head of `head_dim`: of its
    first 2 * half channels the even ones, then the odd ones; the rest stay. Scores are sums over
    channels, so nothing else changes.
    """

    def __init__(self, source: WeightSource, head_dim: int, half: int) -> None:
        super().__init__(source)
        order = np.arange(head_dim, dtype=np.int64)
        order[: 2 * half] = order[: 2 * half].reshape(half, 2).T.reshape(-1)
        self._order = order

    def names(self) -> set[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        if not name.endswith(_TURNED):
            return self._source.rows(name, start, stop)
        stored = self._stored(name, start, self.shape(name)[0] if stop is None else stop)
        first = int(stored.min())
        return self._source.rows(name, first, int(stored.max()) + 1)[stored - first]

    def quant_rows(self, name: str, start: int, stop: int) -> QuantRows:
        if not name.endswith(_TURNED):
            return self._source.quant_rows(name, start, stop)
        stored = self._stored(name, start, stop)
        first = int(stored.min())
        found = self._source.quant_rows(name, first, int(stored.max()) + 1)
        pick = stored - first
        minima = None if found.minima is None else found.minima[pick]
        return found._replace(codes=found.codes[pick], scales=found.scales[pick], minima=minima)

    def stored_rows(self, name: str) -> StoredRows:
        if name.endswith(_TURNED):
            raise ModelFormatError(
                f"{self.file_of(name)}: tensor {name!r} has its rows in another order"
            )
        return self._source.stored_rows(name)

    def _stored(self, name: str, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where rows [start, stop) are in the source."""
        rows = self.shape(name)[0]
        dim = len(self._order)
        if rows % dim or not 0 <= start < stop <= rows:
            raise ModelFormatError(
                f"tensor {name!r} has {rows} rows; asked for {start} to {stop}, heads of {dim}"
            )
        index = np.arange(start, stop, dtype=np.int64)
        stored: npt.NDArray[np.int64] = index // dim * dim + self._order[index % dim]
        return stored
