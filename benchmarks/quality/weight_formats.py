"""Quality cost of each weight format, on the bundled model or one from train_demo_model.py.

    python benchmarks/quality/weight_formats.py [--model DIR] [--questions 100] [--facts 16 64]
    [--quick] [--out FILE]

For each format, it prints bits per weight, relative L2 error of the weights, mean KL of the
next-token distributions against f32 weights, top-token agreement, and the share of held-out
questions that greedy decoding answers exactly. Everything runs on the native runner. The last rows
are variants of 4-bit weights converted back to f32, so that only the weights are rounded and not
the activations.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(
    str(Path(__file__).parents[2] / "training")
)  # The questions are those of the demo model.

import demo_corpus as corpus
from benchmarks import harness
from benchmarks.quality.weight_error import weight_error
from kvboost_edge import CPUPagedEngine
from kvboost_edge.kernels.linear.weights import pack_rows
from kvboost_edge.kernels.reference.weights import round_to_nearest, unpack_rows
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.locate import BUNDLED_MODEL, locate_model
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource

FORMATS = ("f32", "bf16", "int8", "int4", "int4-asym")
KL_QUESTIONS = 16

Floats = np.ndarray
Change = Callable[[str, Floats], Floats]


def fitted(kind: str) -> Change:
    """Quantize and dequantize layer matrices with a format."""

    def change(name: str, weights: Floats) -> Floats:
        if "_proj" not in name:
            return weights
        return unpack_rows(pack_rows(weights, kind), *weights.shape, kind)

    return change


def rounded(kind: str) -> Change:
    """Quantize and dequantize by plain rounding to nearest."""
    return lambda name, weights: round_to_nearest(weights, kind) if "_proj" in name else weights


VARIANTS: dict[str, tuple[Change, float]] = {
    "int4 rounded to nearest, weights only": (rounded("int4"), 4.5),
    "int4 fitted, weights only": (fitted("int4"), 4.5),
    "int4-asym rounded to nearest, weights only": (rounded("int4-asym"), 5.0),
    "int4-asym fitted, weights only": (fitted("int4-asym"), 5.0),
}


def write_changed(model_dir: Path, target: Path, change: Change) -> float:
    """Write a float32 copy of a model with changed matrices.

    Returns:
        The relative L2 error of the changed matrices.
    """
    shutil.copytree(model_dir, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    error = 0.0
    energy = 0.0
    with SafetensorsSource(model_dir) as source:
        for name in source.names():
            weights = source.rows(name)
            tensors[name] = np.ascontiguousarray(change(name, weights))
            if "_proj" in name:
                error += float(((weights.astype(np.float64) - tensors[name]) ** 2).sum())
                energy += float((weights.astype(np.float64) ** 2).sum())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(
        json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"})
    )
    return (error / energy) ** 0.5


def log_softmax(logits: Floats) -> Floats:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


class Judge:
    """Held-out questions and the answers of the f32 weights."""

    def __init__(self, facts: Sequence[int], questions: int) -> None:
        self.asked = {
            count: [
                corpus.held_out_question(count, f"0 test {count} {i}") for i in range(questions)
            ]
            for count in facts
        }
        self.base: list[Floats] = []

    def row(self, name: str, engine: CPUPagedEngine, bits: float, error: float) -> dict[str, Any]:
        kl = 0.0
        same = 0
        tokens = 0
        few = next(iter(self.asked.values()))[:KL_QUESTIONS]
        for index, (messages, reply) in enumerate(few):
            ids = engine.tokenizer.encode_chat(messages) + engine.tokenizer.encode(
                reply, add_special_tokens=False
            )
            found = log_softmax(engine.logits(ids))
            if len(self.base) <= index:
                self.base.append(found)
            base = self.base[index]
            kl += float((np.exp(base) * (base - found)).sum())
            same += int((base.argmax(axis=1) == found.argmax(axis=1)).sum())
            tokens += len(base)
        right = {f"right of {facts} facts": self._right(engine, facts) for facts in self.asked}
        return {
            "format": name,
            "bits": bits,
            "error %": 100 * error,
            "KL": f"{kl / tokens:.2e}",
            "same top %": 100 * same / tokens,
            **right,
        }

    def _right(self, engine: CPUPagedEngine, facts: int) -> float:
        right = 0
        for messages, reply in self.asked[facts]:
            wanted = engine.tokenizer.encode(reply, add_special_tokens=False)
            result = engine.generate(messages, max_new_tokens=len(wanted), temperature=0.0)
            right += list(result.output_token_ids) == list(wanted)
        return right / len(self.asked[facts])


def main() -> None:
    parser = harness.parser(
        "What each weight format costs in quality, on models of train_demo_model.py."
    )
    parser.add_argument(
        "--model", default=BUNDLED_MODEL, help="model directory (default: the bundled model)"
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=100,
        help="questions per number of facts (default: %(default)s)",
    )
    parser.add_argument(
        "--facts",
        type=int,
        nargs="+",
        default=[16, 64],
        help="numbers of facts in the context (default: %(default)s)",
    )
    options = parser.parse_args()
    judge = Judge(
        options.facts[:1] if options.quick else options.facts,
        4 if options.quick else options.questions,
    )
    model_dir = locate_model(options.model)
    rows = []
    for weights in FORMATS:
        report = weight_error(Checkpoint.open(model_dir), weights)
        with CPUPagedEngine.from_pretrained(model_dir, runner="native", weights=weights) as engine:
            rows.append(judge.row(weights, engine, report.bits_per_weight, report.relative))
    for name, (change, bits) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            changed = Path(folder) / "model"
            error = write_changed(model_dir, changed, change)
            with CPUPagedEngine.from_pretrained(changed, runner="native", weights="f32") as engine:
                rows.append(judge.row(name, engine, bits, error))
    harness.report("bench_formats", rows, options=options, questions=options.questions)


if __name__ == "__main__":
    main()
