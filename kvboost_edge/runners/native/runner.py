"""Native runner: computes logits with quantized or float weights, without torch.

A token's logits depend only on its sequence and position. They are bit-identical for any batch, any
split of the prompt into chunks, any amount of cached KV and any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvboost_edge.backends.base import Backend, BatchLayout, PassStates
from kvboost_edge.backends.batch_layout import refuse_deltas
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.library import llvm_version
from kvboost_edge.kernels.linear.amx_choice import amx_choice, linear_path
from kvboost_edge.kernels.linear.weight_formats import FORMAT_OF, FORMATS, GROUP
from kvboost_edge.kernels.program import table as lt
from kvboost_edge.kernels.program.entries import kernel_table, pass_entries
from kvboost_edge.kernels.program.interpreter import run_program
from kvboost_edge.kernels.team import KernelTeam
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import ModelSpec
from kvboost_edge.models.packed.pack_plan import (
    PackEntry,
    check_tensors,
    kinds_of,
    plan_label,
    row_tables,
)
from kvboost_edge.models.packed.stream import packing_entries
from kvboost_edge.models.packed.weight_file import PACKED_VERSION, PackedWeights, load_packed
from kvboost_edge.models.weights.row_table import RowTable
from kvboost_edge.runners.attended_keys import asked_layer, attended_masses
from kvboost_edge.runners.base import (
    ForwardBatch,
    LoadOptions,
    PassAbandoned,
    RunnerInfo,
    StoredKeys,
)
from kvboost_edge.runners.native.buffers import ProgramBuffers
from kvboost_edge.runners.native.layerwise import attend_layer
from kvboost_edge.runners.native.pass_texts import PassTexts
from kvboost_edge.runners.native.program import attention_params, build_program, possible_operations
from kvboost_edge.runners.native.recurrent_layers import accepted_rows, pass_states
from kvboost_edge.runners.native.select_native import (
    keys_refusal,
    log_dtype,
    log_notices,
    native_kv_spec,
)
from kvboost_edge.runners.native.split_pass import joined_outputs, split_pass
from kvboost_edge.runners.native.whole_pass import PassMemory, WholePass
from kvboost_edge.segments import has_delta, turned_positions

__all__ = [
    "NUMERICS_VERSION",
    "NativeRunner",
    "describe_numerics",
    "load",
    "load_kernels",
]

_SHORT_PASS = 32  # tokens; a shorter pass is one call, which is cheapest
_CALL_SECONDS = 0.025  # target duration of a call in seconds; a pass can be abandoned between calls

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]


NUMERICS_VERSION = 3
"""Version of the exact bits that kernels and programs compute. Increment it with every change.

