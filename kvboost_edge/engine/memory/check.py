"""The memory check, which runs before weights are packed or loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.draft_plan import DraftPlan, select_with_draft, with_draft_model
from kvboost_edge.engine.memory.pool_size import (
    check_weights_fit,
    gb,
    left_after_weights,
    plan_num_blocks,
    planned_blocks,
    planned_pool_bytes,
    pool_bytes,
)
from kvboost_edge.engine.memory.process import (
    Overhead,
    check_process,
    measured_overhead,
    room_in_process,
)
from kvboost_edge.engine.memory.selection import (
    Selection,
    available_on,
    find_model,
    open_checkpoint,
    planned_info,
)
from kvboost_edge.engine.memory.state_budget import (
    check_options,
    drafts_shortage,
    plan_states,
    planned_states,
    state_bytes,
)
from kvboost_edge.errors import CapacityError, KVBoostError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.host.memory import process_rss
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.fingerprint import are_remembered
from kvboost_edge.models.packed.pack_plan import (
    STORED,
    WEIGHT_FORMATS,
    check_tensors,
    row_tables,
)
from kvboost_edge.models.packed.stream import packing_bytes
from kvboost_edge.models.packed.weight_file import free_bytes, packed_path
from kvboost_edge.models.weights.weight_source import WeightSummary
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "DraftFit",
    "MemoryCheck",
    "PackedPlace",
    "PlannedMemory",
    "format_bytes",
    "packed_place",
    "plan_draft_fit",
    "plan_fit",
    "planned_memory",
]


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryCheck:
    """The memory that a model needs and the memory that is available, in bytes.

    Attributes:
        info: The planned runner's description.
        available: Available memory before the weights are loaded.
        left_after_weights: Memory left after the weights are loaded.
        pool: The planned KV pool.
        states: The planned recurrent state slots, including rows for draft tokens.
        shortage: A message if memory limits the number of draft tokens, else "".
        refusal: The error that starting the engine would raise, or "" if the model fits.
        overhead: Other memory of the process, or None without `max_memory`.
        draft: Description of the planned runner of the draft model or MTP head, or None without
            either.
        draft_pool: The planned KV pool of the draft model or head.
    """

    info: RunnerInfo
    available: int
    left_after_weights: int
    pool: int
    states: int
    shortage: str
    refusal: str
    overhead: Overhead | None = None
    draft: RunnerInfo | None = None
    draft_pool: int = 0

    @property
    def draft_weights(self) -> int:
        """Size of the weights of the draft model or MTP head, or 0 without either."""
        return 0 if self.draft is None else self.draft.weight_bytes

    @property
    def needed(self) -> int:
        """Total size of weights, pools, recurrent state and the runner's KV copies."""
        pools = (2 if self.info.copies_kv else 1) * self.pool + self.draft_pool
        return self.info.weight_bytes + self.draft_weights + pools + self.states

    @property
    def pool_tokens(self) -> int:
        """Approximate number of tokens that the pool holds, or 0 without a KV cache."""
        spec = self.info.kv_spec
        return self.pool // spec.bytes_per_block * spec.block_size if spec.bytes_per_block else 0

    def check(self) -> None:
        """Check that the model fits in memory.

        Raises:
            CapacityError: The model does not fit.
        """
        if self.refusal:
            raise CapacityError(self.refusal)


