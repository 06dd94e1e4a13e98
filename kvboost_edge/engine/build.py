"""Engine construction: check files, plan memory, load the runner and allocate the pool."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvboost_edge.backends.base import Backend
from kvboost_edge.backends.select import BackendChoice, choose_backend, make_backend
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.check import plan_draft_fit, planned_memory
from kvboost_edge.engine.memory.draft_plan import (
    DraftPlan,
    check_draft_files,
    draft_vocabulary_refusal,
    mtp_refusal,
    select_with_draft,
    with_draft_model,
)
from kvboost_edge.engine.memory.pool_size import num_open_blocks, plan_num_blocks
from kvboost_edge.engine.memory.process import (
    Overhead,
    check_process,
    history_bytes,
    measured_overhead,
    most_history_bytes,
    pass_bytes,
    room_in_process,
)
from kvboost_edge.engine.memory.report import MemoryReport
from kvboost_edge.engine.memory.selection import (
    Selection,
    available_on,
    bounded_context,
    find_model,
    open_checkpoint,
    refused_approximations,
)
from kvboost_edge.engine.memory.state_budget import check_options, drafts_shortage, plan_states
from kvboost_edge.engine.offload.tiering import check_tiers, open_tiers
from kvboost_edge.engine.request.sampling_defaults import (
    DEFAULT_SAMPLING,
    SamplingDefaults,
    sampling_defaults,
)
from kvboost_edge.engine.spec_decode.draft_model import DraftParts
from kvboost_edge.errors import (
    BackendUnavailable,
    ConfigError,
    DraftModelMismatch,
    ModelFormatError,
)
from kvboost_edge.host.memory import Region, give_back
from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kvcache.eviction.policy import TenantFloors
from kvboost_edge.kvcache.hashing import root_hash
from kvboost_edge.kvcache.manager import KVCacheManager
from kvboost_edge.kvcache.recurrent.snapshots import StateSizes
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import check_model_compatibility, is_bidirectional
from kvboost_edge.models.config.json_readers import generation_defaults
from kvboost_edge.models.config.pooling import UNSAID, Pooling
from kvboost_edge.models.fingerprint import fingerprint_of_module
from kvboost_edge.models.locate import model_name
from kvboost_edge.models.packed.weight_file import Progress
from kvboost_edge.models.weights.dense_folders import Matrices
from kvboost_edge.reuse.chunking import chunk_options
from kvboost_edge.runners.base import LoadOptions, Runner, RunnerInfo
from kvboost_edge.runners.choice import load_runner, plan_of
from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.tokenizer_cache import kept_tokenizer
from kvboost_edge.text.vocabulary_difference import vocabulary_difference
from kvboost_edge.tiers.base import Tier

__all__ = [
    "EngineParts",
    "build_from_model",
    "build_from_path",
    "check_draft_vocabulary",
    "draft_model_refusal",
    "load_tokenizer",
    "refused_options",
]

_LOG = logging.getLogger(__name__)
_LOADING_OPTIONS = (
    *("dtype", "revision", "token", "local_files_only", "pack_cache", "rope_range"),
    *("draft_model", "draft_vocabulary", "mtp", "arithmetic", "prefill"),
)
_POOL_SIZES = ("max_cache_bytes", "num_blocks", "max_chunks")
_TORCH_REASON = (
    "mode='chunk_kv_reuse' of a loaded model needs it; backend='cpu' is faster without that mode"
)
_CUTS = ("chunk_boundary_window", "overlap_k", "sink_tokens")
_DEFAULTS = EngineConfig()


@dataclasses.dataclass(frozen=True, slots=True)
class EngineParts:
    """The components that an engine is built from.

    Attributes:
        root: root of the engine's prefix hashes of prompts with exact prefill.
        identity: hash of the model, its numerics and the KV format. All tenants share it.
        memory_report: memory use by owner, such as weights and pool.
        backend_reason: why this backend was chosen.
        max_num_seqs: maximum number of sequences that run at the same time.
        names: names of the model in its path and files, some of them empty.
        tiers: offload tiers, fastest first.
        pooling: pooling of an embedding model.
        dense: matrices that an embedding model applies after pooling.
        suppressed: token ids that are never generated.
        sampling: sampling values for requests that do not set their own.
        history_bytes: byte limit of the draft history, or None for the default.
        drafter: draft model or MTP head, or None without either.
    """

    runner: Runner
    backend: Backend
    manager: KVCacheManager
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    root: bytes
    identity: bytes
    memory_report: MemoryReport
    backend_reason: str
    max_num_seqs: int
    names: tuple[str, ...] = ()
    tiers: tuple[Tier, ...] = ()
    pooling: Pooling = UNSAID
    dense: Matrices = ()
    suppressed: tuple[int, ...] = ()
    sampling: SamplingDefaults = DEFAULT_SAMPLING
    history_bytes: int | None = None
    drafter: DraftParts | None = None


def build_from_path(
    path_or_id: str | Path, config: EngineConfig, progress: Progress | None = None
) -> EngineParts:
    """Load a model directory, a GGUF file, a hub id or the bundled model.

    All options and files are checked before the weights are loaded.

    Args:
        progress: called with (bytes done, total bytes) while weights are packed. Packing runs once
            per model and weight format.
    """
    check_tiers(config)
    chunk_options(config)
    checkpoint = open_checkpoint(find_model(path_or_id, config), config)
    # ONNX models skip this check. Their graph describes the model, and the runners report
    # unsupported operators.
    if checkpoint.onnx_refusal is None:
        check_model_compatibility(checkpoint.config, strict=config.strict)
    pooling = checkpoint.pooling
    summary = checkpoint.summary()
    if is_bidirectional(checkpoint.config):
        _check_bidirectional(checkpoint, config)
    dense = checkpoint.dense()
    selected, draft = select_with_draft(checkpoint, config)
    device = selected.backend.device
    pool_bytes = None
    # Load the tokenizer before measuring, so its memory counts as overhead.
    tokenizer = load_tokenizer(checkpoint)
    if draft is not None and not draft.is_mtp_head:
        check_draft_vocabulary(tokenizer, draft)
    if device.startswith("cuda"):
        overhead = measured_overhead(checkpoint, config, selected, draft)
    else:
        available = available_on(device)
        fit, draft, dropped = plan_draft_fit(
            checkpoint, config, selected, summary, available, draft
        )
        fit.check()
        if dropped:
            _LOG.warning("%s", dropped)
        overhead = fit.overhead
        pool_bytes = fit.left_after_weights
    defaults = checkpoint.generation(tokenizer_eos=tokenizer.eos_token_id)
    fingerprint = checkpoint.fingerprint()
    runner = _load_runner(checkpoint, config, selected, progress)
    runner.info = dataclasses.replace(runner.info, num_params=summary.num_params)
    draft_runner = None
    draft_fingerprint = ""
    if draft is not None:
        with _closed_on_error(runner):
            draft_fingerprint = draft.fingerprint()
            draft_runner = _load_drafter(draft, runner, progress)
    elif refusal := mtp_refusal(checkpoint, selected):
        _LOG.warning("the multi-token prediction head is not used: %s", refusal)
    eos = frozenset(defaults.eos_token_ids)
    parts = _assemble(
        config,
        selected.backend,
        runner,
        tokenizer,
        eos,
        fingerprint,
        name=model_name(checkpoint.path),
        budget=_MemoryBudget(pool_bytes, overhead, pass_bytes(checkpoint, config, selected, draft)),
        draft_runner=draft_runner,
        draft_fingerprint=draft_fingerprint,
    )
    return dataclasses.replace(
        parts,
        names=(model_name(checkpoint.path), checkpoint.declared_name),
        pooling=pooling,
        dense=dense,
        suppressed=defaults.suppressed_token_ids,
        sampling=sampling_defaults(defaults.sampling, config),
    )


def _check_bidirectional(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Check the files and options of a bidirectional model.

    Raises:
        ModelFormatError: the model's files do not name a pooling method.
        ConfigError: an option for cached KV is set, but this model caches none.
    """
    if not checkpoint.pooling.source:
        raise ModelFormatError(
            f"{checkpoint.path}: the model computes embeddings, but its files do not name the "
            "pooling method; add modules.json and 1_Pooling/config.json, or for a GGUF file, the "
            "key pooling_type"
        )
    for name in ("max_cache_bytes", "disk_cache_dir", "redis_url"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} has no effect: the model is bidirectional, and its KV is not cached; "
                "remove the option"
            )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Load a model's tokenizer from its directory or from GGUF metadata.

    A tokenizer built from GGUF metadata is cached in the checkpoint's cache directory.
    """
    if not checkpoint.is_gguf:
        return Tokenizer.from_dir(checkpoint.path)
    name = checkpoint.path.name

    def build() -> Tokenizer:
        return gguf_tokenizer(checkpoint.gguf_metadata() or {}, name=name)

    return kept_tokenizer(
        checkpoint.fingerprint(), build, name=name, cache_dir=checkpoint.cache_dir
    )


def refused_options(path_or_id: str | Path, config: EngineConfig) -> dict[str, str]:
    """Return why a model cannot have some of the config's options, by the options' names.

    Each option is checked without the refused ones and without those that follow: approximations,
    the draft model, its vocabulary, and the memory for recurrent state. Nothing is loaded.

    Raises:
        KVBoostError: The model cannot be opened, or no model can have these options.
    """
    rest = dataclasses.replace(config, draft_vocabulary=None, max_state_bytes=None)
    refused = refused_approximations(path_or_id, rest)
    exact: dict[str, Any] = dict.fromkeys(refused, "exact")
    rest = dataclasses.replace(rest, **exact)
    if reason := draft_model_refusal(path_or_id, rest):
        refused["draft_model"] = reason
        if rest.draft_weights != _DEFAULTS.draft_weights:
            refused["draft_weights"] = "it has no effect without draft_model"
        rest = dataclasses.replace(rest, draft_model=None, draft_weights=_DEFAULTS.draft_weights)
    if config.draft_vocabulary is not None:
        if reason := draft_vocabulary_refusal(path_or_id, rest):
            refused["draft_vocabulary"] = reason
        else:
            rest = dataclasses.replace(rest, draft_vocabulary=config.draft_vocabulary)
    if config.max_state_bytes is not None and not planned_memory(path_or_id, rest).has_states:
        refused["max_state_bytes"] = "the model has no recurrent state"
    return refused


def draft_model_refusal(path_or_id: str | Path, config: EngineConfig) -> str:
    """Return why a model cannot have the config's draft model, or "" if it can or there is none.

    The models are located and checked, but not loaded.

    Raises:
        KVBoostError: The model or the draft model cannot be opened, or the draft model is not
            supported.
    """
    if config.draft_model is None:
        return ""
    check_draft_files(config)
    checkpoint = open_checkpoint(find_model(path_or_id, config), config)
    try:
        _, draft = select_with_draft(checkpoint, config)
        assert draft is not None  # the config names a draft model
        if draft.checkpoint.path == checkpoint.path:
            return "it is the draft model itself"
        if not draft.is_mtp_head:
            check_draft_vocabulary(load_tokenizer(checkpoint), draft)
    except DraftModelMismatch as error:
        return str(error)
    return ""


def check_draft_vocabulary(tokenizer: Tokenizer, draft: DraftPlan) -> None:
    """Check that a draft model has the vocabulary of the model with this tokenizer.

    Raises:
        DraftModelMismatch: The vocabularies differ. The message names the first difference.
    """
    own = load_tokenizer(draft.checkpoint)
    # Two files in different folders may have the same name.
    if own.name == tokenizer.name:
        own.name = f"the draft model's {own.name}"
    if difference := vocabulary_difference(tokenizer, own):
        raise DraftModelMismatch(
            f"draft_model={str(draft.checkpoint.path)!r} is refused, because the vocabularies "
            f"differ: {difference}; give a draft model of the same family"
        )


def _load_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    progress: Progress | None,
    short_vocabulary: int = 0,
) -> Runner:
    choice = selected.runner
    # Warn if the engine fell back to a slower runner that the user did not request.
    _LOG.log(
        logging.INFO if choice.wanted else logging.WARNING,
        "runner %s: %s",
        choice.name,
        choice.reason,
    )
    _require_packages(choice.name, choice.reason, checkpoint.config)
    options = _load_options(config, selected, progress, short_vocabulary)
    return load_runner(choice.name, checkpoint, options)


def _load_options(
    config: EngineConfig,
    selected: Selection,
    progress: Progress | None,
    short_vocabulary: int = 0,
) -> LoadOptions:
    return LoadOptions(
        weights=selected.runner.weights,
        dtype=config.dtype,
        device=selected.backend.device,
        num_threads=config.num_threads or default_num_threads(),
        block_size=config.block_size,
        kv_bits=config.kv_bits,
        progress=progress,
        short_vocabulary=short_vocabulary,
        arithmetic=config.arithmetic,
        sparse=config.prefill != "exact",
    )


def _load_drafter(draft: DraftPlan, runner: Runner, progress: Progress | None) -> Runner:
    """Load a draft model, or the MTP head or assistant of the model that `runner` runs."""
    short = draft.info.short_vocabulary
    if draft.head is None:
        return _load_runner(draft.checkpoint, draft.config, draft.selected, progress, short)
    from kvboost_edge.runners.native.mtp_head import load_mtp_head
    from kvboost_edge.runners.native.runner import NativeRunner

    assert isinstance(runner, NativeRunner)  # see `select_with_draft`
    options = _load_options(draft.config, draft.selected, progress, short)
    return load_mtp_head(draft.head, runner, options)


def build_from_model(model: Any, tokenizer: Any, config: EngineConfig) -> EngineParts:
    """Wrap a loaded transformers model and its tokenizer.

    The model keeps its device and dtype. If `num_threads` is None, torch's thread count is left
    unchanged.

    Raises:
        ConfigError: an option applies only when the engine loads the model itself.
    """
    chunk_options(config)
    for name in _LOADING_OPTIONS:
        if getattr(config, name) != getattr(_DEFAULTS, name):
            raise ConfigError(
                f"option {name!r} does not apply to a model that is already loaded; remove it "
                "or use from_pretrained"
            )
    _require_packages("torch", "a loaded transformers model was given", {})
    import torch

    from kvboost_edge.runners.torch.runner import TorchRunner

    if config.max_memory is not None:
        raise ConfigError(
            f"max_memory={config.max_memory} is not supported for a loaded transformers model, "
            "because the torch runner's buffer sizes are unknown; use from_pretrained(path), or "
            "limit the pool with max_cache_bytes"
        )
    if config.runner in ("native", "onnx") or config.weights != "auto":
        raise ConfigError(
            f"runner={config.runner!r} and weights={config.weights!r} do not apply to a loaded "
            "transformers model, which runs on the torch runner with its own weights; use "
            "from_pretrained(path)"
        )
    if config.kv_bits not in ((16, 16), (8, 8)):
        raise ConfigError(
            f"kv_cache_bits={config.kv_cache_bits!r} is not supported for a loaded transformers "
            "model; use kv_cache_bits=16 or 8, or from_pretrained(path, "
            f"kv_cache_bits={config.kv_cache_bits!r})"
        )
    check_model_compatibility(model.config.to_dict(), strict=config.strict)
    own = str(model.device)
    choice = choose_backend(config.backend, config.device or own)
    text = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_transformers(tokenizer)
    generation = getattr(model, "generation_config", None)
    # Use only values that differ from transformers' defaults. Those were set for this model.
    chosen = {} if generation is None else generation.to_diff_dict()
    defaults = generation_defaults(model.config.to_dict(), chosen, tokenizer_eos=text.eos_token_id)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    runner = TorchRunner(model, block_size=config.block_size, kv_bits=config.kv_bits)
    if config.backend == "auto" and choice.name == "cpu" and runner.turning_refusal is None:
        choice = BackendChoice("torch", choice.device, _TORCH_REASON)
    fingerprint = fingerprint_of_module(model, tokenizer)
    eos_ids = frozenset(defaults.eos_token_ids)
    parts = _assemble(config, choice, runner, text, eos_ids, fingerprint, budget=_MemoryBudget())
    return dataclasses.replace(
        parts,
        names=(str(getattr(model.config, "_name_or_path", "")),),
        suppressed=defaults.suppressed_token_ids,
        sampling=sampling_defaults(defaults.sampling, config),
    )


def _warn_of_threads(num_threads: int | None) -> None:
    """Warn if `num_threads` exceeds the number of usable CPUs."""
    usable = default_num_threads()
    if num_threads is not None and num_threads > usable:
        _LOG.warning(
            "num_threads=%d is more than the %d CPU%s that this process may use; the extra "
            "threads only wait",
            num_threads,
            usable,
            "" if usable == 1 else "s",
        )


def _bounded(info: RunnerInfo, config: EngineConfig) -> RunnerInfo:
    """Limit the context length in `info` to `max_model_len`."""
    if config.max_model_len is not None and config.max_model_len > info.max_context:
        _LOG.warning(
            "max_model_len=%d (--ctx-size) exceeds the model's context of %d tokens; the model's "
            "context is used",
            config.max_model_len,
            info.max_context,
        )
    return dataclasses.replace(info, max_context=bounded_context(info.max_context, config))


class _MemoryBudget(NamedTuple):
    """Memory figures measured before the weights are loaded.

    Attributes:
        pool_bytes: bytes planned for the block pool, or None if no plan was made.
        overhead: measured overhead of the process, or None without `max_memory`.
        buffer_bytes: bytes of buffers that the largest forward pass needs, or 0 if unknown.
    """

    pool_bytes: int | None = None
    overhead: Overhead | None = None
    buffer_bytes: int = 0


class _PoolPlan(NamedTuple):
    """Planned sizes of the block pool.

    Attributes:
        num_blocks: number of blocks in the pool.
        state_sizes: slots for recurrent state, or None for a model without recurrent state.
        max_num_seqs: maximum number of sequences that run at the same time.
        history_bytes: byte limit of the draft history, or None for the default.
    """

    num_blocks: int
    state_sizes: StateSizes | None
    max_num_seqs: int
    history_bytes: int | None


def _assemble(
    config: EngineConfig,
    choice: BackendChoice,
    runner: Runner,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    fingerprint: str,
    *,
    name: str = "",
    budget: _MemoryBudget,
    draft_runner: Runner | None = None,
    draft_fingerprint: str = "",
) -> EngineParts:
    """Build the engine's components around a loaded runner.

    Args:
        fingerprint: fingerprint of the model from `Checkpoint.fingerprint`.
        name: display name of the model.
        draft_runner: runner of the draft model.
        draft_fingerprint: fingerprint of the draft model.
    """
    runner.info = info = _bounded(runner.info, config)
    _warn_of_threads(config.num_threads)
    with _closed_on_error(runner, draft_runner):
        plan = _plan_pool(config, choice, info, budget, draft_runner)
        backend = _make_backend(config, choice, info, plan)
        with _closed_on_error(backend):
            runner.bind(backend)
            drafter = _make_drafter(config, choice, draft_runner, draft_fingerprint, backend)
    draft_backend = drafter.backend if drafter is not None and drafter.has_kv else None
    _log_choice(choice, runner, backend, plan.num_blocks, plan.max_num_seqs)
    _log_sizes(config, plan.num_blocks)
    _log_cuts(config)
    if shortage := drafts_shortage(config, info, plan.state_sizes):
        _LOG.warning("%s", shortage)
    kv_format = _kv_format(config, runner, backend)
    with _closed_on_error(runner, backend, draft_runner, draft_backend):
        tiers = open_tiers(config, fingerprint, kv_format, info.architecture, name)
    return EngineParts(
        runner=runner,
        backend=backend,
        manager=_make_manager(config, info, plan),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        # The fingerprint covers the RoPE settings in the model's config. `kv_format` covers the
        # `rope_range` option.
        root=root_hash(model_fingerprint=fingerprint, kv_format=kv_format, tenant=config.tenant),
        identity=root_hash(model_fingerprint=fingerprint, kv_format=kv_format),
        memory_report=_make_memory_report(
            config, runner, backend, plan, budget.buffer_bytes, drafter
        ),
        backend_reason=choice.reason,
        max_num_seqs=plan.max_num_seqs,
        tiers=tiers,
        history_bytes=plan.history_bytes,
        drafter=drafter,
    )


def _plan_pool(
    config: EngineConfig,
    choice: BackendChoice,
    info: RunnerInfo,
    budget: _MemoryBudget,
    draft_runner: Runner | None,
) -> _PoolPlan:
    """Plan the sizes of the block pool, which a draft model's pool shares the memory with.

    Raises:
        CapacityError: the pool does not fit in memory.
    """
    weights = [info.weight_region]
    if draft_runner is not None:
        weights.append(draft_runner.info.weight_region)
        info = with_draft_model(info, draft_runner.info)
    available = available_on(choice.device)
    if budget.pool_bytes is not None:
        available = min(budget.pool_bytes, available)
    overhead = budget.overhead
    if overhead is not None:
        # Return memory freed after packing to the OS. Otherwise it counts as overhead.
        give_back()
        overhead = overhead.measured_again(weights)
        check_process(config, info, overhead)
        available = room_in_process(config, info.weight_bytes, available, overhead)
        _log_process(config, info, overhead)
    num_blocks = plan_num_blocks(config, info, available)
    check_options(config, info)
    state_sizes, max_num_seqs = plan_states(config, info, num_blocks, available)
    history = history_bytes(config, info.weight_bytes, overhead)
    return _PoolPlan(num_blocks, state_sizes, max_num_seqs, history)


def _make_backend(
    config: EngineConfig, choice: BackendChoice, info: RunnerInfo, plan: _PoolPlan
) -> Backend:
    sizes = plan.state_sizes
    return make_backend(
        choice,
        info.kv_spec,
        plan.num_blocks,
        config.num_threads,
        num_open=num_open_blocks(config, plan.num_blocks, config.block_size),
        num_state_slots=0 if sizes is None else sizes.num_slots,
        num_draft_rows=0 if sizes is None else sizes.num_draft_rows,
    )


def _make_drafter(
    config: EngineConfig,
    choice: BackendChoice,
    runner: Runner | None,
    fingerprint: str,
    pool: Backend,
) -> DraftParts | None:
    """Allocate the draft model's pool, which has the block ids of the engine's pool.

    An assistant has no pool, and reads the engine's.
    """
    if runner is None:
        return None
    info = runner.info
    runner.info = dataclasses.replace(info, max_context=bounded_context(info.max_context, config))
    backend = pool
    num_open = num_open_blocks(config, pool.num_blocks, config.block_size)
    if not info.borrows_kv:
        backend = make_backend(
            choice, info.kv_spec, pool.num_blocks, config.num_threads, num_open=num_open
        )
    with _closed_on_error(None if info.borrows_kv else backend):
        runner.bind(backend)
    kv_format = _kv_format(config, runner, backend)
    digest = root_hash(model_fingerprint=fingerprint, kv_format=kv_format)
    drafter = DraftParts(runner, backend, digest, num_open)
    kind = "multi-token prediction head" if info.joins_hidden_states else "draft model"
    _LOG.info(
        "%s: %s weights, %.1f MB, KV pool %.1f MB, context of %d tokens",
        "assistant" if info.borrows_kv else kind,
        info.dtype,
        info.weight_bytes / 1e6,
        drafter.pool_bytes / 1e6,
        runner.info.max_context,
    )
    return drafter


def _make_manager(config: EngineConfig, info: RunnerInfo, plan: _PoolPlan) -> KVCacheManager:
    return KVCacheManager(
        plan.num_blocks,
        config.block_size,
        whole_blocks=info.kv_spec.is_quantized,
        policy=functools.partial(TenantFloors, window=config.recency_blocks),
        max_pinned_blocks=config.max_pinned_blocks,
        state_sizes=plan.state_sizes,
    )


def _make_memory_report(
    config: EngineConfig,
    runner: Runner,
    backend: Backend,
    plan: _PoolPlan,
    buffer_bytes: int,
    drafter: DraftParts | None,
) -> MemoryReport:
    return MemoryReport(
        runner.info.weight_bytes,
        backend.pool_bytes,
        lambda: _regions(runner, backend, drafter),
        lambda: runner.copied_bytes,
        0 if backend.states is None else backend.states.nbytes,
        buffer_bytes + most_history_bytes(config, plan.history_bytes) if buffer_bytes else 0,
        0 if drafter is None else drafter.runner.info.weight_bytes,
        0 if drafter is None else drafter.pool_bytes,
    )


def _log_process(config: EngineConfig, info: RunnerInfo, overhead: Overhead) -> None:
    """Log how `max_memory` is divided between weights, overhead, buffers and the pool."""
    _LOG.info(
        "max_memory %.1f MB: weights %.1f MB, measured overhead %.1f MB, buffers %.1f MB; the rest "
        "is for the pool, recurrent state and draft history",
        (config.max_memory or 0) / 1e6,
        info.weight_bytes / 1e6,
        overhead.resident / 1e6,
        overhead.buffers / 1e6,
    )


def _log_choice(
    choice: BackendChoice, runner: Runner, backend: Backend, num_blocks: int, max_num_seqs: int
) -> None:
    """Log the runner and backend that serve the model, and the pool size."""
    info = runner.info
    # Warn if the engine fell back to a slower backend that the user did not request.
    _LOG.log(
        logging.INFO if choice.wanted else logging.WARNING,
        "runner %s (%s), backend %s on %s (%s), pool of %d blocks, %.1f MB, up to %d sequences "
        "at a time",
        info.name,
        info.dtype,
        backend.name,
        choice.device,
        choice.reason,
        num_blocks,
        backend.pool_bytes / 1e6,
        max_num_seqs,
    )


def _log_sizes(config: EngineConfig, num_blocks: int) -> None:
    """Log the resulting pool size if several size options are set."""
    sizes = {name: getattr(config, name) for name in _POOL_SIZES}
    given = [f"{name}={value}" for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        _LOG.info(
            "%s are set; the pool has the smallest of these sizes, %d blocks of %d tokens",
            " and ".join(given),
            num_blocks,
            config.block_size,
        )


def _log_cuts(config: EngineConfig) -> None:
    """Warn about chunking options, which do not apply to prompts."""
    values = {name: getattr(config, name) for name in _CUTS}
    given = [f"{name}={value}" for name, value in values.items() if value]
    if given:
        _LOG.warning(
            "%s: applies only to engine.warm(documents=...); prompts are not split and are cached "
            "in blocks of %d tokens",
            ", ".join(given),
            config.block_size,
        )


def _kv_format(config: EngineConfig, runner: Runner, backend: Backend) -> str:
    """Return an identifier of the stored KV's format.

    KV stored under equal identifiers is bit-identical for the same tokens and the same prefill,
    see `shared_root`.
    """
    # KV from another version or other kernel variants is not bit-identical, so the identifier
    # includes both.
    info = runner.info
    kv = info.kv_spec
    found = f"{kv.dtype}/{kv.bits[0]},{kv.bits[1]}/{config.block_size}"
    found += f"/{info.name}-{info.dtype}/{backend.name}"
    found += f"/{info.numerics}/{info.exact_path}/{backend.describe().attention_path}"
    if kv.states:
        found += f"/states {kv.bytes_per_state}"
    if config.rope_range != "short":
        found += f"/rope {config.rope_range}"
    return "/".join((found, *config.approximations_of("exact")))


def _regions(
    runner: Runner, backend: Backend, drafter: DraftParts | None = None
) -> Sequence[Region]:
    """Return the memory regions of weights, pools and recurrent state.

    The tuple is empty if the weights' or the pool's region is unknown.
    """
    weights = runner.info.weight_region
    pool = backend.describe().pool_regions
    states = () if backend.states is None else (backend.states.region,)
    drafting: Sequence[Region] = ()
    if drafter is not None and drafter.has_kv:
        drafting = _regions(drafter.runner, drafter.backend)
    elif drafter is not None and drafter.runner.info.weight_region.nbytes:
        drafting = (drafter.runner.info.weight_region,)
    is_known = weights.nbytes and pool and (drafter is None or drafting)
    return (weights, *pool, *states, *drafting) if is_known else ()


def _require_packages(name: str, reason: str, model_config: Mapping[str, Any]) -> None:
    """Check that the packages that a runner needs are installed.

    Raises:
        BackendUnavailable: a package is missing.
    """
    missing = plan_of(name).missing_package(model_config)
    if missing is not None:
        raise BackendUnavailable(f"runner {name!r} ({reason}) {missing}")


@contextlib.contextmanager
def _closed_on_error(*parts: Runner | Backend | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for part in parts:
            if part is not None:
                try:
                    part.close()
                except Exception as error:
                    _LOG.warning("%s cannot be closed: %r", type(part).__name__, error)
        raise
