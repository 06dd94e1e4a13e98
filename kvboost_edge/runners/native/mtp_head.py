"""Loading of MTP heads and assistants, which share weights with the model that they draft for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvboost_edge.host.processor import default_num_threads
from kvboost_edge.kernels.aot import compile_ahead
from kvboost_edge.kernels.entry import KernelEntry
from kvboost_edge.kernels.program.entries import pass_entries
from kvboost_edge.models.assistant import AssistantFiles, packed_fingerprint
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.mtp_spec import MtpSpec
from kvboost_edge.models.packed.pack_plan import PackEntry, kinds_of
from kvboost_edge.models.packed.stream import packing_entries
from kvboost_edge.models.packed.weight_file import load_packed
from kvboost_edge.models.weights.weight_source import WeightSource
from kvboost_edge.runners.base import LoadOptions
from kvboost_edge.runners.native.program import possible_operations
from kvboost_edge.runners.native.runner import NativeRunner

__all__ = ["load_mtp_head", "load_mtp_kernels"]


class _HeadFiles:
    """The MTP head of a checkpoint as a model that can be packed."""

    def __init__(self, checkpoint: Checkpoint | AssistantFiles) -> None:
        self.path: Path = checkpoint.path
        self._checkpoint = checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        return self._checkpoint.config

    def open_source(self) -> WeightSource:
        return self._checkpoint.open_mtp_source()

    def fingerprint(self, *, cache_dir: Path | None = None) -> str:
        return packed_fingerprint(self._checkpoint.fingerprint(cache_dir=cache_dir))

    def changed_files(self) -> list[str]:
        return self._checkpoint.changed_files()


def _shared_entries(head: MtpSpec, plan: list[PackEntry]) -> dict[str, PackEntry]:
    """Return the entries of a model's plan that its MTP head uses, by their name in the head."""
    entries = {entry.name: entry for entry in plan}
    return {
        name: entries[name if name in entries else "embed"]  # a tied model has no LM head
        for name in head.shared
    }


def load_mtp_head(
    checkpoint: Checkpoint | AssistantFiles, model: NativeRunner, options: LoadOptions
) -> NativeRunner:
    """Load the MTP head of a checkpoint, or an assistant.

    The KV of a head has the format of the model's KV. An assistant has no KV and reads the model's.

    Args:
        checkpoint: the checkpoint, which has a head, or the assistant.
        model: runner of the model. It must outlive the head, which uses some of its weights.
        options: options of the model.
    """
    head = checkpoint.mtp
    assert head is not None
    plan = checkpoint.mtp_plan(options.weights)
    with checkpoint.open_mtp_source() as source:
        packing = packing_entries(plan, source, [])
    passes = _head_entries(checkpoint, options.weights, options.kv_bits)
    compile_ahead([*packing, *passes], default_num_threads())
    packed = load_packed(
        _HeadFiles(checkpoint),
        plan,
        weights=options.weights,
        cache_dir=checkpoint.cache_dir,
        num_threads=options.num_threads,
        progress=options.progress,
    )
    shared = _shared_entries(head, model.plan)
    model.lend(packed, shared)
    used = [dataclasses.replace(entry, name=name) for name, entry in shared.items()]
    return NativeRunner(
        head.model,
        [*plan, *used],
        packed,
        weights=options.weights,
        num_threads=options.num_threads,
        block_size=options.block_size,
        kv_bits=options.kv_bits,
        short_vocabulary=options.short_vocabulary,
    )


def _head_entries(
    checkpoint: Checkpoint | AssistantFiles, weights: str, kv_bits: tuple[int, int]
) -> list[KernelEntry]:
    """Return the kernel entries that passes of an MTP head need."""
    head = checkpoint.mtp
    assert head is not None
    shared = _shared_entries(head, checkpoint.plan(weights))
    kinds = kinds_of([*checkpoint.mtp_plan(weights), *shared.values()])
    is_quantized = kv_bits != (16, 16)
    return pass_entries(kinds, possible_operations(head.model), quantized=is_quantized)


def load_mtp_kernels(
    checkpoint: Checkpoint | AssistantFiles, weights: str, kv_bits: tuple[int, int] = (16, 16)
) -> None:
    """Load the machine code that passes of an MTP head need into this process."""
    entries = _head_entries(checkpoint, weights, kv_bits)
    compile_ahead(entries, default_num_threads())
    for entry in entries:
        _ = entry.address
