"""The native runner: a batch of tokens to logits on quantized or float weights, without torch.

A token's logits depend on its own sequence and position only, to the bit: not on who shares the batch, how the prompt
was cut, whether its keys and values came from the pool, or the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, Backend, KVSpec, LayerKVSpec
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.kernels import linear_program as lp
from kvboost_edge.kernels.paged import aligned_empty
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.models.config_file import read_config
from kvboost_edge.models.families import ModelSpec, describe_model
from kvboost_edge.models.fingerprint import model_fingerprint
from kvboost_edge.models.packed_file import PackedWeights, load_packed
from kvboost_edge.models.quantize import PackEntry, check_tensors, pack_plan
from kvboost_edge.models.weight_source import SafetensorsSource
from kvboost_edge.runners.base import ForwardBatch, RunnerInfo
from kvboost_edge.runners.native.buffers import Buffers
from kvboost_edge.runners.native.program import build_program

__all__ = ["NativeRunner"]


Floats = npt.NDArray[np.float32]


class NativeRunner:
    """Implements `Runner` for the families in models/families.py, over a numpy backend. One thread at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: list[PackEntry],
        packed: PackedWeights,
        *,
        weights: str,
        num_threads: int = 1,
        block_size: int = 16,
    ) -> None:
        self._spec, self._packed = spec, packed
        self._program = build_program(spec, plan, packed, num_threads)
        self._buffers = Buffers(spec)
        self._team = KernelTeam(num_threads)
        self._backend: Backend | None = None
        self._params = [AttentionParams(spec.softmax_scale, layer.window, spec.softcap) for layer in spec.layers]
        kv = tuple(LayerKVSpec(spec.num_kv_heads, spec.head_dim) for _ in spec.layers)
        self.info = RunnerInfo(
            name="native",
            architecture=spec.model_type,
            dtype=weights,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            weight_bytes=packed.nbytes,
            kv_spec=KVSpec(kv, block_size, "float32"),
        )

    @classmethod
    def from_dir(
        cls,
        model_dir: Path | str,
        *,
        weights: str = "int8",
        num_threads: int = 1,
        block_size: int = 16,
        cache_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> NativeRunner:
        """Load a model directory; its packed weights come from the cache directory, or are packed now.

        Raises ModelFormatError with the reason where the model is not known to this runner.
        """
        spec = describe_model(read_config(Path(model_dir)))
        plan = pack_plan(spec, weights)
        with SafetensorsSource(model_dir) as source:
            check_tensors(plan, source)
        packed = load_packed(
            model_dir,
            plan,
            fingerprint=model_fingerprint(model_dir, cache_dir=cache_dir),
            weights=weights,
            cache_dir=cache_dir,
            progress=progress,
        )
        return cls(spec, plan, packed, weights=weights, num_threads=num_threads, block_size=block_size)

    def bind(self, backend: Backend) -> None:
        """Use this backend's pool. ConfigError unless it takes NumPy arrays and has this model's shapes."""
        if backend.array_kind != "numpy":
            raise ConfigError(f"the native runner works with NumPy backends (cpu, reference), not {backend.name!r}")
        if backend.spec.layers != self.info.kv_spec.layers:
            raise ConfigError(f"backend {backend.name!r} was made for other layers than those of this model")
        self._backend = backend

    def forward(self, batch: ForwardBatch) -> Floats:
        """Apply copies, run the tokens, store their KV; float32 logits [num_logits, vocab_size]."""
        backend = self._backend
        if backend is None:
            raise ConfigError("forward before bind: the runner has no backend for its KV")
        spec, num_tokens = self._spec, len(batch.token_ids)
        tokens, positions = (np.ascontiguousarray(a, dtype=np.int64) for a in (batch.token_ids, batch.positions))
        if num_tokens == 0 or tokens.min() < 0 or tokens.max() >= spec.vocab_size:
            raise RequestError(f"token ids must be at least one, from 0 to {spec.vocab_size - 1}")
        if batch.copies:
            backend.copy_blocks(batch.copies)
        prepared = backend.prepare(batch.layout)
        addresses = self._buffers.addresses(num_tokens, int(positions.max()) + 1)
        addresses[lp.B_TOKENS], addresses[lp.B_POSITIONS] = tokens.ctypes.data, positions.ctypes.data
        query = self._buffers.rows(lp.B_QUERY, num_tokens, spec.num_heads)
        key, value = (self._buffers.rows(b, num_tokens, spec.num_kv_heads) for b in (lp.B_KEY, lp.B_VALUE))
        for layer, part in enumerate(self._program.parts[:-1]):
            self._run(part, addresses, num_tokens)
            backend.write_kv(layer, key, value, prepared)
            attended = self._attend(backend, layer, query, prepared)
            addresses = addresses.copy()  # a helper of the last call may still look at the old ones
            addresses[lp.B_ATTENDED] = attended.ctypes.data
        self._run(self._program.parts[-1], addresses, num_tokens)
        return self._logits(batch.logit_rows, addresses)

    def _attend(self, backend: Backend, layer: int, query: Floats, prepared: Any) -> Floats:
        """What attention returns, rows padded to whole groups."""
        out, _ = backend.attention(layer, query, prepared, self._params[layer])
        rows: Floats = np.ascontiguousarray(out, dtype=np.float32).reshape(len(query), -1)
        width = self._buffers.sizes.attended
        if rows.shape[1] == width:
            return rows
        padded = np.zeros((len(query), width), dtype=np.float32)
        padded[:, : rows.shape[1]] = rows
        return padded

    def _logits(self, logit_rows: npt.NDArray[np.int64], addresses: npt.NDArray[np.int64]) -> Floats:
        rows = np.ascontiguousarray(logit_rows, dtype=np.int64)
        logits: Floats = aligned_empty((len(rows), self._buffers.sizes.logits), np.float32)
        if len(rows):
            addresses = addresses.copy()
            addresses[lp.B_ROWS], addresses[lp.B_LOGITS] = rows.ctypes.data, logits.ctypes.data
            self._run(self._program.head, addresses, len(rows))
        return logits[:, : self._spec.vocab_size]

    def _run(self, part: tuple[int, int], addresses: npt.NDArray[np.int64], num_tokens: int) -> None:
        first, end = part
        counters = np.zeros(lp.COUNTERS_PER_OP * (end - first + 1), dtype=np.int64)
        job = lp.ProgramJob(self._program.ops, self._program.params, addresses, counters, first, end, num_tokens)
        self._team.run(lp.run_program, job, counters, lp.COUNTERS_PER_OP * (end - first), self._team.num_threads)

    def close(self) -> None:
        """End the helper threads, let go of the backend and unmap the weights."""
        self._team.close()
        self._backend = None
        self._packed.close()
