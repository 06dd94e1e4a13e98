"""The memory check before anything is packed or loaded, used by `doctor` and by the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.process import (
    Overhead,
    check_process,
    measured_overhead,
    room_in_process,
)
from kvboost_edge.engine.memory.report import (
    check_weights_fit,
    memory_beside,
    plan_num_blocks,
    planned_pool_bytes,
)
from kvboost_edge.engine.memory.selection import Selection, available_on, planned_info, select_path
from kvboost_edge.engine.memory.state_budget import (
    check_options,
    drafts_shortage,
    plan_states,
    planned_states,
    state_bytes,
)
from kvboost_edge.errors import CapacityError, KVBoostError
from kvboost_edge.host.cpu import default_num_threads
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.fingerprint import are_remembered
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.packed.file import free_bytes, packed_path
from kvboost_edge.models.packed.pack_plan import (
    STORED,
    WEIGHT_FORMATS,
    check_tensors,
    row_tables,
)
from kvboost_edge.models.packed.stream import packing_bytes
from kvboost_edge.models.weights.source import WeightSummary
from kvboost_edge.runners.base import RunnerInfo

__all__ = [
    "MemoryCheck",
    "PackedPlace",
    "PlannedMemory",
    "format_bytes",
    "packed_place",
    "plan_fit",
    "planned_memory",
]


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Bytes of memory.

    Attributes:
        info: what the runner will say of itself.
        available: memory that can be had before the weights are loaded; beside: what they leave of
            it.
        pool: of keys and values, as it will be made; states: of the slots beside it, and of rows
            for drafts.
        shortage: what is to be said where those leave room for fewer drafts than there would be; ""
            elsewhere.
        refusal: why the engine refuses to start, with the arithmetic; "" where it fits.
        overhead: of the process, in addition to all these; None without `max_memory`.
    """

    info: RunnerInfo
    available: int
    beside: int
    pool: int
    states: int
    shortage: str
    refusal: str
    overhead: Overhead | None = None

    @property
    def needed(self) -> int:
        """Weights, pool and states, and a runner's copies of what runs."""
        return self.info.weight_bytes + (2 if self.info.copies_kv else 1) * self.pool + self.states

    @property
    def pool_tokens(self) -> int:
        """Tokens that the pool holds, roughly; 0 where nothing is stored."""
        spec = self.info.kv_spec
        return self.pool // spec.bytes_per_block * spec.block_size if spec.bytes_per_block else 0

    def check(self) -> None:
        """CapacityError where it does not fit."""
        if self.refusal:
            raise CapacityError(self.refusal)


def plan_fit(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    summary: WeightSummary,
    available: int,
    overhead: Overhead | None = None,
) -> MemoryCheck:
    """Weights and pool against so much memory. The pool is judged ahead where weights are packed
    first, which takes long, and where the runner's copies take as much again; where torch loads the
    weights it is when it did, and knows exactly what it stores. What weights take on a CUDA device
    is not known ahead, and nothing is refused. overhead: measured where `max_memory` bounds the
    process.

    ConfigError for options that do not go with the model's states, or with its having none.
    """
    info = planned_info(checkpoint, config, selected, summary)
    check_options(config, info)
    is_known = not selected.backend.device.startswith("cuda")
    beside = memory_beside(available, info.weight_bytes) if is_known else available
    beside = room_in_process(config, info.weight_bytes, beside, overhead)
    refusal = ""
    pool = 0
    states = None
    try:
        if overhead is not None:
            packing = _packing_bytes(checkpoint, config, selected, info, summary)
            formats = functools.partial(format_bytes, checkpoint)
            check_process(config, info, overhead, packing, formats)
        if is_known:
            check_weights_fit(info.weight_bytes, available)
        if (selected.runner.weights or info.copies_kv) and info.stores_kv:
            plan_states(config, info, plan_num_blocks(config, info, beside), beside)
    except CapacityError as error:
        refusal = str(error)
        if selected.runner.weights:
            _check_files(checkpoint, selected.runner.weights)
    if info.stores_kv:
        pool = planned_pool_bytes(config, info.kv_spec, info.max_context, beside)
        with contextlib.suppress(CapacityError):  # of max_state_bytes, which is the refusal then
            states = planned_states(config, info, beside)
    state_room = 0 if states is None else state_bytes(info, states)
    shortage = drafts_shortage(config, info, states)
    return MemoryCheck(info, available, beside, pool, state_room, shortage, refusal, overhead)


