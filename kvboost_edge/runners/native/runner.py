"""The native runner: a batch of tokens to logits on quantized or float weights, without torch.

A token's logits depend on its own sequence and position only, to the bit: not on who shares the batch, how the prompt
was cut, whether its keys and values came from the pool, or the number of threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import AttentionParams, Backend
from kvboost_edge.backends.layout import refuse_deltas
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.host.cpu import default_num_threads
from kvboost_edge.kernels.ahead import compile_ahead
from kvboost_edge.kernels.attention.parts import has_delta, turned_positions
from kvboost_edge.kernels.linear.amx_choice import amx_choice, linear_path
from kvboost_edge.kernels.linear.weights import NUMBERS
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table, pass_entries
from kvboost_edge.kernels.program.run import run_program
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import pin_notice
from kvboost_edge.models.config.families import ModelSpec, describe_model
from kvboost_edge.models.packed.entries import packing_entries
from kvboost_edge.models.packed.file import PACKED_VERSION, PackedWeights, load_packed
from kvboost_edge.models.packed.plan import PackEntry, check_tensors, pack_plan, plan_label
from kvboost_edge.runners.attended import asked_layer, attended_masses
from kvboost_edge.runners.base import ForwardBatch, LoadOptions, RunnerInfo, StoredKeys
from kvboost_edge.runners.native.buffers import Buffers
from kvboost_edge.runners.native.numerics import describe_numerics
from kvboost_edge.runners.native.plan import LATE_NORM, native_kv_spec
from kvboost_edge.runners.native.program import build_program
from kvboost_edge.runners.native.whole_pass import PassMemory, WholePass

__all__ = ["NativeRunner", "load"]

_LOG = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]


class NativeRunner:
    """Implements `Runner` for the families in models/config/families.py, over a numpy backend. One thread at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: list[PackEntry],
        packed: PackedWeights,
        *,
        weights: str,
        num_threads: int = 1,
        block_size: int = 16,
        kv_bits: tuple[int, int] = (16, 16),
    ) -> None:
        self._spec, self._packed = spec, packed
        self._program = build_program(spec, plan, packed, num_threads)
        self._buffers = Buffers(spec)
        self._own_team = KernelTeam(num_threads)
        self._team = self._own_team
        self._matrix = int(amx_choice().used)
        self.kinds = _kinds_of(plan)
        self._kernels = np.zeros(lt.NUM_KERNELS, dtype=np.int64)
        self._backend: Backend | None = None
        self._whole: WholePass | None = None
        self._params = [AttentionParams(spec.softmax_scale, layer.window, spec.softcap) for layer in spec.layers]
        self.info = RunnerInfo(
            name="native",
            architecture=spec.model_type,
            dtype=plan_label(plan, weights),
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            weight_bytes=packed.nbytes,
            weight_region=packed.region,
            kv_spec=native_kv_spec(spec, weights, block_size, kv_bits),
            kernel_path=linear_path(),
            hidden_size=spec.hidden_size,
            numerics=f"{weights} pack {PACKED_VERSION} {describe_numerics()}",
        )

    @classmethod
    def from_dir(
        cls,
        model: Checkpoint | Path | str,
        *,
        weights: str = "int8",
        num_threads: int = 1,
        block_size: int = 16,
        kv_bits: tuple[int, int] = (16, 16),
        cache_dir: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> NativeRunner:
        """Load a checkpoint, or the one at a path; its packed weights come from the cache directory, or are packed now.

        Raises ModelFormatError with the reason where the model is not known to this runner.
        """
        checkpoint = Checkpoint.open(model)
        spec, notice = describe_model(checkpoint.config), pin_notice(checkpoint.config)
        if notice:
            _LOG.warning("%s: %s", checkpoint.path, notice)
        parts = checkpoint.other_parts
        if parts:
            _LOG.info(
                "%s: text only; not used are the tensors of %s",
                checkpoint.path,
                ", ".join(f"{part} ({count})" for part, count in sorted(parts.items())),
            )
        with checkpoint.open_source() as source:
            plan = pack_plan(spec, weights, source)
            check_tensors(plan, source)
            program, *entries = pass_entries(_kinds_of(plan), quantized=kv_bits != (16, 16))
            compile_ahead([program, *packing_entries(plan, source), *entries], default_num_threads())
        packed = load_packed(
            checkpoint,
            plan,
            weights=weights,
            cache_dir=cache_dir,
            num_threads=num_threads,
            progress=progress,
        )
        return cls(spec, plan, packed, weights=weights, num_threads=num_threads, block_size=block_size, kv_bits=kv_bits)

    @property
    def moved_keys_refusal(self) -> str | None:
        if self._spec.family.late_norm:
            return LATE_NORM
        # Where a pass is one call of a kernel attention finds the queries before rotation.
        if self._whole is not None:
            return None
        name = "no backend" if self._backend is None else f"backend {self._backend.name!r}"
        return f"the native runner, layer by layer on {name}, attends keys only where they were computed; use 'cpu'"

    @property
    def copied_bytes(self) -> int:
        return 0

    def bind(self, backend: Backend) -> None:
        """Use this backend's pool. ConfigError unless it takes NumPy arrays and has this model's shapes."""
        if backend.array_kind != "numpy":
            raise ConfigError(f"the native runner works with NumPy backends (cpu, reference), not {backend.name!r}")
        if backend.spec.layers != self.info.kv_spec.layers:
            raise ConfigError(f"backend {backend.name!r} was made for other layers than those of this model")
        self._backend = backend
        # Two teams would wait for each other's cores: the kernels of both take turns, so one team serves them.
        access = backend.kernel_access
        shared = access is not None and access.workspace.num_threads == self._own_team.num_threads
        self._team = access.workspace.team if access is not None and shared else self._own_team
        self._whole = None
        if self._spec.num_heads * self._spec.head_dim == self._buffers.sizes.attended:
            self._whole = WholePass.of(backend, self._params)
        self._kernels = kernel_table(self.kinds, None if self._whole is None else self._whole.is_quantized)

    def forward(self, batch: ForwardBatch) -> Floats:
        """Run the tokens, store their KV; float32 logits [num_logits, vocab_size]. Fills `batch.states`."""
        backend = self._backend
        if backend is None:
            raise ConfigError("forward before bind: the runner has no backend for its KV")
        spec, num_tokens = self._spec, len(batch.token_ids)
        tokens, positions = (np.ascontiguousarray(a, dtype=np.int64) for a in (batch.token_ids, batch.positions))
        if num_tokens == 0 or tokens.min() < 0 or tokens.max() >= spec.vocab_size:
            raise RequestError(f"token ids must be at least one, from 0 to {spec.vocab_size - 1}")
        if self._whole is None:
            refuse_deltas(batch.layout, f"the native runner, layer by layer on backend {backend.name!r},")
        if spec.family.late_norm:
            refuse_deltas(batch.layout, f"the native runner with {spec.model_type}")
        prepared = backend.prepare(batch.layout)
        addresses = self._addresses(batch, tokens, positions)
        query = self._buffers.rows(lt.B_QUERY, num_tokens, spec.num_heads)
        if self._whole is not None:
            memory = self._prepare_whole(self._whole, batch, prepared, addresses, self._program.parts[-1][1])
            return self._forward_whole(memory, addresses, batch)
        attended = query
        for layer, part in enumerate(self._program.parts[:-1]):
            self._run(part, addresses, num_tokens)
            attended = self._attend(backend, layer, query, prepared)
            addresses = addresses.copy()  # a helper of the last call may still look at the old ones
            addresses[lt.B_ATTENDED] = attended.ctypes.data
        return self._outputs(batch, addresses, attended)

    def deviations(self, batch: ForwardBatch, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> Floats:
        """See `Runner.deviations`: values are read where the second layer's rope left them, in its wide row."""
        spec = self._spec
        if len(spec.layers) < 2:
            return np.zeros(len(rows), dtype=np.float32)
        whole, _ = self._run_begin(batch, self._program.parts[1][1])
        first, width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim, spec.num_kv_heads * spec.head_dim
        computed = self._buffers.wide(len(batch.token_ids))[rows, first : first + width]
        stored = whole.stored_values(1, slots).reshape(len(rows), width)
        distances: Floats = np.square(computed - stored).sum(axis=1)
        return distances

    def masses(self, batch: ForwardBatch, rows: npt.NDArray[np.int64], stored: StoredKeys) -> Floats:
        """See `Runner.masses`: queries and lse are where attention found and left them."""
        layer = asked_layer([one.window for one in self._spec.layers])
        behind = self._program.parts[layer + 1][0]
        whole, memory = self._run_begin(batch, behind - int(len(rows) == 0))  # the operation before is attention
        if not len(rows):
            return np.zeros(len(stored.slots), dtype=np.float32)
        queries = self._buffers.rows(lt.B_QUERY, len(batch.token_ids), self._spec.num_heads)[rows]
        keys = self._buffers.turned(layer, whole.stored_keys(layer, stored.slots), stored.deltas).astype(np.float32)
        return attended_masses(
            queries, memory.lse[rows], batch.positions[rows], keys, stored.positions, self._params[layer]
        )

    def _run_begin(self, batch: ForwardBatch, end: int) -> tuple[WholePass, PassMemory]:
        """Run operations [0, end) alone."""
        backend, whole = self._backend, self._whole
        if backend is None or whole is None:
            raise ConfigError(f"no layer can be looked at alone: {self.moved_keys_refusal}")
        tokens, positions = (np.ascontiguousarray(a, dtype=np.int64) for a in (batch.token_ids, batch.positions))
        addresses = self._addresses(batch, tokens, positions)
        memory = self._prepare_whole(whole, batch, backend.prepare(batch.layout), addresses, end)
        self._run((0, end), addresses, len(tokens), memory.counters)
        return whole, memory

    def _addresses(
        self, batch: ForwardBatch, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The buffers of a pass; `tokens` and `positions` must outlive it."""
        num_positions, parts = int(positions.max()) + 1, batch.layout.parts
        if parts is not None:
            num_positions = max(num_positions, turned_positions(parts, batch.layout.seq_lens))
        addresses = self._buffers.addresses(len(tokens), num_positions)
        addresses[lt.B_TOKENS], addresses[lt.B_POSITIONS] = tokens.ctypes.data, positions.ctypes.data
        return addresses

    def _prepare_whole(
        self, whole: WholePass, batch: ForwardBatch, prepared: Any, addresses: npt.NDArray[np.int64], end: int
    ) -> PassMemory:
        """Memory for operations [0, end), entered into the addresses."""
        query = self._buffers.rows(lt.B_QUERY, len(batch.token_ids), self._spec.num_heads)
        turning = self._buffers.turning() if has_delta(batch.layout.parts) else {}
        memory = whole.prepare(query, prepared, self._num_counters(0, end), turning)
        addresses[lt.B_ROWS], addresses[lt.B_ATTENDED] = memory.rows, memory.attended.ctypes.data
        return memory

    def _forward_whole(self, memory: PassMemory, addresses: npt.NDArray[np.int64], batch: ForwardBatch) -> Floats:
        """The layers with their attention in one call of the program, the head too where it has the same rows."""
        parts, num_tokens, num_rows = self._program.parts, len(batch.token_ids), len(batch.logit_rows)
        num_states = len(batch.state_rows)
        if num_rows == num_tokens and not num_states and np.array_equal(batch.logit_rows, np.arange(num_tokens)):
            logits = self._buffers.logits(num_tokens)
            addresses[lt.B_LOGITS] = logits.ctypes.data
            self._run((0, parts[-1][1]), addresses, num_tokens, memory.counters)
            return logits[:, : self._spec.vocab_size]
        # The operation before the last part is attention: a piece of a prompt whose logits nobody wants needs none.
        self._run((0, parts[-1][0] - int(num_rows + num_states == 0)), addresses, num_tokens, memory.counters)
        return self._outputs(batch, addresses, memory.attended)

    def _attend(self, backend: Backend, layer: int, query: Floats, prepared: Any) -> Floats:
        """Store keys and values; what attention returns, rows padded to whole groups."""
        key, value = (self._buffers.rows(b, len(query), self._spec.num_kv_heads) for b in (lt.B_KEY, lt.B_VALUE))
        backend.write_kv(layer, key, value, prepared)
        out, _ = backend.attention(layer, query, prepared, self._params[layer])
        rows: Floats = np.ascontiguousarray(out, dtype=np.float32).reshape(len(query), -1)
        width = self._buffers.sizes.attended
        if rows.shape[1] == width:
            return rows
        padded = np.zeros((len(query), width), dtype=np.float32)
        padded[:, : rows.shape[1]] = rows
        return padded

    def _outputs(self, batch: ForwardBatch, addresses: npt.NDArray[np.int64], attended: Floats) -> Floats:
        """What follows the last attention, for the rows whose logits or states are wanted only."""
        first, end = self._program.parts[-1]
        rows, states = (np.ascontiguousarray(a, dtype=np.int64) for a in (batch.logit_rows, batch.state_rows))
        logits = self._buffers.logits(len(rows))
        if len(states):
            self._run_rows((first, self._program.normed), states, addresses, attended)
            batch.states[:] = self._buffers.normed(len(states))
        if len(rows):
            addresses = addresses.copy()
            addresses[lt.B_LOGITS] = logits.ctypes.data
            self._run_rows((first, end), rows, addresses, attended)
        return logits[:, : self._spec.vocab_size]

    def _run_rows(
        self, part: tuple[int, int], rows: npt.NDArray[np.int64], addresses: npt.NDArray[np.int64], attended: Floats
    ) -> None:
        """Operations behind the last attention, on copies of these rows."""
        addresses = addresses.copy()
        hidden, attended = self._buffers.hidden(len(attended))[rows], attended[rows]
        addresses[lt.B_HIDDEN], addresses[lt.B_ATTENDED] = hidden.ctypes.data, attended.ctypes.data
        self._run(part, addresses, len(rows))

    def _num_counters(self, first: int, end: int) -> int:
        return lt.COUNTERS_PER_OP * (end - first + 1)

    def _run(
        self,
        part: tuple[int, int],
        addresses: npt.NDArray[np.int64],
        num_tokens: int,
        counters: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Operations [first, end); `counters`: zeros, at least as many as they need."""
        first, end = part
        if counters is None:
            counters = np.zeros(self._num_counters(first, end), dtype=np.int64)
        program = self._program
        job = lt.ProgramJob(
            program.ops, program.params, addresses, counters, self._kernels, first, end, num_tokens, self._matrix
        )
        self._team.run(run_program, job, counters, lt.COUNTERS_PER_OP * (end - first), self._team.num_threads)

    def close(self) -> None:
        """End the helper threads, let go of the backend and unmap the weights."""
        self._own_team.close()
        self._backend, self._team, self._whole = None, self._own_team, None
        self._packed.close()


def _kinds_of(plan: list[PackEntry]) -> set[int]:
    """Kinds of the matrices, as the kernels number them."""
    return {NUMBERS[entry.kind] for entry in plan if entry.kind in NUMBERS}


def load(checkpoint: Checkpoint, options: LoadOptions) -> NativeRunner:
    """The runner of a checkpoint; its weights decide the dtype."""
    return NativeRunner.from_dir(
        checkpoint,
        weights=options.weights,
        num_threads=options.num_threads,
        block_size=options.block_size,
        kv_bits=options.kv_bits,
        cache_dir=checkpoint.cache_dir,
        progress=options.progress,
    )