def plan_fit(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    summary: WeightSummary,
    available: int,
    overhead: Overhead | None = None,
    draft: DraftPlan | None = None,
) -> MemoryCheck:
    """Compare the memory that weights and pool need with the available memory.

    On CUDA devices the weights are not checked, because their size is unknown before loading.

    Args:
        checkpoint: The model.
        config: Options of the engine.
        selected: The selected backend and runner.
        summary: Sizes of the model's weights.
        available: Available memory in bytes before the weights are loaded.
        overhead: Measured overhead if `max_memory` limits the process.
        draft: The draft model or MTP head, whose weights and pool are included.

    Raises:
        ConfigError: An option for recurrent state is set for a model without it.
    """
    own = planned_info(checkpoint, config, selected, summary)
    info = with_draft_model(own, None if draft is None else draft.info)
    check_options(config, info)
    is_known = not selected.backend.device.startswith("cuda")
    left = left_after_weights(available, info.weight_bytes) if is_known else available
    left = room_in_process(config, info.weight_bytes, left, overhead)
    refusal = ""
    pool = 0
    states = None
    try:
        if overhead is not None:
            packing = _packing_bytes(checkpoint, config, selected, own, draft)
            formats = functools.partial(_all_formats, checkpoint, draft)
            check_process(config, info, overhead, packing, formats)
        if is_known:
            check_weights_fit(info.weight_bytes, available)
        # Check the pool before the weights are packed, because packing is slow and a runner's
        # copies double the pool. The torch runner checks the pool after loading, when exact sizes
        # are known.
        if (selected.runner.weights or info.copies_kv) and info.stores_kv:
            plan_states(config, info, plan_num_blocks(config, info, left), left)
    except CapacityError as error:
        refusal = f"{error}{_draft_share(draft)}"
        if selected.runner.weights:
            _check_files(checkpoint, selected.runner.weights)
    if info.stores_kv:
        pool = planned_pool_bytes(config, info.kv_spec, info.max_context, left)
        with contextlib.suppress(CapacityError):  # `refusal` has the message already
            states = planned_states(config, info, left)
    state_room = 0 if states is None else state_bytes(info, states)
    shortage = drafts_shortage(config, info, states)
    draft_pool = 0
    if draft is not None:
        num_blocks = planned_blocks(config, info.kv_spec, info.max_context, left)
        draft_pool = pool_bytes(config, draft.info.kv_spec, num_blocks)
    return MemoryCheck(
        own,
        available,
        left,
        pool - draft_pool,
        state_room,
        shortage,
        refusal,
        overhead,
        None if draft is None else draft.info,
        draft_pool,
    )


class DraftFit(NamedTuple):
    """The memory check of a model with its drafter.

    Attributes:
        fit: The memory check.
        draft: The drafter, or None without one.
        dropped: Why the model's own MTP head is not used, or "".
    """

    fit: MemoryCheck
    draft: DraftPlan | None
    dropped: str = ""


def plan_draft_fit(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    summary: WeightSummary,
    available: int,
    draft: DraftPlan | None,
) -> DraftFit:
    """Check the memory of a model and its drafter.

    The MTP head in the model's own files is left out if it does not fit.

    The arguments are those of `plan_fit`.

    Raises:
        ConfigError: An option for recurrent state is set for a model without it, or `max_memory`
            for a runner whose buffer sizes are unknown.
    """
    optional = draft if draft is not None and draft.is_own_mtp_head else None
    # Measured first, because the kernels of the head take memory once they are loaded.
    alone = None if optional is None else measured_overhead(checkpoint, config, selected)
    overhead = measured_overhead(checkpoint, config, selected, draft)
    fit = plan_fit(checkpoint, config, selected, summary, available, overhead, draft)
    if optional is None or not fit.refusal:
        return DraftFit(fit, draft)
    without = plan_fit(checkpoint, config, selected, summary, available, alone)
    if without.refusal:
        return DraftFit(without, None)
    return DraftFit(
        without,
        None,
        "the multi-token prediction head is not used, because the model does not fit with it: "
        f"{fit.refusal}",
    )


def _draft_share(draft: DraftPlan | None) -> str:
    """Return the part of a draft model or MTP head, for the end of an error message."""
    if draft is None:
        return ""
    info = draft.info
    name, advice = "draft model", "; leave draft_model out, or choose a smaller one"
    if draft.is_mtp_head:
        name = "assistant" if info.borrows_kv else "multi-token prediction head"
        advice = "" if draft.is_own_mtp_head else "; leave draft_model out"
    return (
        f". The {name} takes {gb(info.weight_bytes)} of the weights and "
        f"{info.kv_spec.bytes_per_block} bytes of each block{advice}"
    )


def _all_formats(checkpoint: Checkpoint, draft: DraftPlan | None) -> Mapping[str, int]:
    """Return the size of all weights in bytes for each format of the model."""
    more = 0 if draft is None else draft.info.weight_bytes
    return {name: count + more for name, count in format_bytes(checkpoint).items()}


def _packing_bytes(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    info: RunnerInfo,
    draft: DraftPlan | None,
) -> int:
    """Return the memory that packing needs, including packed weights kept in memory.

    The weights of the draft model or head are packed after those of the model. The result is 0 if
    all weights are already packed.
    """
    threads = config.num_threads
    files = checkpoint.weight_files()
    places = [
        (packed_place(checkpoint, selected.runner.weights, files, threads), info.weight_bytes)
    ]
    if draft is not None:
        places.append((_draft_place(draft, threads), draft.info.weight_bytes))
    kept = needed = 0
    for place, num_bytes in places:
        if place.is_there:
            continue
        in_memory = num_bytes * (place.path is None or place.free < num_bytes)
        needed = max(needed, kept + in_memory + place.peak)
        kept += in_memory
    return needed


