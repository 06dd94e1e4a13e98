"""A tiny model's packed file in the cache."""

from __future__ import annotations

from pathlib import Path

from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.pack_plan import PackEntry, check_tensors, pack_plan
from kvboost_edge.models.packed.weight_file import PackedWeights, load_packed


def load(model_dir: Path, cache: Path, weights: str = "int8") -> PackedWeights:
    checkpoint = Checkpoint.open(model_dir)
    plan = pack_plan(describe_model(checkpoint.config), weights)
    return load_packed(checkpoint, plan, weights=weights, cache_dir=cache)


def file_plan(path: Path) -> list[PackEntry]:
    """Return the pack plan of a file in its own formats, checked against its tensors."""
    checkpoint = Checkpoint.open(path)
    with checkpoint.open_source() as source:
        plan = pack_plan(describe_model(checkpoint.config), "auto", source)
        check_tensors(plan, source)
    return plan


def only_file(cache: Path) -> Path:
    (path,) = (cache / "packed").iterdir()
    return path


def content(packed: PackedWeights) -> bytes:
    """Return the bytes of one matrix and close the file."""
    data = packed.array("layer1.down").tobytes() + packed.array("layer1.down.scales").tobytes()
    packed.close()
    return data
