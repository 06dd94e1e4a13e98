"""The `kvboost-edge doctor` command, which reports the hardware and how a model would run on it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kvboost_edge.backends.select import choose_backend
from kvboost_edge.cli.console import open_console
from kvboost_edge.cli.inspect import installed_route, mtp_report, report_table
from kvboost_edge.cli.session import found_model
from kvboost_edge.compat.flash import get_flash_attn_tier
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.build import check_draft_vocabulary, load_tokenizer
from kvboost_edge.engine.memory.check import (
    DraftFit,
    MemoryCheck,
    format_bytes,
    packed_place,
    plan_draft_fit,
)
from kvboost_edge.engine.memory.draft_plan import DraftPlan, select_with_draft
from kvboost_edge.engine.memory.pool_size import gb
from kvboost_edge.engine.memory.selection import (
    Selection,
    available_on,
    open_checkpoint,
)
from kvboost_edge.engine.memory.state_budget import asks_for_drafts
from kvboost_edge.engine.non_prefix_reuse import SPARSE_PREFILL
from kvboost_edge.engine.spec_decode.pass_costs import PassCosts
from kvboost_edge.errors import ConfigError, KVBoostError
from kvboost_edge.host.bandwidth import measure_read_bandwidth
from kvboost_edge.host.cgroup import memory_limit
from kvboost_edge.host.memory import available_bytes, process_rss, total_bytes
from kvboost_edge.host.processor import default_num_threads, describe_cpu
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.packed.pack_plan import plan_label
from kvboost_edge.models.weights.weight_source import WeightSummary
from kvboost_edge.runners.choice import RUNNERS, plan_of

__all__ = ["doctor_report", "run_doctor"]

_PACKAGES = (
    "kvboost-edge",
    "numpy",
    "numba",
    "llvmlite",
    "safetensors",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "torch",
    "transformers",
    "onnxruntime",
    "llguidance",
    "kvboost-edge-cuda",
)

# Measured: the HTTP server takes 24 MB. The rest is the variation between starts.
_SERVE_EXTRA_BYTES = 32_000_000

_ACCEPTED = (0.6, 0.75, 0.9)  # shares of draft tokens for which the speed is estimated
_MOST_DRAFTS = 8  # tokens that a draft model drafts for a step


def run_doctor(model: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Print all sections. Exits with code 1 if the model does not run or does not fit."""
    config = EngineConfig.from_options(**options)
    report = doctor_report(model, options, config)
    if as_json:
        print(json.dumps(report, ensure_ascii=False, default=str))
    else:
        console = open_console()
        for section, figures in report.items():
            console.print(report_table(figures, section))
    if not report[f"Model {model}"].get("fits"):
        raise typer.Exit(1)


def doctor_report(
    model: str, options: dict[str, Any], config: EngineConfig
) -> dict[str, dict[str, Any]]:
    """Return all sections: processor, memory, accelerator, versions and the route of `model`."""
    # This comes first, because other sections may import torch, which an engine's process would not
    # contain.
    path = _model(model, options, config)
    return {
        "Processor": _processor(),
        "Memory": _memory(),
        "Accelerator": _accelerator(),
        "Versions": _versions(),
        f"Model {model}": path,
    }


def _processor() -> dict[str, Any]:
    cpu = describe_cpu()
    return {
        "model": cpu.model,
        "architecture": cpu.arch,
        "instruction_set": cpu.isa,
        "kernel_path": _kernel_path(),
        "attention_path": _attention_path(),
        "kernel_library": _kernel_library(),
        "amx": _amx(),
        "cores": (
            f"{cpu.physical} physical, {cpu.logical} logical, {cpu.affinity} usable by this process"
        ),
        "cgroup_quota": "none" if cpu.quota is None else f"{cpu.quota:g} CPUs",
        "default_threads": default_num_threads(),
        "threading_layer": _threading_layer(),
    }


def _kernel_path() -> str:
    """Return which variant of the linear kernels is used. NUMBA_CPU_FEATURES may disable
    instructions.
    """
    from kvboost_edge.kernels.linear.amx_choice import linear_path

    return linear_path()


def _kernel_library() -> str:
    """Return which kernel library is used, or why kernels are compiled on this machine."""
    from kvboost_edge.kernels.library import library_choice

    choice = library_choice()
    return choice.reason if choice.library is not None else f"none: {choice.reason}"


def _attention_path() -> str:
    from kvboost_edge.backends.cpu import attention_path

    coded, plain = (attention_path(is_quantized=quantized) for quantized in (True, False))
    return f"{coded} on quantized blocks, {plain} on others"


def _threading_layer() -> str:
    """Return the threading layer. The kernels use this project's threads and not Numba's."""
    from kvboost_edge.backends.cpu import THREADING_LAYER

    return f"{THREADING_LAYER}: own threads, needs neither OpenMP (libgomp) nor TBB"


def _amx() -> str:
    from kvboost_edge.kernels.linear.amx_choice import amx_choice

    choice = amx_choice()
    return f"{'used' if choice.used else 'not used'}: {choice.reason}"