def _check_files(checkpoint: Checkpoint, weights: str) -> None:
    """Check that the weight files match the config.

    Without this check, a wrong size in the config would be reported as a lack of memory.

    Raises:
        ModelFormatError: The files contradict the config.
    """
    plan = checkpoint.plan(weights)
    with checkpoint.open_source() as source:
        check_tensors(plan, source, row_tables(checkpoint.spec))


class PlannedMemory(NamedTuple):
    """The memory that a model would use.

    Attributes:
        nbytes: Total size of weights, pools, recurrent state and the runner's copies, in bytes.
        device: The device that holds them.
        has_states: True for a hybrid or recurrent model.
    """

    nbytes: int
    device: str
    has_states: bool


def planned_memory(path_or_id: str | Path, config: EngineConfig) -> PlannedMemory:
    """Return the memory that a model would use if it were loaded now.

    A model on a hub is downloaded but not loaded. Errors are those of loading the model, except
    that a lack of memory is not an error. An MTP head is included if the model fits with it once
    other models of this process are unloaded.
    """
    checkpoint = open_checkpoint(find_model(path_or_id, config), config)
    selected, draft = select_with_draft(checkpoint, config)
    device = selected.backend.device
    available = available_on(device)
    summary = checkpoint.summary()
    fit, _, dropped = plan_draft_fit(checkpoint, config, selected, summary, available, draft)
    if dropped:
        room = available + process_rss()
        roomy = plan_draft_fit(checkpoint, config, selected, summary, room, draft)
        if not roomy.dropped:
            overhead = roomy.fit.overhead
            fit = plan_fit(checkpoint, config, selected, summary, available, overhead, draft)
    return PlannedMemory(fit.needed, device, bool(fit.info.kv_spec.states))


def format_bytes(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Return the size of the packed weights in bytes for each format the model supports."""
    found = {}
    for weights in ((STORED,) if checkpoint.is_quantized else ()) + WEIGHT_FORMATS:
        try:
            found[weights] = checkpoint.packed_bytes(weights)
        except KVBoostError:
            continue  # the runner selection reports the error
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPlace:
    """The location of packed weights and the cost of packing them.

    Attributes:
        path: The packed file, or its directory if the weight files have not been hashed. None if
            packed weights are kept only in memory (`pack_cache=False`).
        is_there: True if the weights are already packed.
        free: Free disk space at the location, in bytes.
        peak: Peak memory for packing in addition to the weights, in bytes.
    """

    path: Path | None
    is_there: bool
    free: int
    peak: int


def packed_place(
    checkpoint: Checkpoint, weights: str, files: Sequence[Path], num_threads: int | None = None
) -> PackedPlace:
    """Return the location of a model's packed weights in a format.

    Args:
        checkpoint: The model.
        weights: The weight format.
        files: The weight files. They are not read, so files that were never hashed count as not
            packed.
        num_threads: Number of threads for packing, or None for the default.
    """
    return _place(checkpoint, checkpoint.fingerprint, weights, files, num_threads)


def _draft_place(draft: DraftPlan, num_threads: int | None) -> PackedPlace:
    """Return the location of a draft model's or head's packed weights."""
    files = draft.checkpoint.weight_files()
    weights = draft.selected.runner.weights
    return _place(draft.checkpoint, draft.packed_fingerprint, weights, files, num_threads)


def _place(
    checkpoint: Checkpoint,
    fingerprint: Callable[[], str],
    weights: str,
    files: Sequence[Path],
    num_threads: int | None,
) -> PackedPlace:
    """Return the location of packed weights.

    Args:
        fingerprint: Function that returns the fingerprint that names them.
    """
    peak = packing_bytes(num_threads or default_num_threads())
    if checkpoint.cache_dir == NO_CACHE:
        return PackedPlace(None, False, 0, peak)
    known = are_remembered(files, cache_dir=checkpoint.cache_dir)
    path = packed_path(fingerprint() if known else "", weights, checkpoint.cache_dir)
    return PackedPlace(
        path if known else path.parent, known and path.is_file(), free_bytes(path.parent), peak
    )
