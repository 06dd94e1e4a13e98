"""Non-prefix KV reuse, which places cached spans at admission and scores them before prefill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from kvboost_edge.backends.base import BatchLayout
from kvboost_edge.config import EngineConfig, GenerationMode, RecomputeStrategy
from kvboost_edge.engine.memory.state_budget import states_refusal
from kvboost_edge.engine.offload.prefetch import Prefetch, PrefetchQueue
from kvboost_edge.engine.request.request import (
    Request,
    RequestFeature,
    RequestInputs,
    SamplingParams,
)
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.schedule.feature import SharedSpans
from kvboost_edge.engine.schedule.planners import SpanPlacement
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.block_table import BlockTable, TableSegment
from kvboost_edge.kvcache.hashing import decode_tokens
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.reuse.block_history import Chain
from kvboost_edge.reuse.deviation_scoring import Probe, ProbeRow, QueryProbe, num_probed_blocks
from kvboost_edge.reuse.indexing import SpanFinder
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.reuse.span_search import prepare_search
from kvboost_edge.runners.base import ForwardBatch, Runner
from kvboost_edge.segments import Segment

__all__ = ["SPARSE_PREFILL", "Prober", "ReuseFields", "SequenceSpans", "SpanSharing"]

SPARSE_PREFILL = (
    "an engine with prefill='on-request' or 'sparse' reuses prefixes only; use prefill='exact'"
)
"""Reason why `EngineConfig.prefill` excludes non-prefix reuse."""

_REPAIRS = ("recompute_strategy", "recompute_overlap", "recompute_ratio")
_DEVIATION_LAYERS = 2  # layers that `Runner.deviations` runs
_QUERY_SHARE = 2 / 3  # fraction of the layers that `Runner.masses` runs, see `asked_layer`
# Initial gate status by the `reuse_gate` option. A stored verdict can change it to "passed".
_GATES = {"auto": "unchecked", "off": "off"}


class ReuseFields(RequestFeature):
    """Request fields for non-prefix KV reuse: recompute settings and the quality gate's status."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner

    @property
    def refusal(self) -> str | None:
        """Reason why the model or its runner does not support non-prefix reuse, or None."""
        # A pass cannot have both sparse ranges and keys that are moved to other positions.
        if self._config.prefill != "exact":
            return SPARSE_PREFILL
        return states_refusal(self._runner.info) or self._runner.moved_keys_refusal

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the recompute settings and the quality gate's status.

        Raises:
            RequestError: the request cannot use non-prefix reuse, or sets recompute_* options in
                another mode.
        """
        repair = self._repair(inputs.terms, inputs.params, generates=inputs.generates)
        return {
            "repair": repair,
            "gate": "" if repair is None else _GATES[self._config.reuse_gate],
        }

    def own_repair(self, options: Mapping[str, Any] | None = None) -> Repair:
        """Return the engine's recompute settings with the given recompute_* options applied.

        Raises:
            RequestError: an option is unknown, or non-prefix reuse is refused.
        """
        given = dict(options or {})
        for name in sorted(given.keys() - set(_REPAIRS)):
            raise RequestError(
                f"option {name!r} is not a recompute option; use only {', '.join(_REPAIRS)}"
            )
        terms = Terms(mode=GenerationMode.CHUNK_KV_REUSE, **given)
        repair = self._repair(terms, SamplingParams(), generates=True)
        assert repair is not None
        return repair

    def _repair(self, terms: Terms, params: SamplingParams, *, generates: bool) -> Repair | None:
        """Return the recompute settings of a request, or None in other modes.

        Raises:
            RequestError: the request needs exact KV, or sets recompute_* options in another mode.
        """
        given = {name: value for name in _REPAIRS if (value := getattr(terms, name)) is not None}
        if terms.mode is not GenerationMode.CHUNK_KV_REUSE:
            if given:
                raise RequestError(
                    f"{next(iter(given))} needs mode='chunk_kv_reuse', not mode={str(terms.mode)!r}"
                )
            return None
        exact = (
            "pin"
            if terms.pin or terms.pins
            else "prompt_logprobs"
            if params.prompt_logprobs is not None
            else None
        )
        if exact or not generates:
            raise RequestError(
                f"mode='chunk_kv_reuse' is approximate, and {exact or 'this request'} needs exact "
                "KV; use mode='prefix_cache'"
            )
        if self.refusal is not None:
            raise RequestError(f"mode='chunk_kv_reuse' is refused: {self.refusal}")
        prepare_search()
        strategy, overlap, ratio = (
            given.get(name, getattr(self._config, name)) for name in _REPAIRS
        )
        return Repair(strategy=RecomputeStrategy(strategy), overlap=overlap, ratio=ratio)


class SequenceSpans(SharedSpans):
    """The reused spans of one sequence."""

    def __init__(self, request: Request) -> None:
        self._lost_runs: list[Chain] | None = None  # reversed order; None before the search
        self._request = request
        self._found: list[tuple[int, int]] = []
        self._ahead: list[tuple[int, int]] = []  # spans not reached yet, last first
        self._num_recomputed = 0
        self._num_exact: int | None = None  # cached tokens at the first admission

    def next_lost_run(self, find: Callable[[], list[Chain]]) -> Chain | None:
        if self._lost_runs is None:
            self._lost_runs = find()[::-1]
        return self._lost_runs.pop() if self._lost_runs else None

    def place(self, found: list[tuple[int, int]], probe: Probe | None) -> None:
        self._found = found
        self.probe = probe

    def ahead(self) -> Iterable[tuple[int, int]]:
        return reversed(self._ahead)

    def admit(self, table: BlockTable) -> None:
        self._ahead = [(span.start, span.stop) for span in reversed(table.spans)]
        self.num_ahead = sum(stop - start for start, stop in self._ahead)
        if self._num_exact is None:
            self._num_exact = table.num_cached_tokens
        shared = self._num_in_prompt(self._ahead)
        # After a preemption, spans may also cover tokens that were exact before. Each token counts
        # once.
        counted = min(shared, self._request.num_prompt_tokens - self._num_exact)
        # One token computed from a span makes the answer approximate, so spans used before a
        # preemption also count.
        if self.probe is None and counted > self.num_shared:
            self.num_shared = counted
            self._num_recomputed = self._num_in_prompt(self._found) - shared

    def pass_over(self, position: int) -> int:
        while self._ahead and self._ahead[-1][0] == position:
            start, position = self._ahead.pop()
            self.num_ahead -= position - start
            self.recomputed_at = time.perf_counter()
        return position

    def forget(self) -> None:
        self._ahead.clear()
        self.num_ahead = 0
        self.probe = None

    def end_probe(self, table: BlockTable, seconds: float) -> None:
        """Update the spans to those that remain in `table` after deviation scoring.

        Args:
            seconds: time that the scoring took.
        """
        self.probe = None
        self.probe_seconds += seconds
        self.admit(table)

    def result_fields(self) -> dict[str, Any]:
        return {
            # A request that reuses no span from another position is exact.
            "mode": self._request.mode if self.num_shared else GenerationMode.PREFIX_CACHE,
            "reused_span_tokens": self.num_shared,
            "recomputed_tokens": self._num_recomputed,
            "gate": self._request.gate if self.num_shared else "",
        }

    def _num_in_prompt(self, ranges: Iterable[tuple[int, int]]) -> int:
        last = self._request.num_prompt_tokens
        return sum(max(0, min(stop, last) - start) for start, stop in ranges)


class SpanSharing(SpanPlacement):
    """A feature that lets sequences reuse KV of token runs cached at other positions.

    Args:
        min_chunk_tokens: minimum length of a run, in tokens.
        num_layers: number of the model's layers.
        remembers: also find runs whose blocks left the pool, because a tier may store them.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        min_chunk_tokens: int,
        num_layers: int,
        *,
        remembers: bool = False,
    ) -> None:
        self._manager = manager
        self._deviation_share = min(1.0, _DEVIATION_LAYERS / max(1, num_layers))
        self.finder = SpanFinder(manager, min_chunk_tokens, remembers=remembers)

    def bring(self, sequence: Sequence, loads: PrefetchQueue, spare: int) -> Prefetch | None:
        """Start loading the next reusable run from a tier.

        Each run is tried once. Runs that were loaded earlier are already in the cache.

        Returns:
            The prefetch, or None if no run is left.
        """

        def find() -> list[Chain]:
            return self.finder.lost(sequence.cacheable_ids, sequence.request.root)

        while (chain := sequence.spans.next_lost_run(find)) is not None:
            load = loads.begin_run(sequence, decode_tokens(chain.tokens), chain.root, spare)
            if load is not None:
                return load
        return None

    def context_of(self, token_ids: Several[int], root: bytes) -> int | None:
        return self.finder.context_of(token_ids, root)

    def place(self, sequence: Sequence, table: BlockTable, spare: int) -> bool | None:
        """Place reused spans in a new block table and allocate its blocks.

        Returns:
            True if all blocks were allocated. False if `spare` free blocks do not suffice, in which
                case nothing changed. None if there is nothing to reuse.
        """
        request = sequence.request
        size = self._manager.block_size
        if request.repair is None:
            return None
        found = self.finder.find(
            sequence.cacheable_ids, len(table) * size, request.root, request.repair
        )
        if not found.spans:
            return None
        num_probed = num_probed_blocks(found.spans, request.repair.block_ratio, size)
        spans = self._manager.spans
        if not spans.place(table, found.spans, sequence.num_tokens, spare, num_reserved=num_probed):
            return False
        probe = None
        if num_probed:
            asks = request.repair.strategy is RecomputeStrategy.QUERY
            probe = (
                QueryProbe(table, size, len(sequence.cacheable_ids), _QUERY_SHARE)
                if asks
                else Probe(table, size, self._deviation_share)
            )
        sequence.spans.place(found.runs, probe)
        return True


