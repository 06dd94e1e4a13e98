"""`make quality`: quality cost of weight formats and KV quantization on a real model.

Reports perplexity, mean and maximum KL divergence (nats), and the agreement of the top token. The
reference is the same model with float32 weights and float32 KV. The texts are the beginnings of
package descriptions, which every installation of the pinned versions has.

"stored" means the GGUF file's own types. Other formats are converted from its dequantized weights,
so their error adds to that of Q4_1. If llama.cpp is installed, it computes with the file's types.
`answers.py` adds answers with drafts and schemas, and `tool_calls.py` adds tool calls.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.bench.bench_peers import Worker
from benchmarks.data.real_model import is_whole
from benchmarks.harness import parser, report
from benchmarks.quality.answers import schema_rows, speculation_rows
from benchmarks.quality.tool_calls import tool_rows
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.perplexity import Difference, score_text
from kvboost_edge.models.locate.stores import real_model

PACKAGES = ("huggingface_hub", "httpx", "rich", "typer")
FORMS: dict[str, dict[str, Any]] = {
    "stored": {},
    "stored, kv 8": {"kv_cache_bits": 8},
    "stored, kv 8,4": {"kv_cache_bits": (8, 4)},
    "stored, kv 4": {"kv_cache_bits": 4},
    "f32, kv 8": {"weights": "f32", "kv_cache_bits": 8},
    "f32, kv 8,4": {"weights": "f32", "kv_cache_bits": (8, 4)},
    "f32, kv 4": {"weights": "f32", "kv_cache_bits": 4},
    "bf16": {"weights": "bf16"},
    "int8": {"weights": "int8"},
    "int4-asym": {"weights": "int4-asym"},
    "int4": {"weights": "int4"},
}


def descriptions() -> Iterator[tuple[str, str]]:
    """Yield the package name and version, and the text, of each description."""
    for name in PACKAGES:
        found = importlib.metadata.metadata(name)
        yield f"{name} {found['Version']}", str(found.get_payload() or found["Description"])


def row_of(
    form: str, scores: list[Any], perplexities: list[float], counts: list[int]
) -> dict[str, Any]:
    """Return the figures of all texts, weighted by their tokens.

    `scores` has a Difference for each text, or is empty for the reference.
    """
    total = sum(counts)

    def mean(values: list[float]) -> float:
        return sum(value * count for value, count in zip(values, counts, strict=True)) / total

    row = {"form": form, "perplexity": math.exp(mean([math.log(value) for value in perplexities]))}
    if not scores:
        return {**row, "mean KL": None, "max KL": None, "same top %": None}
    return {
        **row,
        "mean KL": mean([score.mean_kl for score in scores]),
        "max KL": max(score.max_kl for score in scores),
        "same top %": 100 * mean([score.top1_agreement for score in scores]),
    }


def ours(
    model: Path, texts: list[list[int]], window: int, forms: list[str]
) -> list[dict[str, Any]]:
    """Return a row for float32 and one for each format, each loaded next to the reference."""
    rows = []
    with CPUPagedEngine.from_pretrained(str(model), weights="f32", num_blocks=256) as first:
        num_leading = len(first.tokenizer.leading_ids)
        for form in forms:
            with CPUPagedEngine.from_pretrained(str(model), num_blocks=256, **FORMS[form]) as other:
                found = [
                    score_text(first, ids, window=window, num_leading=num_leading, against=other)
                    for ids in texts
                ]
            counts = [score.scored_tokens for score in found]
            if not rows:
                rows.append(
                    row_of("f32 (reference)", [], [score.perplexity for score in found], counts)
                )
            differences = [score.difference for score in found if score.difference is not None]
            rows.append(
                row_of(form, differences, [each.perplexity for each in differences], counts)
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


class LlamaCpp:
    """llama.cpp in a separate process, with the interface that `score_text` needs of an engine.

    It computes the logits of a file, one window at a time.
    """

    def __init__(self, python: Path, model: Path, kv_bits: int, info: Any) -> None:
        self.runner_info = info
        command = [
            str(python),
            str(Path(__file__).parents[1] / "peers" / "worker.py"),
            "llama.cpp",
            str(model),
        ]
        self._worker = Worker(
            "llama.cpp", [*command, "--kv", str(kv_bits), "--capacity", "2048"], dict(os.environ)
        )

    def logits(self, token_ids: list[int], start: int = 0) -> Any:
        """Return the logits from token `start` on, float32 [len(token_ids) - start, vocab]."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.npy"
            self._worker.ask("all_logits", tokens=token_ids, path=str(path))
            return np.load(path)[start:]

    def close(self) -> None:
        self._worker.close()


def llama_rows(
    python: Path, model: Path, texts: list[list[int]], window: int
) -> list[dict[str, Any]]:
    """Return a row for each KV width of llama.cpp, with the file's types, against float32."""
    rows = []
    with CPUPagedEngine.from_pretrained(str(model), weights="f32", num_blocks=256) as first:
        num_leading = len(first.tokenizer.leading_ids)
        for name, bits in (("llama.cpp, kv f16", 16), ("llama.cpp, kv q8_0", 8)):
            other = LlamaCpp(python, model, bits, first.runner_info)
            against: Any = other
            found = [
                score_text(first, ids, window=window, num_leading=num_leading, against=against)
                for ids in texts
            ]
            other.close()
            differences: list[Difference] = [
                score.difference for score in found if score.difference is not None
            ]
            counts = [score.scored_tokens for score in found]
            rows.append(
                row_of(name, differences, [each.perplexity for each in differences], counts)
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--tokens", type=int, default=512, help="number of tokens per text (default: 512)"
    )
    options.add_argument(
        "--window", type=int, default=256, help="tokens of a window (default: %(default)s)"
    )
    peers = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
    options.add_argument(
        "--peers-python", type=Path, default=peers, help="Python of an environment with llama.cpp"
    )
    options.add_argument(
        "--answers",
        action="store_true",
        help="measure only drafts and schemas, and add the results to an existing --out file",
    )
    given = options.parse_args()
    model = real_model()
    if not is_whole(model):
        raise SystemExit(f"{model} is missing; run `make real-model`")
    with CPUPagedEngine.from_pretrained(str(model), num_blocks=256) as engine:
        answers = {
            "speculation": speculation_rows(engine),
            "schemas": schema_rows(engine),
            "tools": tool_rows(engine),
        }
        if given.answers:
            given.out.write_text(
                json.dumps({**json.loads(given.out.read_text()), **answers}) + "\n",
                encoding="utf-8",
            )
            return
        texts = {
            name: engine.tokenizer.encode(text)[: given.tokens] for name, text in descriptions()
        }
    forms = ["stored"] if given.quick else list(FORMS)
    rows = ours(model, list(texts.values()), given.window, forms)
    if given.peers_python.exists():
        rows += llama_rows(given.peers_python, model, list(texts.values()), given.window)
    else:
        print(
            f"skipped: llama.cpp: no {given.peers_python}; `make bench-peers` installs it",
            file=sys.stderr,
        )
    digests = {
        name: hashlib.sha256(str(ids).encode()).hexdigest()[:16] for name, ids in texts.items()
    }
    report("quality", rows, options=given, model=model.name, texts=digests, **answers)


if __name__ == "__main__":
    main()
