"""Quality of GGUF types of up to four bits on a real model, in this engine and in llama.cpp.

    python benchmarks/quality/gguf_types.py MODEL.gguf --tools DIR [--types Q2_K IQ3_S ...]
    [--every N] [--files DIR] [--out FILE]

llama.cpp's `llama-quantize` in DIR converts the model's weights to each type, except the
embeddings and the head. Types that need an importance matrix get one of `llama-imatrix`, computed
from the text of this repository's docs. The rows of the model's matrices must be multiples of 256
weights. Types with a grid take minutes of all CPUs per billion weights. With `--every 4`, only
every fourth layer is converted, and the others to Q8_0.

For each file, the reference is this engine with the file's weights as float32. The table shows the
mean KL divergence (nats) of the next-token distributions from the reference, and how often the
most likely token is the same. The texts are those of perplexity.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.quality.perplexity import LlamaCpp, descriptions
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.perplexity import score_text
from kvboost_edge.models.gguf.file import read_gguf

TYPES = {
    "Q1_0": False,
    "Q2_0": False,
    "TQ1_0": False,
    "TQ2_0": False,
    "IQ1_S": True,
    "IQ1_M": True,
    "IQ2_XXS": True,
    "IQ2_XS": True,
    "IQ2_S": True,
    "Q2_K": False,
    "IQ3_XXS": True,
    "IQ3_S": False,
    "Q3_K": False,
    "IQ4_NL": False,
    "NVFP4": False,
}
"""Whether a type needs an importance matrix."""
_MOST_LAYERS = 256
_IMPORTANCE_TEXTS = ("README.md", "docs/architecture.md", "docs/speculation.md", "docs/status.md")


def convert(tools: Path, model: Path, kind: str, target: Path, threads: int, every: int) -> None:
    """Convert all matrices of every `every`-th layer to a type, and those of other layers to Q8_0.

    The embedding becomes Q8_0 and the head Q6_K. An importance matrix is computed if the type needs
    one and the target's folder has none.
    """
    more: list[object] = []
    if TYPES[kind]:
        matrix = target.parent / f"{model.stem}-importance.gguf"
        if not matrix.exists():
            _compute_importance(tools, model, matrix, threads)
        more = ["--imatrix", matrix]
    layers = "|".join(str(layer) for layer in range(0, _MOST_LAYERS, every))
    part = target.with_suffix(".part")
    _run(
        tools / "llama-quantize",
        *("--allow-requantize", "--pure", *more),
        *("--token-embedding-type", "q8_0", "--output-tensor-type", "q6_k"),
        *("--tensor-type", rf"blk\.({layers})\.={kind.lower()}"),
        *(model, part, "Q8_0"),
    )
    part.rename(target)


def _compute_importance(tools: Path, model: Path, target: Path, threads: int) -> None:
    root = Path(__file__).parents[2]
    text = target.with_suffix(".txt")
    text.write_text("\n".join((root / name).read_text("utf-8") for name in _IMPORTANCE_TEXTS))
    _run(
        tools / "llama-imatrix",
        *("-m", model, "-f", text, "-o", target, "-t", threads, "-c", 512, "--chunks", 8),
    )


def _run(*command: object) -> None:
    done = subprocess.run(
        [str(one) for one in command], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-2000:]}")


def stored_types(file: Path) -> dict[str, int]:
    """Return the number of tensors of each type in a file, without float32."""
    counts = Counter(tensor.type for tensor in read_gguf(file).tensors.values())
    del counts["F32"]
    return dict(counts)


def measure(file: Path, python: Path, num_tokens: int, window: int) -> dict[str, float]:
    """Return the differences of both engines from float32, on one file."""
    row: dict[str, float] = {}
    with CPUPagedEngine.from_pretrained(str(file), weights="f32", num_blocks=256) as reference:
        texts = [reference.tokenizer.encode(text)[:num_tokens] for _, text in descriptions()]
        with CPUPagedEngine.from_pretrained(str(file), num_blocks=256) as engine:
            row |= difference("", reference, engine, texts, window)
        theirs = LlamaCpp(python, file, 16, reference.runner_info)
        row |= difference("llama.cpp ", reference, theirs, texts, window)
        theirs.close()
    return row


def difference(
    name: str,
    reference: CPUPagedEngine,
    other: Any,
    texts: Sequence[Sequence[int]],
    window: int,
) -> dict[str, float]:
    """Return the mean difference of an engine from the reference over all tokens of texts."""
    num_leading = len(reference.tokenizer.leading_ids)
    scores = [
        score_text(reference, ids, window=window, num_leading=num_leading, against=other)
        for ids in texts
    ]
    found = [(score.scored_tokens, score.difference) for score in scores if score.difference]
    total = sum(count for count, _ in found)
    return {
        f"{name}KL": sum(count * one.mean_kl for count, one in found) / total,
        f"{name}same top %": 100 * sum(count * one.top1_agreement for count, one in found) / total,
    }


def _options() -> argparse.ArgumentParser:
    options: argparse.ArgumentParser = harness.parser(__doc__ or "")
    options.add_argument("model", type=Path, help="GGUF file of the model, of any type")
    options.add_argument(
        "--tools", type=Path, required=True, help="folder of llama-quantize and llama-imatrix"
    )
    options.add_argument(
        "--files", type=Path, help="existing folder that keeps the files (default: none is kept)"
    )
    options.add_argument(
        "--types", nargs="+", choices=TYPES, default=list(TYPES), help="types (default: all)"
    )
    options.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="convert only every Nth layer, and the others to Q8_0 (default: 1)",
    )
    options.add_argument(
        "--tokens", type=int, default=256, help="tokens of each of the four texts (default: 256)"
    )
    options.add_argument(
        "--window", type=int, default=256, help="tokens of a window (default: 256)"
    )
    harness.add_threads(options)
    harness.add_peers_python(options)
    return options


def main() -> None:
    options = _options()
    given = options.parse_args()
    if given.every < 1:
        options.error(f"--every must be at least 1, got {given.every}")
    kinds = given.types[:1] if given.quick else given.types
    rows = []
    with tempfile.TemporaryDirectory() as name:
        # Packed float32 weights of every file would fill the cache's disk.
        cache = Path(name) / "cache"
        os.environ["KVBOOST_EDGE_CACHE"] = str(cache)
        folder = given.files or Path(name)
        for kind in kinds:
            suffix = f"-every-{given.every}" if given.every > 1 else ""
            file = folder / f"{given.model.stem}-{kind}{suffix}.gguf"
            if not file.exists():
                convert(given.tools, given.model, kind, file, given.threads, given.every)
            row = {"type": kind, **measure(file, given.peers_python, given.tokens, given.window)}
            row |= {"MB": file.stat().st_size / 1e6, "tensors": json.dumps(stored_types(file))}
            print(json.dumps(row), flush=True)
            rows.append(row)
            shutil.rmtree(cache)
            if given.files is None:
                file.unlink()
    harness.report("gguf_types", rows, options=given, model=given.model.name)


if __name__ == "__main__":
    main()