class Prober:
    """A scorer of reused spans, which runs some layers of the model on a few tokens at a time."""

    def __init__(self, runner: Runner, manager: KVCacheManager) -> None:
        self._runner = runner
        self._manager = manager

    def end(self, sequence: Sequence) -> None:
        """Finish a fully scored sequence by removing the tokens to recompute from its spans."""
        probe = sequence.spans.probe
        if probe is not None and probe.is_done:
            table = sequence.blocks
            self._manager.spans.cut(table, probe.spans())
            sequence.spans.end_probe(table, probe.seconds)
            sequence.move_to(table.num_cached_tokens)

    def look(self, sequence: Sequence, limit: int) -> None:
        """Score the next part of a sequence's spans, which uses the sequence's reserved blocks.

        Args:
            limit: maximum number of tokens to score, see `Probe.next_rows`.
        """
        probe = sequence.spans.probe
        assert probe is not None
        started = time.perf_counter()
        rows = probe.next_rows(limit)
        batch = _batch_of(sequence.token_ids, rows, self._manager.block_size)
        if isinstance(probe, QueryProbe):
            probe.take(rows, self._runner.masses(batch, probe.query_indices(rows), probe.stored))
        else:
            starts = batch.layout.cu_seqlens_q
            compared = [
                np.arange(starts[i], starts[i + 1]) for i, row in enumerate(rows) if row.stored
            ]
            stored = np.array([slot for row in rows for slot in row.stored], np.int64)
            where = np.concatenate([np.empty(0, np.int64), *compared])
            probe.take(rows, self._runner.deviations(batch, where, stored))
        probe.seconds += time.perf_counter() - started