Blocks stored by another version are not reused. A test detects a change in the bits of a small
model.
"""
# The same for models with a format of `scaled_codes`, on which the bits of other models do not
# depend. In version 1, the halves of a group were added one after the other.
_SCALED_CODES_VERSION = 2


def describe_numerics(kinds: Iterable[int]) -> str:
    """Return the versions of the kernels, LLVM and NumPy, which the exact bits of KV depend on.

    Args:
        kinds: numbers of the formats of the model's weights.
    """
    found = f"kernels {NUMERICS_VERSION} llvm {llvm_version()} numpy {np.__version__}"
    if any(FORMAT_OF[kind].scaled_codes for kind in kinds):
        found += f" scaled codes {_SCALED_CODES_VERSION}"
    return found


class _Rest(NamedTuple):
    """State of a pass whose remaining layers run only on some of its rows.

    Attributes:
        batch: input of the pass.
        prepared: the backend's batch.
        addresses: buffer addresses.
        attended: attention output of all rows.
        layers: layers whose attention has not run yet.
    """

    batch: ForwardBatch
    prepared: Any
    addresses: Longs
    attended: Floats
    layers: range


class NativeRunner:
    """Runner for the model families in models/config/spec.py. Not thread-safe."""

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
        table: RowTable | None = None,
        short_vocabulary: int = 0,
        is_wide: bool = False,
        sparse: bool = False,
    ) -> None:
        self._spec = spec
        self._sparse = sparse
        self._packed = packed
        self._table = table
        self._exact = build_program(spec, plan, packed, num_threads, short_vocabulary)
        self._wide = self._exact
        if is_wide:
            self._wide = build_program(
                spec, plan, packed, num_threads, short_vocabulary, is_wide=True
            )
        self._program = self._exact  # that of the current pass
        experts = (entry.kind for entry in plan if entry.name.endswith(".experts_down"))
        floats = any(FORMATS[kind].is_float for kind in experts)
        self._buffers = ProgramBuffers(spec, float_experts=floats, is_wide=is_wide)
        self._own_team = KernelTeam(num_threads)
        self._team = self._own_team
        self._matrix = int(amx_choice().used)
        self.kinds = kinds_of(plan)
        self.plan = plan
        self._kernels = np.zeros(lt.NUM_KERNELS, dtype=np.int64)
        self._backend: Backend | None = None
        self._whole: WholePass | None = None
        self._texts: PassTexts | None = None
        self._params = attention_params(spec, packed)
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
            hidden_size=spec.state_size,
            stores_kv=not spec.bidirectional,
            joins_hidden_states=spec.joins_hidden_states,
            borrows_kv=spec.backbone_size > 0,
            short_vocabulary=short_vocabulary,
            numerics=f"{weights} pack {PACKED_VERSION} {describe_numerics(self.kinds)}",
            splits_passes=is_wide,
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
        short_vocabulary: int = 0,
        is_wide: bool = False,
        sparse: bool = False,
    ) -> NativeRunner:
        """Load a checkpoint. Packed weights are taken from the cache directory if possible.

        Args:
            model: a checkpoint or its path.
            weights: weight format.
            num_threads: number of kernel threads.
            block_size: number of tokens in a KV block.
            kv_bits: bits of keys and bits of values in the pool.
            cache_dir: directory of packed weights, or None for the default. NO_CACHE keeps them in
                memory only.
            progress: called with the bytes done and the bytes in total.
            short_vocabulary: see `RunnerInfo`.
            is_wide: whether to compute KV that is shared in wide arithmetic.
            sparse: whether passes may have sparse ranges, see `BatchLayout`.

        Raises:
            ModelFormatError: the native runner cannot run the model.
        """
        checkpoint = Checkpoint.open(model)
        spec = checkpoint.spec
        log_notices(checkpoint)
        plan = checkpoint.plan(weights)
        with checkpoint.open_source() as source:
            check_tensors(plan, source, row_tables(spec))
            program, *entries = _pass_entries(spec, plan, kv_bits, is_wide=is_wide, sparse=sparse)
            compile_ahead(
                [program, *packing_entries(plan, source, row_tables(spec)), *entries],
                default_num_threads(),
            )
        packed = load_packed(
            checkpoint,
            plan,
            weights=weights,
            cache_dir=cache_dir,
            num_threads=num_threads,
            progress=progress,
        )
        tables = [
            RowTable.open(checkpoint, one.parts[0][0], one.rows, one.inputs)
            for one in row_tables(spec)
        ]
        return cls(
            spec,
            plan,
            packed,
            weights=weights,
            num_threads=num_threads,
            block_size=block_size,
            kv_bits=kv_bits,
            table=tables[0] if tables else None,
            short_vocabulary=short_vocabulary,
            is_wide=is_wide,
            sparse=sparse,
        )

    def lend(self, borrower: PackedWeights, entries: Mapping[str, PackEntry]) -> None:
        """Let other weights use entries of this runner's plan, by their name in those weights."""
        for name, entry in entries.items():
            borrower.borrow(entry, name, self._packed)

    @property
    def moved_keys_refusal(self) -> str | None:
        backend = "" if self._backend is None else self._backend.name
        return keys_refusal(self._spec, backend, is_wide=self.info.splits_passes)

    @property
    def copied_bytes(self) -> int:
        return 0

    def bind(self, backend: Backend) -> None:
        """Set the backend.

        Raises:
            ConfigError: the backend does not use NumPy arrays, or its layers differ from the
                model's.
        """
        if backend.array_kind != "numpy":
            raise ConfigError(
                "the native runner works with NumPy backends (cpu, reference), not "
                f"{backend.name!r}"
            )
        own = self.info.kv_spec
        matches = (backend.spec.layers, backend.spec.states) == (own.layers, own.states)
        if not (matches or self.info.borrows_kv):
            raise ConfigError(
                f"backend {backend.name!r} was created for other layers than this model's; "
                "create a new one"
            )
        self._backend = backend
        # Runner and backend share one team, because two teams would compete for the same cores.
        # Their kernels never run at the same time.
        access = backend.kernel_access
        shared = access is not None and access.workspace.num_threads == self._own_team.num_threads
        self._team = access.workspace.team if access is not None and shared else self._own_team
        self._whole = None
        self._texts = None
        if self._spec.bidirectional:
            self._texts = PassTexts(self._spec, access)
        elif all(
            self._spec.num_heads * layer.head_dim % GROUP == 0
            for layer in self._spec.layers
            if layer.kv >= 0
        ):
            self._whole = WholePass.of(
                backend, self._params, [layer.kv for layer in self._spec.layers]
            )
        whole = self._whole if self._texts is None else self._texts.whole
        quantized = None if whole is None else whole.is_quantized
        operations = self._exact.kinds | self._wide.kinds
        self._kernels = kernel_table(self.kinds, operations, quantized, sparse=self._sparse)

    def forward(self, batch: ForwardBatch) -> Floats:
        """Compute a pass: store its KV, fill `batch.hidden_states` and return logits.

        Returns:
            Logits, float32 [num_logits, vocab_size], or [num_logits, short_vocabulary] if
            `batch.is_short`.
        """
        if not self.info.splits_passes:
            return self._forward(batch)
        parts = split_pass(batch, self.info.kv_spec.block_size)
        found = []
        for part in parts:
            self._program = self._wide if part.is_shareable else self._exact
            logits = self._forward(part.batch)
            found.append(logits if len(parts) == 1 else logits.copy())
        self._program = self._exact
        return found[0] if len(parts) == 1 else joined_outputs(batch, parts, found)

    def _forward(self, batch: ForwardBatch) -> Floats:
        """Compute a pass with the current program."""
        backend = self._backend
        if backend is None:
            raise ConfigError("call bind before forward: the runner has no backend for its KV")
        spec = self._spec
        num_tokens = len(batch.token_ids)
        tokens, positions = (
            np.ascontiguousarray(a, dtype=np.int64) for a in (batch.token_ids, batch.positions)
        )
        if num_tokens == 0 or tokens.min() < 0 or tokens.max() >= spec.vocab_size:
            found = f"{tokens.min()} to {tokens.max()}" if num_tokens else "none"
            raise RequestError(
                f"a pass needs at least one token id, each from 0 to {spec.vocab_size - 1}, but "
                f"has {found}"
            )
        if self._whole is None:
            refuse_deltas(batch.layout, f"the native runner on backend {backend.name!r}")
        if spec.family.late_norm:
            refuse_deltas(batch.layout, f"the native runner with {spec.model_type}")
        if batch.layout.sparse is not None and not (self._sparse and self._whole is not None):
            raise ConfigError(
                "the pass has sparse ranges, but the runner was loaded without sparse prefill or "
                f"runs on backend {backend.name!r}; load it with sparse=True on backend='cpu'"
            )
        prepared: Any = (self._texts or backend).prepare(batch.layout)
        whole = self._whole if self._texts is None else self._texts.whole
        addresses, _held = self._addresses(batch, tokens, positions)
        if batch.joined is not None:
            self._buffers.joined(num_tokens)[:] = batch.joined
        if whole is not None:
            return self._forward_whole(whole, batch, prepared, addresses)
        attended = np.empty((0, 0), dtype=np.float32)
        for layer, part in enumerate(self._program.parts[:-1]):
            self._run(part, addresses, num_tokens)
            if spec.layers[layer].kv < 0:
                continue
            store = self._texts or backend
            params = self._params[layer]
            attended = attend_layer(store, spec, layer, self._buffers, num_tokens, prepared, params)
            addresses = addresses.copy()  # helper threads may still read the old array
            addresses[lt.B_ATTENDED] = attended.ctypes.data
        return self._outputs(batch, addresses, attended, len(self._program.parts) - 1)

    def accept_drafts(self, layout: BatchLayout, accepted: Ints, states: PassStates) -> None:
        """Advance recurrent states by accepted draft tokens. See `Runner.accept_drafts`."""
        if self._backend is None or self._backend.states is None:
            raise ConfigError(
                "accept_drafts is only for hybrid models, but this model has no recurrent state"
            )
        rows = accepted_rows(layout, self._backend.states, accepted, states)
        addresses = self._buffers.addresses(rows.num_rows, 1)
        addresses[lt.B_STATES] = rows.numbers.ctypes.data
        addresses[lt.B_DRAFTS] = rows.drafts
        addresses[lt.B_SEQUENCES] = np.count_nonzero(accepted)
        self._run(self._program.accept, addresses, rows.num_rows)

    def deviations(self, batch: ForwardBatch, rows: Longs, slots: Longs) -> Floats:
        """Return distances of computed values from stored ones. See `Runner.deviations`."""
        spec = self._spec
        if len(spec.kv_layers) < 2:
            return np.zeros(len(rows), dtype=np.float32)
        second = [index for index, layer in enumerate(spec.layers) if layer.owns_kv][1]
        layer = spec.layers[second]
        whole, _ = self._run_begin(batch, second, self._program.parts[second][1])
        # `RopeOp` has left the values of this layer in its row of B_PROJECTED.
        first = (spec.num_heads + layer.num_kv_heads) * layer.head_dim
        width = layer.num_kv_heads * layer.head_dim
        computed = self._buffers.projected(len(batch.token_ids))[rows, first : first + width]
        stored = whole.stored_values(second, slots).reshape(len(rows), width)
        distances: Floats = np.square(computed - stored).sum(axis=1)
        return distances

    def masses(self, batch: ForwardBatch, rows: Longs, stored: StoredKeys) -> Floats:
        """Return the attention that tokens give to stored keys. See `Runner.masses`."""
        layer = asked_layer([one.window for one in self._spec.layers])
        behind = self._program.parts[layer + 1][0]
        # The last operation before the next part is attention, which is skipped without rows.
        whole, memory = self._run_begin(batch, layer, behind - int(len(rows) == 0))
        if not len(rows):
            return np.zeros(len(stored.slots), dtype=np.float32)
        dim = self._spec.layers[layer].head_dim
        queries = self._buffers.rows(lt.B_QUERY, len(batch.token_ids), self._spec.num_heads, dim)[
            rows
        ]
        keys = self._buffers.turned(
            layer, whole.stored_keys(layer, stored.slots), stored.deltas
        ).astype(np.float32)
        return attended_masses(
            queries,
            memory.lse[rows],
            batch.positions[rows],
            keys,
            stored.positions,
            self._params[layer],
        )

    def _run_begin(self, batch: ForwardBatch, layer: int, end: int) -> tuple[WholePass, PassMemory]:
        """Run the operations [0, end), which cover the layers up to `layer`, on all rows."""
        backend = self._backend
        whole = self._whole
        if backend is None or whole is None:
            raise ConfigError(f"layers cannot run separately: {self.moved_keys_refusal}")
        tokens, positions = (
            np.ascontiguousarray(a, dtype=np.int64) for a in (batch.token_ids, batch.positions)
        )
        addresses, _held = self._addresses(batch, tokens, positions)
        prepared = backend.prepare(batch.layout)
        memory = self._prepare_whole(whole, batch, prepared, addresses, (0, end), range(layer + 1))
        self._run((0, end), addresses, len(tokens), memory.counters)
        return whole, memory

    def _addresses(
        self, batch: ForwardBatch, tokens: Longs, positions: Longs
    ) -> tuple[Longs, list[Any]]:
        """Return the buffer addresses of a pass, and arrays that must outlive the pass.

        `tokens` and `positions` must outlive it as well.
        """
        num_positions = int(positions.max()) + 1
        parts = batch.layout.segments
        if parts is not None:
            num_positions = max(num_positions, turned_positions(parts, batch.layout.seq_lens))
        addresses = self._buffers.addresses(len(tokens), num_positions)
        addresses[lt.B_TOKENS] = tokens.ctypes.data
        addresses[lt.B_POSITIONS] = positions.ctypes.data
        held: list[Any] = []
        if self._table is not None:
            held.append(self._table.rows(tokens))
            addresses[lt.B_TABLE_ROWS] = held[-1].ctypes.data
        if self._backend is not None and self._backend.states is not None:
            held.append(pass_states(batch.layout, self._backend.states))
            addresses[lt.B_STATES] = held[-1].ctypes.data
            addresses[lt.B_SEQUENCES] = len(batch.layout.seq_lens)
        return addresses, held

    def _prepare_whole(
        self,
        whole: WholePass,
        batch: ForwardBatch,
        prepared: Any,
        addresses: Longs,
        part: tuple[int, int],
        layers: range,
    ) -> PassMemory:
        """Allocate memory for attention in the operations `part`, and enter it in the addresses."""
        turning = self._buffers.turning() if has_delta(batch.layout.segments) else {}
        heads = self._spec.num_heads
        widest = max(self._buffers.sizes.attended)
        counters = self._num_counters(*part)
        memory = whole.prepare(
            self._buffers.query, heads, prepared, counters, turning, layers, widest
        )
        addresses[lt.B_ROWS] = memory.rows
        addresses[lt.B_ATTENDED] = memory.attended.ctypes.data
        return memory

    def _forward_whole(
        self, whole: WholePass, batch: ForwardBatch, prepared: Any, addresses: Longs
    ) -> Floats:
        """Run the program, including attention, in one kernel call.

        If only some rows need logits or states, a second call runs the remaining operations on
        those rows.
        """
        parts = self._program.parts
        narrow = self._program.narrow
        num_tokens = len(batch.token_ids)
        end = parts[-1][1]
        num_hidden_states = len(batch.hidden_state_rows)
        if num_tokens in (len(batch.logit_rows), num_hidden_states):
            if len(batch.logit_rows) < num_tokens or batch.is_short:
                end = self._program.normed
            memory = self._prepare_whole(
                whole, batch, prepared, addresses, (0, end), range(len(parts) - 1)
            )
            logits = self._buffers.logits(num_tokens if end == parts[-1][1] else 0)
            addresses[lt.B_LOGITS] = logits.ctypes.data
            self._run_layers(end, addresses, batch, memory.counters)
            if num_hidden_states:
                batch.hidden_states[:] = self._buffers.states(num_tokens)[batch.hidden_state_rows]
            if end == self._program.normed:
                hidden = self._buffers.hidden(num_tokens)
                return self._head(batch, addresses, hidden[batch.logit_rows])
            return logits[:, : self._spec.vocab_size]
        # Attention is the last operation before a part. A prompt chunk that needs no logits skips
        # it. A recurrent state is always advanced.
        first = parts[narrow][0]
        if len(batch.logit_rows) + num_hidden_states == 0 and isinstance(
            self._program.operations[first - 1], lt.AttendOp
        ):
            first -= 1
        memory = self._prepare_whole(whole, batch, prepared, addresses, (0, first), range(narrow))
        self._run_layers(first, addresses, batch, memory.counters)
        width = self._buffers.sizes.attended[narrow - 1]
        attended = memory.attended[: num_tokens * width].reshape(num_tokens, width)
        return self._outputs(batch, addresses, attended, narrow, prepared)

    def _outputs(
        self,
        batch: ForwardBatch,
        addresses: Longs,
        attended: Floats,
        part: int,
        prepared: Any = None,
    ) -> Floats:
        """Run the operations from `part` on, for rows that need logits or hidden states.

        `prepared` is the backend's batch. It is only needed if a layer from there on attends.
        """
        program = self._program
        first = program.parts[part][0]
        rows, states = (
            np.ascontiguousarray(a, dtype=np.int64)
            for a in (batch.logit_rows, batch.hidden_state_rows)
        )
        rest = _Rest(batch, prepared, addresses, attended, range(part, len(program.parts) - 1))
        is_short = batch.is_short and len(rows) > 0
        if not (len(states) or is_short) or self._spec.backbone_size:
            logits = self._buffers.logits(len(rows))
            if len(rows):
                addresses[lt.B_LOGITS] = logits.ctypes.data
                self._run_rows((first, program.parts[-1][1]), rows, rest)
            if len(states):  # those of an assistant, which are of the same rows
                batch.hidden_states[:] = self._buffers.states(len(rows))
            return logits[:, : self._spec.vocab_size]
        both = np.union1d(rows, states)
        hidden = self._run_rows((first, program.normed), both, rest)
        if len(states):
            batch.hidden_states[:] = self._buffers.normed(len(both))[np.searchsorted(both, states)]
        return self._head(batch, addresses, hidden[np.searchsorted(both, rows)])

    def _head(self, batch: ForwardBatch, addresses: Longs, hidden: Floats) -> Floats:
        """Run the last norm and the LM head on rows of the hidden state before the norm."""
        program = self._program
        logits = self._buffers.logits(len(hidden))
        part = program.short_head if batch.is_short else (program.normed - 1, program.parts[-1][1])
        if len(hidden):
            addresses = addresses.copy()
            addresses[lt.B_HIDDEN] = hidden.ctypes.data
            addresses[lt.B_LOGITS] = logits.ctypes.data
            self._run(part, addresses, len(hidden))
        info = self.info
        return logits[:, : info.short_vocabulary if batch.is_short else info.vocab_size]

    def _run_rows(self, part: tuple[int, int], rows: Longs, rest: _Rest) -> Floats:
        """Run operations on copies of some rows, given in ascending order.

        Returns:
            The hidden state of the rows, before the last norm.
        """
        addresses = rest.addresses.copy()
        num_tokens = len(rest.batch.token_ids)
        counters = None
        hidden = self._buffers.hidden(num_tokens)[rows]
        attended = rest.attended[rows]
        inputs = self._buffers.per_layer(num_tokens)[rows]
        positions = np.ascontiguousarray(rest.batch.positions[rows], dtype=np.int64)
        if any(layer.attends for layer in self._spec.layers[rest.layers.start : rest.layers.stop]):
            assert self._whole is not None
            prepared = rest.prepared.narrowed(rows)
            memory = self._prepare_whole(
                self._whole, rest.batch, prepared, addresses, part, rest.layers
            )
            counters = memory.counters
            memory.attended[: attended.size] = attended.reshape(-1)
            attended = memory.attended
        addresses[lt.B_HIDDEN] = hidden.ctypes.data
        addresses[lt.B_ATTENDED] = attended.ctypes.data
        addresses[lt.B_PER_LAYER] = inputs.ctypes.data
        addresses[lt.B_POSITIONS] = positions.ctypes.data
        border = self._program.border
        if border is not None:
            more = self._buffers.copied(border, num_tokens, rows)
            addresses[border.buffer] = more.ctypes.data
        self._run(part, addresses, len(rows), counters)
        return hidden

    def _run_layers(self, end: int, addresses: Longs, batch: ForwardBatch, counters: Longs) -> None:
        """Run the operations [0, end), a few layers per call if the pass is long.

        Args:
            end: end index of the operations.
            addresses: buffer addresses.
            batch: input of the pass.
            counters: zeros, at least `_num_counters`.

        Raises:
            PassAbandoned: the pass was abandoned between two calls.
        """
        num_tokens = len(batch.token_ids)
        if batch.is_abandoned is None or num_tokens < _SHORT_PASS:
            self._run((0, end), addresses, num_tokens, counters)
            return
        ends = [last for _, last in self._program.parts if last < end]
        start = done = 0
        count = 1  # number of layers in the next call
        used = 0
        while start < end:
            if batch.is_abandoned():
                raise PassAbandoned
            began = time.perf_counter()
            stop = ends[done + count - 1] if done + count <= len(ends) else end
            self._run((start, stop), addresses, num_tokens, counters[used:])
            used += lt.COUNTERS_PER_OP * (stop - start + 1)
            start = stop
            done += count
            count = max(1, round(count * _CALL_SECONDS / (time.perf_counter() - began)))

    def _num_counters(self, first: int, end: int) -> int:
        """Return how many counters the operations [first, end) need, for any number of calls."""
        return lt.COUNTERS_PER_OP * (end - first + len(self._program.parts))

    def _run(
        self,
        part: tuple[int, int],
        addresses: Longs,
        num_tokens: int,
        counters: Longs | None = None,
    ) -> None:
        """Run the operations in `part`. `counters` must be zeros, at least `_num_counters`."""
        first, end = part
        if counters is None:
            counters = np.zeros(self._num_counters(first, end), dtype=np.int64)
        program = self._program
        job = lt.ProgramJob(
            program.ops,
            addresses,
            counters,
            self._kernels,
            first,
            end,
            num_tokens,
            self._matrix,
        )
        self._team.run(
            run_program, job, counters, lt.COUNTERS_PER_OP * (end - first), self._team.num_threads
        )

    def close(self) -> None:
        """Stop the helper threads, release the backend, free the buffers and unmap the weights."""
        self._own_team.close()
        self._buffers = ProgramBuffers(self._spec)
        self._backend = None
        self._team = self._own_team
        self._whole = None
        self._texts = None
        self._packed.close()
        if self._table is not None:
            self._table.close()


