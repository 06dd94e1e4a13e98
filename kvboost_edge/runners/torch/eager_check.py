"""Check of a loaded model against transformers' eager attention, for untested families.

Loading checks each attention layer but does not see the layers in between. A convolution or a
recurrent state would mix the sequences of a flat batch and lose what earlier passes computed. The
check computes two short sequences in two mixed passes, which reveals this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.backends.torch_backend import TorchBackend
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.runners.base import ForwardBatch, Runner

__all__ = ["check_against_eager"]

_LENGTHS = (13, 9)
# Relative distances. Rounding errors are 10 times smaller, and mixed-up tokens give far larger
# ones.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}


class EagerRunner(Runner, Protocol):
    """A runner whose model can also run without paged KV."""

    device: str

    def eager_logits(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the logits of one sequence with eager attention, float32 [tokens, vocab_size]."""
        ...

    def unbind(self) -> None:
        """Release the backend."""
        ...


def check_against_eager(runner: EagerRunner) -> float:
    """Return the relative L2 distance between paged and eager logits.

    The runner is unbound afterwards.

    Raises:
        ModelFormatError: the distance is larger than rounding errors explain.
    """
    info = runner.info
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, info.vocab_size, length) for length in _LENGTHS]
    tables = [np.array([1, 3]), np.array([2, 0])]
    # The model's dtype is used, so that errors of a quantized KV cache do not count.
    spec = dataclasses.replace(info.kv_spec, dtype=info.dtype, bits=(16, 16))
    backend = TorchBackend(spec, 4, device=runner.device)
    runner.bind(backend)
    parts: list[list[npt.NDArray[np.float32]]] = [[], []]
    for cut in (slice(0, 5), slice(5, None)):
        batch = _flat_batch(sequences, tables, cut, info.kv_spec.block_size)
        logits = runner.forward(batch)
        for part, first, stop in zip(
            parts, batch.layout.cu_seqlens_q, batch.layout.cu_seqlens_q[1:], strict=False
        ):
            part.append(logits[first:stop].copy())
    runner.unbind()
    backend.close()
    paged = np.concatenate([row for part in parts for row in part])
    eager = np.concatenate([runner.eager_logits(token_ids) for token_ids in sequences])
    distance = float(np.linalg.norm(paged - eager) / np.linalg.norm(eager))
    if not distance <= _TOLERANCE[info.dtype]:
        raise ModelFormatError(
            f"{info.architecture}: paged logits differ from transformers' eager attention by "
            f"{distance:.2g} (relative), more than the limit of {_TOLERANCE[info.dtype]:g}; the "
            "model may keep state between tokens outside its attention layers"
        )
    return distance


def _flat_batch(
    sequences: Sequence[npt.NDArray[np.int64]],
    tables: Sequence[npt.NDArray[np.int64]],
    cut: slice,
    block_size: int,
) -> ForwardBatch:
    """Return a flat batch with the tokens `cut` of each sequence."""
    positions = [np.arange(len(token_ids))[cut] for token_ids in sequences]
    slots = [
        table[at // block_size] * block_size + at % block_size
        for table, at in zip(tables, positions, strict=True)
    ]
    layout = BatchLayout(
        cu_seqlens_q=np.cumsum([0, *map(len, positions)]).astype(np.int32),
        seq_lens=np.array([at[-1] + 1 for at in positions], np.int32),
        block_tables=np.stack(tables).astype(np.int32),
        slot_mapping=np.concatenate(slots),
    )
    token_ids = np.concatenate([token_ids[cut] for token_ids in sequences])
    return ForwardBatch(token_ids, np.concatenate(positions), layout, np.arange(len(token_ids)))