def _memory() -> dict[str, Any]:
    group = memory_limit()
    threads = default_num_threads()
    return {
        "total_bytes": total_bytes(),
        "available_bytes": available_bytes(),
        "read_bandwidth": (
            f"{measure_read_bandwidth(threads) / 1e9:.1f} GB/s with {threads} threads, measured now"
        ),
        "this_process_bytes": process_rss(),
        "cgroup": "no limit"
        if group is None
        else f"{group.limit / 1e6:,.0f} MB, {group.used / 1e6:,.0f} MB used",
    }


def _accelerator() -> dict[str, Any]:
    """Describe the device on which the torch runner would compute attention."""
    choice = choose_backend()
    return {
        "backend": choice.name if choice.name != "cpu" else "none",
        "device": choice.device,
        "reason": choice.reason,
        "flash_attention": get_flash_attn_tier(),
    }


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _model(model: str, options: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    try:
        checkpoint = open_checkpoint(found_model(model, options), config)
        found = installed_route(checkpoint, config)
        return {
            **found,
            "chunk_reuse": _chunk_reuse(checkpoint, config, found),
            **_memory_of(checkpoint, config, found),
            **mtp_report(checkpoint, config, found),
        }
    except KVBoostError as error:
        return {"problem": str(error)}


def _chunk_reuse(checkpoint: Checkpoint, config: EngineConfig, found: Mapping[str, Any]) -> str:
    """Return whether chunk_kv_reuse mode would be accepted, as far as known before loading."""
    if found["runner"] not in RUNNERS:
        return "no: no runner supports this model"
    plan = plan_of(found["runner"])
    refusal = plan.moved_keys_refusal(config, checkpoint.config, found["backend"])
    if config.prefill != "exact":
        refusal = SPARSE_PREFILL
    if refusal is not None:
        return f"no: {refusal}"
    if config.reuse_gate == "off":
        return "yes, untested: reuse_gate='off'"
    return "yes, unless the model fails the quality test of `kvboost-edge reuse-check`"


def _memory_of(
    checkpoint: Checkpoint, config: EngineConfig, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Report whether the model fits, by the engine's estimate, without loading the model."""
    if found["runner"] not in RUNNERS:
        return {"fits": False, "fit_reason": found["runner_reason"]}
    summary = checkpoint.summary()
    try:
        selected, draft = _drafted(checkpoint, config)
    except ConfigError as error:
        return {"fits": False, "fit_reason": str(error)}
    fit, draft, dropped = _fit(checkpoint, config, selected, summary, draft)
    overhead = fit.overhead
    kv = fit.info.kv_spec
    weights = selected.runner.weights
    sizes: dict[str, Any] = {
        "file_bytes": checkpoint.file_bytes,
        "weight_bytes": fit.info.weight_bytes,
        "bits_per_weight": round(8 * fit.info.weight_bytes / summary.num_params, 2),
        "pool_bytes": fit.pool,
        "pool_tokens": fit.pool_tokens,
        "state_bytes": fit.states,
        "context": fit.info.max_context,
        "kv_bytes_per_token": kv.bytes_per_block // kv.block_size,
        "needed_bytes": fit.needed,
        "available_bytes": fit.available,
    }
    if draft is not None and fit.draft is not None:
        draft_kv = fit.draft.kv_spec
        sizes |= {
            "draft_weight_bytes": fit.draft.weight_bytes,
            "draft_pool_bytes": fit.draft_pool,
            "draft_context": fit.draft.max_context,
            "draft_vocabulary": fit.draft.short_vocabulary or fit.draft.vocab_size,
            "draft_kv_bytes_per_token": draft_kv.bytes_per_block // draft_kv.block_size,
            "draft_speed": _draft_speed(draft.bytes_read / fit.info.weight_bytes),
        }
    if overhead is not None:
        sizes["overhead_bytes"] = overhead.nbytes
        sizes["serve_extra_bytes"] = _SERVE_EXTRA_BYTES
    # CUDA memory is checked only at loading. Other runners do not reject pools before loading, but
    # the report includes them.
    fits = not fit.refusal and (
        selected.backend.device.startswith("cuda") or fit.needed <= fit.available
    )
    reason = fit.refusal or _arithmetic(fit)
    if dropped:
        reason += f"; {dropped}"
    if overhead is not None:
        reason += f"; `serve` takes about {gb(_SERVE_EXTRA_BYTES)} more"
    report = {"fits": fits, "fit_reason": reason, **sizes}
    if not weights:
        return report
    report |= {"runner_reason": selected.runner.reason, "weights": weights}
    report["weight_formats"] = plan_label(checkpoint.plan(weights), weights)
    packed = format_bytes(checkpoint)
    report |= {f"packed_bytes_{name}": count for name, count in packed.items()}
    report |= _packing(
        checkpoint, weights, fit.info.weight_bytes, summary.files, config.num_threads
    )
    return {**report, "memory_options": _memory_options(fit, packed, config)}


def _drafted(checkpoint: Checkpoint, config: EngineConfig) -> tuple[Selection, DraftPlan | None]:
    """Plan the draft model and check its vocabulary, or plan the MTP head.

    Raises:
        ConfigError: The model cannot have this draft model.
    """
    selected, draft = select_with_draft(checkpoint, config)
    if draft is not None and not draft.is_mtp_head:
        check_draft_vocabulary(load_tokenizer(checkpoint), draft)
    return selected, draft


def _draft_speed(ratio: float) -> str:
    """Estimate the decode speed with a draft model.

    Args:
        ratio: weight bytes of the draft model relative to those of the model. Passes with one row
            take about as long as reading the weights.
    """
    found = [f"{_speed_up(ratio, accepted):.2f} times at {accepted:.0%}" for accepted in _ACCEPTED]
    return (
        f"about {', '.join(found)} accepted draft tokens, relative to the speed without drafts "
        "(one request, not measured)"
    )


def _speed_up(ratio: float, accepted: float) -> float:
    """Return the largest expected ratio of speeds over the numbers of draft tokens, from 0 on.

    Args:
        ratio: time of a draft model's pass relative to one of the model, both with one row.
        accepted: probability that a draft token is accepted if those before it are.
    """
    passes = PassCosts()
    plain = passes.seconds(1, 0.0)
    return max(
        sum(accepted**place for place in range(count + 1))
        / (passes.seconds(count + 1, 0.0) / plain + count * ratio)
        for count in range(_MOST_DRAFTS + 1)
    )


def _fit(
    checkpoint: Checkpoint,
    config: EngineConfig,
    selected: Selection,
    summary: WeightSummary,
    draft: DraftPlan | None,
) -> DraftFit:
    """Check the memory, measuring the process with the engine's modules and a tokenizer loaded."""
    tokenizer = None
    if config.max_memory is not None:
        importlib.import_module("kvboost_edge.engine.engine")
        tokenizer = load_tokenizer(checkpoint)
    available = available_on(selected.backend.device)
    found = plan_draft_fit(checkpoint, config, selected, summary, available, draft)
    del tokenizer  # kept alive during the measurement
    return found


def _arithmetic(fit: MemoryCheck) -> str:
    spare = fit.available - fit.needed
    rest = f"{gb(spare)} left" if spare >= 0 else f"{gb(-spare)} missing"
    copies = " and the runner's copies" * fit.info.copies_kv
    both = ""
    if fit.draft is not None:
        both = " of the model and its head" if fit.draft.joins_hidden_states else " of both models"
    shortage = f"; {fit.shortage}" if fit.shortage else ""
    bound = (
        "" if fit.overhead is None else f"; the process needs {gb(fit.overhead.nbytes)} in addition"
    )
    return (
        f"{gb(fit.needed)} for weights, pool, states{copies}{both}, {gb(fit.available)} available: "
        f"{rest}{shortage}{bound}"
    )


def _packing(
    checkpoint: Checkpoint, weights: str, size: int, files: Sequence[Path], num_threads: int | None
) -> dict[str, Any]:
    """Report where packed weights are stored and how much memory packing takes."""
    place = packed_place(checkpoint, weights, files, num_threads)
    if place.is_there:
        return {"packed_file": f"{place.path}: already packed"}
    if place.path is None:
        where = "none (pack_cache=False): the weights are packed in memory at every start"
    elif place.free < size:
        where = (
            f"no room: it needs {gb(size)} in addition to the model's "
            f"{gb(checkpoint.file_bytes)}, but {place.path} has only {gb(place.free)}; the "
            "weights would be packed in memory at every start. Make room, or set "
            "KVBOOST_EDGE_CACHE to a directory on another disk"
        )
    else:
        where = (
            f"will be written to {place.path}: {gb(size)} in addition to the model's "
            f"{gb(checkpoint.file_bytes)}"
        )
    return {"packed_file": where, "disk_free_bytes": place.free, "packing_peak_bytes": place.peak}


def _memory_options(fit: MemoryCheck, packed: Mapping[str, int], config: EngineConfig) -> str:
    """List the options that reduce memory, and their effect."""
    smaller = {name: count for name, count in packed.items() if count < fit.info.weight_bytes}
    found = [
        f"weights={name!r}: {gb(count)}"
        for name, count in sorted(smaller.items(), key=lambda item: item[1])
    ]
    if fit.info.stores_kv:
        most = gb(fit.left_after_weights)
        found.append(f"max_cache_bytes or num_blocks: the pool, at most {most}")
        fewer = [str(bits) for bits in (8, 4) if bits < max(config.kv_bits)]
        found += [f"kv_cache_bits={' or '.join(fewer)}: fewer bytes per token"] if fewer else []
    if fit.info.kv_spec.states:
        found.append(
            f"max_state_bytes or max_num_seqs: the states, {gb(fit.info.kv_spec.bytes_per_state)} "
            "each"
        )
        if asks_for_drafts(config):  # otherwise, their number shrinks to fit
            size = gb(fit.info.kv_spec.bytes_per_draft)
            found.append(f"max_draft_tokens: draft tokens, {size} each")
    return "; ".join(found)
