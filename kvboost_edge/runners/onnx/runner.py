"""ONNX runner for decoders with past key/value inputs, with KV in the block pool."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from kvboost_edge.backends.base import Backend, BatchLayout, PassStates
from kvboost_edge.backends.batch_layout import refuse_deltas
from kvboost_edge.backends.numpy_blocks import NumpyBlocks
from kvboost_edge.errors import BackendUnavailable, ConfigError, ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import pinned_context
from kvboost_edge.models.config.json_readers import context_length
from kvboost_edge.models.onnx.past_kv import PastLayout
from kvboost_edge.runners.base import ForwardBatch, LoadOptions, RunnerInfo
from kvboost_edge.runners.onnx.kv_buffers import Buffer, PastBuffers
from kvboost_edge.runners.onnx.select_onnx import MOVED_KEYS_REFUSAL, onnx_kv_spec

__all__ = ["OnnxRunner", "load"]

_LOG = logging.getLogger(__name__)
_INTEGERS: dict[str, npt.DTypeLike] = {"I64": np.int64, "I32": np.int32}
_FLOATS: dict[str, npt.DTypeLike] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
# A graph returns the logits of every token in a call. This limits their size in bytes per call.
_LOGIT_BYTES = 64 << 20
_LEAST_TOKENS = 16
_WARNINGS = 3  # onnxruntime's severity level for errors only


class OnnxRunner:
    """Runner over an onnxruntime session. The sequences of a batch are computed one by one.

    Greedy tokens equal those of the torch runner, and logits agree within 1e-4 in float32. Results
    are not bit-identical across batches, because onnxruntime's kernels depend on the shape of a
    call.

    Raises:
        ModelFormatError: onnxruntime cannot load or run the file. The constructor runs one token,
            which also shows the number of logits.
    """

    def __init__(
        self,
        path: Path,
        layout: PastLayout,
        *,
        architecture: str,
        max_context: int,
        weight_bytes: int,
        block_size: int = 16,
        num_threads: int = 1,
    ) -> None:
        self._path = path
        self._layout = layout
        self._backend: Backend | None = None
        self._blocks: NumpyBlocks
        self._session: Any = _session(path, num_threads)
        logits = next(value for value in self._session.get_outputs() if value.name == "logits")
        if logits.type not in _FLOATS:
            raise ModelFormatError(
                f"{path}: the output 'logits' is {logits.type}, not one of {sorted(_FLOATS)}"
            )
        self._logit_type = _FLOATS[logits.type]
        self._ones = {
            kind: np.ones(max_context, dtype=_INTEGERS[kind])
            for kind in set(layout.inputs.values())
        }
        self._range = {kind: np.arange(max_context, dtype=_INTEGERS[kind]) for kind in self._ones}
        spec = onnx_kv_spec(layout, block_size)
        self.info = RunnerInfo(
            name="onnx",
            architecture=architecture,
            dtype=layout.dtype,
            vocab_size=self._probe(),
            max_context=max_context,
            weight_bytes=weight_bytes,
            kv_spec=spec,
            copies_kv=True,
            numerics=f"onnxruntime {version('onnxruntime')} {num_threads}",
        )
        self._most_tokens = max(_LEAST_TOKENS, _LOGIT_BYTES // (4 * self.info.vocab_size))

    @property
    def moved_keys_refusal(self) -> str | None:
        return MOVED_KEYS_REFUSAL

    @property
    def copied_bytes(self) -> int:
        return 0 if self._backend is None else self._buffers.nbytes

    def accept_drafts(
        self, layout: BatchLayout, accepted: npt.NDArray[np.int32], states: PassStates
    ) -> None:
        raise BackendUnavailable(
            "the ONNX runner does not support models with recurrent state; use runner='native'"
        )

    def deviations(
        self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        raise BackendUnavailable(str(self.moved_keys_refusal))

    def bind(self, backend: Backend) -> None:
        """Set the backend.

        Raises:
            ConfigError: the backend does not store this model's KV in NumPy blocks.
        """
        if not isinstance(backend, NumpyBlocks) or backend.spec != self.info.kv_spec:
            raise ConfigError(
                f"the ONNX runner supports backend='cpu' and 'reference', not {backend.name!r}"
            )
        self._backend = backend
        self._blocks = backend
        self._written = np.zeros(backend.num_blocks, dtype=np.int64)
        # Limited to the size of the pool, because every running sequence is also stored there.
        self._buffers = PastBuffers(
            self._layout, self.info.kv_spec.block_size, backend.pool_bytes, backend.gather_kv
        )

    @property
    def buffers(self) -> PastBuffers:
        """KV copies of running sequences. Available once a backend is bound."""
        return self._buffers

    def forward(self, batch: ForwardBatch) -> npt.NDArray[np.float32]:
        """Compute a pass, store its KV and return logits, float32 [num_logits, vocab_size]."""
        if self._backend is None:
            raise ConfigError("call bind before forward: the runner has no backend for its KV")
        layout = batch.layout
        refuse_deltas(layout, "the ONNX runner")
        if layout.segments is not None:
            raise ConfigError(
                "the ONNX runner supports only whole prefixes, but a block table has several "
                "segments"
            )
        logits = np.empty((len(batch.logit_rows), self.info.vocab_size), dtype=np.float32)
        for index in range(len(layout.seq_lens)):
            first = int(layout.cu_seqlens_q[index])
            last = int(layout.cu_seqlens_q[index + 1])
            if first < last:
                wanted = (batch.logit_rows >= first) & (batch.logit_rows < last)
                found = self._sequence(batch, index, batch.logit_rows[wanted] - first)
                logits[wanted] = found
        return logits

    def _sequence(
        self, batch: ForwardBatch, index: int, rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Compute one sequence, store its KV, and return the logits of `rows`."""
        assert self._backend is not None
        layout = batch.layout
        first = int(layout.cu_seqlens_q[index])
        last = int(layout.cu_seqlens_q[index + 1])
        stop = int(layout.seq_lens[index])
        start = stop - (last - first)
        table = layout.block_tables[index]
        buffer = self._buffers.take(table, start, stop, self._marks())
        # The buffer has no blocks until they are written, so it is not reused if this call fails.
        buffer.blocks = buffer.blocks[:0]
        logits = np.empty((len(rows), self.info.vocab_size), dtype=np.float32)
        for at in range(start, stop, self._most_tokens):
            end = min(at + self._most_tokens, stop)
            found = self._run(buffer, batch.token_ids[first + at - start : first + end - start], at)
            inside = (rows >= at - start) & (rows < end - start)
            logits[inside] = found[rows[inside] - (at - start)]
        if not self._store(buffer, layout, index, start):
            logits.fill(np.nan)
        used = -(-stop // self.info.kv_spec.block_size)
        self._written[layout.slot_mapping[first:last] // self.info.kv_spec.block_size] += 1
        buffer.blocks = table[:used].copy()
        buffer.marks = self._marks()[buffer.blocks]
        return logits

    def _marks(self) -> npt.NDArray[np.int64]:
        """Return how often each block was changed, by passes and by copies."""
        return self._written + self._blocks.changes

    def _run(
        self, buffer: Buffer, token_ids: npt.NDArray[np.int64], start: int
    ) -> npt.NDArray[Any]:
        """Run tokens from `start` on, extend the buffer, and return logits [tokens, vocab_size]."""
        count = len(token_ids)
        stop = start + count
        binding = self._binding(buffer, stop)
        kinds = self._layout.inputs
        arrays = {"input_ids": token_ids.astype(_INTEGERS[kinds["input_ids"]])}
        if "attention_mask" in kinds:
            arrays["attention_mask"] = self._ones[kinds["attention_mask"]][:stop]
        if "position_ids" in kinds:
            arrays["position_ids"] = self._range[kinds["position_ids"]][start:stop]
        for name, array in arrays.items():
            _bind(binding.bind_input, name, array[None])
        logits = np.empty((1, count, self.info.vocab_size), dtype=self._logit_type)
        _bind(binding.bind_output, "logits", logits)
        self._session.run_with_iobinding(binding)
        self._buffers.advance(buffer, stop)
        found: npt.NDArray[Any] = logits[0]
        return found

    def _binding(self, buffer: Buffer, stop: int) -> Any:
        """Return a binding of all layers' past and present. Other inputs are bound per call."""
        if buffer.binding is not None:
            return buffer.binding
        binding = self._session.io_binding()
        for layer, names in enumerate(self._layout.layers):
            for kind in (0, 1):
                _bind(binding.bind_input, names.past[kind], self._buffers.past(buffer, layer, kind))
                _bind(
                    binding.bind_output,
                    names.present[kind],
                    self._buffers.present(buffer, layer, kind, stop),
                )
        if self._layout.shared:
            buffer.binding = binding
        return binding

    def _store(self, buffer: Buffer, layout: BatchLayout, index: int, start: int) -> bool:
        """Write computed KV to the pool and return whether all values are finite."""
        assert self._backend is not None
        first = int(layout.cu_seqlens_q[index])
        last = int(layout.cu_seqlens_q[index + 1])
        own = BatchLayout(
            np.array([0, last - first], np.int32),
            layout.seq_lens[index : index + 1],
            layout.block_tables[index : index + 1],
            layout.slot_mapping[first:last],
        )
        prepared = self._backend.prepare(own)
        sound = True
        for layer in range(len(self._layout.layers)):
            keys, values = (
                np.ascontiguousarray(
                    self._buffers.added(buffer, layer, kind, start).swapaxes(0, 1), dtype=np.float32
                )
                for kind in (0, 1)
            )
            sound = sound and bool(np.isfinite(keys).all() and np.isfinite(values).all())
            self._backend.write_kv(layer, keys, values, prepared)
        return sound

    def _probe(self) -> int:
        """Run one token and return the number of logits.

        Raises:
            ModelFormatError: onnxruntime cannot run the graph, or its outputs have unexpected
                shapes.
        """
        feeds: dict[str, npt.NDArray[Any]] = {
            name: (self._range if name != "attention_mask" else self._ones)[kind][None, :1]
            for name, kind in self._layout.inputs.items()
        }
        wanted = ["logits"]
        for layer in self._layout.layers:
            for past in layer.past:
                feeds[past] = np.zeros(
                    (1, layer.num_kv_heads, 0, layer.head_dim), dtype=self._layout.dtype
                )
            wanted += layer.present
        try:
            logits, *presents = self._session.run(wanted, feeds)
        except Exception as error:  # onnxruntime's errors share only this class
            raise ModelFormatError(
                f"{self._path}: onnxruntime cannot run this model: {error}"
            ) from error
        if logits.ndim != 3 or logits.shape[:2] != (1, 1):
            raise ModelFormatError(
                f"{self._path}: logits of one token have shape {logits.shape}, expected (1, 1, "
                "vocab)"
            )
        for layer, keys, values in zip(
            self._layout.layers, presents[::2], presents[1::2], strict=True
        ):
            shape = (1, layer.num_kv_heads, 1, layer.head_dim)
            if keys.shape != shape or values.shape != shape:
                raise ModelFormatError(
                    f"{self._path}: output {layer.present[0]!r} of one token has shape "
                    f"{keys.shape}, expected {shape}; present keys and values must contain the "
                    "past ones followed by the new ones"
                )
        return int(logits.shape[2])

    def close(self) -> None:
        """Release the session and all KV copies."""
        self._session = None
        if self._backend is not None:
            self._buffers.clear()
        self._backend = None


def _session(path: Path, num_threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _WARNINGS
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share only this class
        raise ModelFormatError(f"{path}: onnxruntime cannot load this model: {error}") from error


def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
    """Bind a contiguous array, which must stay alive until the run ends."""
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def load(checkpoint: Checkpoint, options: LoadOptions) -> OnnxRunner:
    """Load an ONNX file with this runner. Weights and dtypes are those of the file."""
    config = checkpoint.config
    length = context_length(config)
    pinned = pinned_context(config)
    return OnnxRunner(
        checkpoint.onnx_file,
        checkpoint.past_layout(),
        architecture=str(config["model_type"]),
        max_context=length if pinned is None else min(length, pinned.length),
        weight_bytes=checkpoint.summary().nbytes,
        block_size=options.block_size,
        num_threads=options.num_threads,
    )
