"""Check that ONNX files of other programs work: onnxruntime-genai's builder and torch's exporter.

    python benchmarks/quality/onnx_exports.py

Needs the extra [bench]. A tiny random model of each family is exported by both programs. The native
runner must recognize the builder's float32 and int4 files. With float32 weights, its logits must be
within 1e-4 of the ONNX runner's. With int4 weights, for which onnxruntime rounds activations to 8
bits, they must be within 5e-2. torch's (dynamo) export must run on the ONNX runner within 1e-4 of
transformers. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import KVBoostError
from kvboost_edge.models.checkpoint import Checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"num_key_value_heads": 2},
    "phi3": {
        "sliding_window": None,
        "original_max_position_embeddings": 512,
    },  # otherwise the builder treats it as longrope
}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
PROMPT = np.random.default_rng(7).integers(0, 256, 45).tolist()
NOT_MADE = "the builder itself fails"  # not an error of this project
CLOSE = {"fp32": 1e-4, "int4": 5e-2, "torch": 1e-4}


def logits(folder: Path, runner: str, weights: str = "auto") -> np.ndarray:
    with CPUPagedEngine.from_pretrained(
        folder, runner=runner, weights=weights, num_blocks=16
    ) as engine:
        return engine.logits(PROMPT)


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def from_builder(family: str, folder: Path, precision: str) -> str:
    """Check the builder's files and return the problem, or ""."""
    source = save_tiny_model(family, folder / "source", **{**SIZES, **FAMILIES[family]})
    target = folder / "built"
    options = ["-p", precision, "-e", "cpu", "-c", str(folder / "cache")]
    command = [
        sys.executable,
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        str(source),
        "-o",
        str(target),
        *options,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return f"{NOT_MADE}: {done.stderr.strip().splitlines()[-1:]}"
    checkpoint = Checkpoint.open(target)
    if checkpoint.native_refusal:
        return checkpoint.native_refusal
    off = distance(logits(target, "native", "f32"), logits(target, "onnx"))
    return "" if off <= CLOSE[precision] else f"native and ONNX runner differ by {off:.2g}"


class WithCache(torch.nn.Module):
    """A model that takes and returns its cache as a list of tensors, as exporters require."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past: list[Any]
    ) -> tuple[Any, ...]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
        )
        presents = [
            kind for layer in found.past_key_values.layers for kind in (layer.keys, layer.values)
        ]
        return (found.logits, *presents)


def from_torch(family: str, folder: Path, form: str) -> str:
    """Check torch's export and return the problem, or ""."""
    model = build_tiny_model(family, **{**SIZES, **FAMILIES[family]})
    model.set_attn_implementation("eager")
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    source = save_tiny_model(family, folder.with_name("source"), **{**SIZES, **FAMILIES[family]})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    config = model.config
    count = 3
    past = 5
    shape = (1, config.num_key_value_heads, past, config.head_dim)
    layers = range(config.num_hidden_layers)
    names = [f"{layer}.{kind}" for layer in layers for kind in ("key", "value")]
    ids = torch.randint(0, 256, (1, count))
    arguments = (
        ids,
        torch.ones(1, past + count, dtype=torch.int64),
        torch.arange(past, past + count)[None],
        [torch.randn(shape) for _ in names],
    )
    new, old, total = (torch.export.Dim.DYNAMIC for _ in range(3))
    shapes = ({1: new}, {1: total}, {1: new}, [{2: old} for _ in names])
    torch.onnx.export(
        WithCache(model).eval(),
        arguments,
        str(folder / "model.onnx"),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=[
            "input_ids",
            "attention_mask",
            "position_ids",
            *(f"past_key_values.{name}" for name in names),
        ],
        output_names=["logits", *(f"present.{name}" for name in names)],
        verbose=False,
    )
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    off = distance(logits(folder, "onnx"), expected)
    return (
        "" if off <= CLOSE["torch"] else f"the ONNX runner differs from transformers by {off:.2g}"
    )


def main() -> int:
    argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0]).parse_args()
    problems = {}
    for family in FAMILIES:
        for form in CLOSE:
            check = from_torch if form == "torch" else from_builder
            with tempfile.TemporaryDirectory() as folder:
                try:
                    problem = check(family, Path(folder) / "model", form)
                except KVBoostError as error:
                    problem = str(error)
            print(f"{family:8} {form:8} {problem or 'ok'}", flush=True)
            if problem and not problem.startswith(NOT_MADE):
                problems[f"{family} from {form}"] = problem
    print(json.dumps({"problems": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
