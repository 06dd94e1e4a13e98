"""The `kvboost-edge inspect` command, which checks a model's files without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from kvboost_edge.cli.console import open_console, spinner
from kvboost_edge.cli.session import found_model
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.draft_plan import short_vocabulary
from kvboost_edge.engine.memory.selection import planned_kv_spec, select_path, usable_context
from kvboost_edge.engine.request.sampling_defaults import sampling_defaults
from kvboost_edge.errors import KVBoostError, ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.architectures import (
    SUPPORTED_ARCHITECTURES,
    UNSUPPORTED_ARCHITECTURES,
    check_model_compatibility,
)
from kvboost_edge.models.config.json_readers import text_config
from kvboost_edge.models.config.mtp_spec import is_assistant
from kvboost_edge.models.families.fields import size_of
from kvboost_edge.models.packed.pack_plan import plan_bytes
from kvboost_edge.runners.choice import RUNNERS, plan_of

__all__ = [
    "installed_route",
    "model_report",
    "mtp_report",
    "report_table",
    "route",
    "run_inspect",
    "shown",
]

_REFUSED = "refused: "
_LONG = 80


def run_inspect(model: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Print the report on `model`. Errors name the damaged or missing file."""
    notes = open_console(stderr=True, quiet=as_json)
    path = found_model(model, options)
    with spinner(notes, f"checking {model} …"):
        config = EngineConfig.from_options(**options)
        report = {
            "model": model,
            **model_report(Checkpoint.open(path, rope_range=config.rope_range), config),
        }
    if as_json:
        print(json.dumps(report, ensure_ascii=False, default=str))
    else:
        open_console().print(report_table(report, f"Model {model}"))


def model_report(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """Return properties of a model by name. Raises ModelFormatError for an invalid model."""
    fields = checkpoint.config
    if is_assistant(fields):
        kind = str(fields["model_type"])
        raise ModelFormatError(
            f"{checkpoint.path} has model_type={kind!r}: {UNSUPPORTED_ARCHITECTURES[kind]}; "
            "`kvboost-edge doctor MODEL --draft-model` shows whether both fit together"
        )
    weights = checkpoint.summary()
    inner = text_config(fields)
    path_taken = route(checkpoint, config)
    taken = (str(path_taken[name]) for name in ("runner", "weights", "device"))
    kv = planned_kv_spec(checkpoint, config, *taken)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        **path_taken,
        **_known_of(str(path_taken["architecture"])),
        "layers": size_of(inner, "num_hidden_layers"),
        "hidden_size": size_of(inner, "hidden_size"),
        "vocab_size": size_of(inner, "vocab_size"),
        "context": usable_context(fields),
        "parameters": weights.num_params,
        "weight_bytes": weights.nbytes,
        "weight_dtypes": ", ".join(sorted(weights.dtypes)),
        "bits_per_weight": round(8 * weights.nbytes / weights.num_params, 2),
        "weight_files": ", ".join(file.name for file in weights.files),
        "kv_dtype": f"{kv.bits[0]} bit keys, {kv.bits[1]} bit values"
        if kv.is_quantized
        else kv.dtype,
        "kv_bytes_per_token": kv.bytes_per_block // kv.block_size,
        "kv_bytes_per_block": kv.bytes_per_block,
        "sampling_defaults": sampling_defaults(checkpoint.generation().sampling, config).as_dict(),
        **mtp_report(checkpoint, config, path_taken),
        "fingerprint": checkpoint.fingerprint(),
    }


