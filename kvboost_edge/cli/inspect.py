"""`kvboost-edge inspect`: what a model directory holds, checked file by file, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvboost_edge.backends.select import choose_backend
from kvboost_edge.cli.session import found_model
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import KVBoostError
from kvboost_edge.host.memory import available_bytes
from kvboost_edge.models.architectures import check_model_compatibility, pinned_context
from kvboost_edge.models.config_file import context_length, read_config, size_of, stored_dtype, text_config
from kvboost_edge.models.fingerprint import model_fingerprint
from kvboost_edge.models.safetensors_check import check_weights
from kvboost_edge.runners.native.choice import backend_name, choose_runner

__all__ = ["model_report", "print_report", "route", "run_inspect", "shown"]

_SHAPE = ("num_hidden_layers", "num_attention_heads", "hidden_size")


def run_inspect(model: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Print the report of `model`; a damaged or missing file is an error that names it."""
    notes = Console(stderr=True, quiet=as_json)
    with found_model(model, options, notes) as path, notes.status(f"checking {model} …"):
        report = {"model": model, **model_report(path, EngineConfig.from_options(**options))}
    if as_json:
        print(json.dumps(report, ensure_ascii=False, default=str))
    else:
        print_report(report, title=f"Model {model}")


def model_report(path: Path, config: EngineConfig) -> dict[str, Any]:
    """Figures of a model directory by name. Raises ModelFormatError for what the engine would refuse to read."""
    fields = read_config(path)
    weights = check_weights(path, fields)
    inner = text_config(fields)
    path_taken = route(path, config)
    dtype = "float32" if path_taken["runner"] == "native" else kv_dtype(fields, config, path_taken["device"])
    per_token = kv_bytes_per_token(fields, dtype)
    return {
        "path": str(path),
        **path_taken,
        "layers": size_of(inner, "num_hidden_layers"),
        "hidden_size": size_of(inner, "hidden_size"),
        "vocab_size": size_of(inner, "vocab_size"),
        "context": _usable_context(fields),
        "parameters": weights.num_params,
        "weight_bytes": weights.nbytes,
        "weight_dtypes": ", ".join(sorted(weights.dtypes)),
        "weight_files": ", ".join(file.name for file in weights.files),
        "kv_dtype": dtype,
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_block": per_token * config.block_size,
        "fingerprint": model_fingerprint(path),
    }


def route(path: Path, config: EngineConfig) -> dict[str, Any]:
    """Which runner and backend `path` would use on this machine, and why; a refusal is part of the answer."""
    compatibility = check_model_compatibility(path, strict=False)
    report: dict[str, Any] = {
        "architecture": compatibility.model_type,
        "supported": compatibility.supported,
        "tested": compatibility.tested,
        "compatibility": compatibility.reason,
        "runner": "torch" if compatibility.supported else "none",
        "runner_reason": "any causal language model of transformers, its modules untouched",
    }
    if not compatibility.supported:
        report["runner_reason"] = f"refused: {compatibility.reason}"
    try:
        choice = choose_backend(backend_name(config), config.device)
    except KVBoostError as error:
        return {**report, "backend": "none", "device": "none", "backend_reason": str(error)}
    report |= {"backend": choice.name, "device": choice.device, "backend_reason": choice.reason}
    if compatibility.supported:
        report |= _runner_route(path, config, choice.name)
    return report


def _runner_route(path: Path, config: EngineConfig, backend: str) -> dict[str, Any]:
    """The runner's name and reason; a refusal is part of the answer."""
    try:
        num_params = check_weights(path, read_config(path)).num_params
        selected = choose_runner(config, read_config(path), backend, num_params, available_bytes())
    except KVBoostError as error:
        return {"runner": "none", "runner_reason": f"refused: {error}"}
    return {"runner": selected.name, "runner_reason": selected.reason}


def _usable_context(fields: Mapping[str, Any]) -> int:
    """Longest sequence in tokens that the engine takes."""
    length, pinned = context_length(fields), pinned_context(fields)
    return length if pinned is None else min(length, pinned.length)


def kv_dtype(fields: Mapping[str, Any], config: EngineConfig, device: str) -> str:
    """The dtype of KV in the pool, which is that of the compute: the option's, else the checkpoint's."""
    if config.dtype != "auto":
        return config.dtype
    stored = stored_dtype(fields) or "float32"
    return "float32" if stored == "float16" and device == "cpu" else stored


def kv_bytes_per_token(fields: Mapping[str, Any], dtype: str) -> int:
    """Bytes of keys and values of one token over all layers."""
    inner = text_config(fields)
    layers, heads, hidden = (size_of(inner, name) or 0 for name in _SHAPE)
    kv_heads = size_of(inner, "num_key_value_heads") or heads
    head_dim = size_of(inner, "head_dim") or (hidden // heads if heads else 0)
    return 2 * layers * kv_heads * head_dim * (4 if dtype == "float32" else 2)


def print_report(report: dict[str, Any], *, title: str) -> None:
    """A two-column table of a report; large numbers of bytes are also given in MB."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in report.items():
        table.add_row(name.replace("_", " "), shown(name, value))
    Console().print(table)


def shown(name: str, value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        megabytes = f" ({value / 1e6:,.1f} MB)" if "bytes" in name and value >= 1e6 else ""
        return f"{value:,}{megabytes}"
    return str(value)