def _batch_of(token_ids: Several[int], rows: Several[ProbeRow], block_size: int) -> ForwardBatch:
    lengths = [row.stop - row.start for row in rows]
    block_tables = np.full((len(rows), max(len(row.block_ids) for row in rows)), -1, np.int32)
    for i, row in enumerate(rows):
        block_tables[i, : len(row.block_ids)] = row.block_ids
    positions = [np.arange(row.start, row.stop, dtype=np.int64) for row in rows]
    layout = BatchLayout(
        cu_seqlens_q=np.cumsum([0, *lengths]).astype(np.int32),
        seq_lens=np.array([row.stop for row in rows], np.int32),
        block_tables=block_tables,
        slot_mapping=np.concatenate([_slots(row, row.segments[-1], block_size) for row in rows]),
        segments=np.array(
            [Segment(i, *segment) for i, row in enumerate(rows) for segment in row.segments],
            np.int32,
        ),
    )
    tokens = [np.array(token_ids[row.start : row.stop], np.int64) for row in rows]
    return ForwardBatch(
        np.concatenate(tokens), np.concatenate(positions), layout, np.empty(0, np.int64)
    )


def _slots(
    row: ProbeRow, own: TableSegment, block_size: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    places = np.arange(row.start, row.stop, dtype=np.int64) - own.first_position
    blocks = np.array(row.block_ids, np.int64)[own.first_index + places // block_size]
    return blocks * block_size + places % block_size