def mtp_report(
    checkpoint: Checkpoint, config: EngineConfig, path_taken: Mapping[str, Any]
) -> dict[str, Any]:
    """Return properties of the multi-token prediction (MTP) head in the model's files.

    The result is empty without a head, and for a model that no runner accepts.

    Args:
        checkpoint: the model.
        config: options of the engine.
        path_taken: report of `route`.
    """
    if path_taken["runner"] not in RUNNERS:  # its files may be incomplete
        return {}
    count = checkpoint.num_mtp_tensors
    if not count:
        return {}
    if path_taken["runner"] != "native":
        return {"mtp_head": f"{count} tensors, used by no runner"}
    try:
        head = checkpoint.mtp
        if head is None:
            name = path_taken["architecture"]
            return {"mtp_head": f"{count} tensors, not supported for model_type={name!r}"}
        plan = checkpoint.mtp_plan(path_taken["weights"])
    except KVBoostError as error:
        return {"mtp_head": f"{_REFUSED}{error}"}
    inside = "an MLP" if head.model.experts is None else f"{head.model.experts.count} experts"
    shared = {"embed": "embedding", "norm": "last norm", "head": "LM head"}
    names = ", ".join(shared[name] for name in head.shared) or "nothing"
    return {
        "mtp_head": f"one layer with {inside}; shares with the model: {names}",
        "mtp_head_tensors": count,
        "mtp_head_bytes": plan_bytes(plan),
        "draft_vocabulary": short_vocabulary(config, head.model.vocab_size)
        or head.model.vocab_size,
    }


def _known_of(architecture: str) -> dict[str, str]:
    """Return the rows of docs/models.md for an architecture."""
    known = SUPPORTED_ARCHITECTURES.get(architecture)
    if known is None:
        return {"runs_on": "unknown", "read_from": "unknown", "compared_with": "nothing"}
    return {
        "runs_on": ", ".join(known.runners),
        "read_from": ", ".join(known.files),
        "compared_with": known.proof,
    }


def route(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """Return the runner, weights and backend that a model would use here, and the reasons.

    If no runner accepts the model, the report contains the reason and nothing is raised.
    """
    compatibility = check_model_compatibility(checkpoint.config, strict=False)
    report: dict[str, Any] = {
        "architecture": compatibility.model_type,
        "supported": compatibility.supported,
        "tested": compatibility.tested,
        "compatibility": compatibility.reason,
        "runner": "none",
        "runner_reason": f"{_REFUSED}{compatibility.reason}",
        "weights": "none",
        "backend": "none",
        "device": "none",
        "backend_reason": "no runner takes this model",
    }
    if not compatibility.supported and checkpoint.onnx_refusal is None:
        return report
    try:
        selected = select_path(checkpoint, config)
    except KVBoostError as error:
        return {**report, "runner_reason": f"{_REFUSED}{error}", "backend_reason": str(error)}
    return report | {
        "runner": selected.runner.name,
        "runner_reason": selected.runner.reason,
        "weights": selected.runner.weights or "the checkpoint's own",
        "backend": selected.backend.name,
        "device": selected.backend.device,
        "backend_reason": selected.backend.reason,
    }


def installed_route(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """Return the report of `route`. A runner with missing packages does not count."""
    report = route(checkpoint, config)
    name = report["runner"]
    missing = plan_of(name).missing_package(checkpoint.config) if name in RUNNERS else None
    if missing is not None:
        report |= {"runner": "none", "runner_reason": f"runner {name!r} {missing}"}
    return report


def report_table(report: Mapping[str, Any], title: str) -> Table:
    """Create a table of names and values, without empty values.

    If a long reason repeats, its row refers to the first one.
    """
    table = Table(title=title, title_justify="left", show_header=False)
    said: dict[str, str] = {}
    for name, value in report.items():
        text = shown(name, value)
        if not text:
            continue
        words = name.replace("_", " ")
        reason = text.removeprefix(_REFUSED)
        if len(reason) > _LONG and reason in said:
            text = f"{text.removesuffix(reason)}see {said[reason]}"
        said.setdefault(reason, words)
        table.add_row(words, text)
    return table


def shown(name: str, value: Any) -> str:
    """Format a value for display."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={one:g}" for key, one in value.items())
    if isinstance(value, int):
        megabytes = f" ({value / 1e6:,.1f} MB)" if "bytes" in name and value >= 1e6 else ""
        return f"{value:,}{megabytes}"
    return str(value)