def load_kernels(
    checkpoint: Checkpoint,
    weights: str,
    kv_bits: tuple[int, int],
    *,
    is_wide: bool = False,
    sparse: bool = False,
) -> None:
    """Load the machine code that a model's passes need into this process.

    Missing code is compiled.
    """
    entries = _pass_entries(
        checkpoint.spec, checkpoint.plan(weights), kv_bits, is_wide=is_wide, sparse=sparse
    )
    compile_ahead(entries, default_num_threads())
    for entry in entries:
        _ = entry.address


def _pass_entries(
    spec: ModelSpec,
    plan: list[PackEntry],
    kv_bits: tuple[int, int],
    *,
    is_wide: bool,
    sparse: bool,
) -> list[KernelEntry]:
    """Return the kernel entries that a model's passes need, before its weights are packed."""
    possible = possible_operations(spec, is_wide=is_wide)
    return pass_entries(kinds_of(plan), possible, quantized=kv_bits != (16, 16), sparse=sparse)


def load(checkpoint: Checkpoint, options: LoadOptions) -> NativeRunner:
    """Load a checkpoint with this runner. The weights determine the dtype."""
    runner = NativeRunner.from_dir(
        checkpoint,
        weights=options.weights,
        num_threads=options.num_threads,
        block_size=options.block_size,
        kv_bits=options.kv_bits,
        cache_dir=checkpoint.cache_dir,
        progress=options.progress,
        short_vocabulary=options.short_vocabulary,
        is_wide=options.arithmetic == "wide",
        sparse=options.sparse,
    )
    log_dtype(options.dtype, runner.info)
    return runner