def _packing_bytes(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    info: RunnerInfo,
    summary: WeightSummary,
) -> int:
    """Return the memory that packing takes, with the weights where they stay in memory; 0 where
    they are packed already.
    """
    weights = selected.runner.weights
    place = packed_place(checkpoint, weights, summary.files, config.num_threads)
    if place.is_there:
        return 0
    in_memory = place.path is None or place.free < info.weight_bytes
    return place.peak + info.weight_bytes * in_memory


def _check_files(checkpoint: Checkpoint, weights: str) -> None:
    """ModelFormatError where the files are not what the config says: a size that is wrong there
    reads as memory that lacks.
    """
    plan = checkpoint.plan(weights)
    with checkpoint.open_source() as source:
        check_tensors(plan, source, row_tables(checkpoint.spec))


class PlannedMemory(NamedTuple):
    """Bytes that weights, pool, states and a runner's copies of a model will take, the device
    where, and whether it keeps states.
    """

    nbytes: int
    device: str
    has_states: bool


def planned_memory(path_or_id: str | Path, config: EngineConfig) -> PlannedMemory:
    """What a model would take if it were loaded now; its files are looked at, and nothing is
    loaded. A hub's model is fetched. Raises what loading it would, but for memory that lacks.
    """
    path = locate_model(
        path_or_id,
        revision=config.revision,
        token=config.token,
        local_files_only=config.local_files_only,
    )
    cache_dir = None if config.pack_cache else NO_CACHE
    checkpoint = Checkpoint.open(path, cache_dir=cache_dir, rope_range=config.rope_range)
    selected = select_path(checkpoint, config)
    device = selected.backend.device
    overhead = measured_overhead(checkpoint, config, selected)
    summary = checkpoint.summary()
    fit = plan_fit(checkpoint, config, selected, summary, available_on(device), overhead)
    return PlannedMemory(fit.needed, device, bool(fit.info.kv_spec.states))


def format_bytes(checkpoint: Checkpoint) -> Mapping[str, int]:
    """Bytes of the packed weights by each format that the native runner can pack this model in."""
    found = {}
    for weights in ((STORED,) if checkpoint.is_quantized else ()) + WEIGHT_FORMATS:
        try:
            found[weights] = checkpoint.packed_bytes(weights)
        except KVBoostError:
            continue  # no format of this model, as the choice of the runner says
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class PackedPlace:
    """Where packed weights are kept, and what packing them takes.

    Attributes:
        path: of the file; None: in memory alone, because it was asked for.
        is_there: whether they are packed already.
        free: bytes of room on that disk.
        peak: bytes of memory at most that packing takes beside the weights themselves.
    """

    path: Path | None
    is_there: bool
    free: int
    peak: int


def packed_place(
    checkpoint: Checkpoint, weights: str, files: Sequence[Path], num_threads: int | None = None
) -> PackedPlace:
    """Of a model in a format; files: of its weights. They are not read: of files that nobody has
    read through yet nothing is packed.
    """
    peak = packing_bytes(num_threads or default_num_threads())
    if checkpoint.cache_dir == NO_CACHE:
        return PackedPlace(None, False, 0, peak)
    known = are_remembered(files, cache_dir=checkpoint.cache_dir)
    fingerprint = checkpoint.fingerprint() if known else ""
    path = packed_path(fingerprint, weights, checkpoint.cache_dir)
    return PackedPlace(
        path if known else path.parent, known and path.is_file(), free_bytes(path.parent), peak
    )
