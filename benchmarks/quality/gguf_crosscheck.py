"""Comparison of the native runner with llama.cpp, for every kind of GGUF file in the tests.

The tests' writer creates a tiny random model of each architecture. All logits of a prompt that is
longer than the model's windows are compared as |ours - theirs| / |theirs|.

With F32 weights, only the order of sums and llama.cpp's GELU (a float16 table) differ. With Q8_0
weights, both round activations to 8 bits in different ways. The rows then show the distance of each
from the same weights in float32, and ours may not be much larger. Wider models of some families
have weights of 1 to 3 bits, which are compared in the same way.

The logits of multi-token prediction heads are compared with those of a NumPy model. Both get the
model's hidden states.

Pre-tokenizers are compared by the token ids of texts on which they differ, with a vocabulary that
reveals every split. The tests list the cases where the original regular expressions differ from
llama.cpp's. The exit status is 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

sys.path.append(str(Path(__file__).parents[2] / "tests"))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "text"))

from test_gguf_words import OTHERWISE

from helpers.gguf.hybrids import HYBRID_FAMILIES
from helpers.gguf.writer import FAMILIES, WIDE, add_keys, save_model, write_gguf
from helpers.models.mtp_heads import HEADS, save_with_head, write_gguf_with_head
from helpers.models.tiny_models import save_tiny_model
from helpers.oracles.packed_plan import last_states, mtp_model, mtp_states, plan_floats
from helpers.oracles.transformers_logits import driver_of
from helpers.text.hostile_words import GEMMA4_TEXTS, TEXTS, gemma4_metadata, metadata_of
from kvboost_edge.runners.native.runner import NativeRunner
from kvboost_edge.text.gguf_tokenizer import gguf_tokenizer
from kvboost_edge.text.pre_tokenizers import PRE_TOKENIZERS

PROMPT = np.random.default_rng(7).integers(0, 256, 61).tolist()
KINDS = ("F32", "Q8_0")
NARROW_KINDS = (
    *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "Q2_K", "Q3_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "NVFP4"),
)
NARROW_FAMILIES = ("llama", "qwen3", "qwen3_moe")
# Tolerance for models with GELU. With llama.cpp's table in transformers, the 4.0e-3 of gemma4-wide
# become 7e-4.
TOLERANCE = 1e-4
GELU_TOLERANCE = 6e-3
# Limits for our distance from float32, relative to llama.cpp's and absolute.
FARTHER = 1.5
FARTHEST = 0.5
# Known differences of llama.cpp (llama-cpp-python 0.3.36) that are not errors of this project.
KNOWN = {
    "phi3": "llama.cpp has Phi's windows switched off; phi3-full has none",
    "exaone4": "llama.cpp reads windows for 64 layers only; exaone4-full has none",
}
Row = tuple[str, str, str, bool]
"""What was compared, the difference, a comment, and whether it agrees or is a known difference."""


def native_logits(path: Path, weights: str) -> np.ndarray:
    """Return the logits of PROMPT, float32 [tokens, vocabulary]."""
    runner = NativeRunner.from_dir(path, weights=weights)
    driver = driver_of(runner)
    logits = np.array(driver.prefill(driver.open(PROMPT), 23))
    runner.close()
    return logits


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> str:
    """Write a GGUF file that contains only a tokenizer."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    add_keys(writer, metadata)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def compare_models(options: argparse.Namespace, folder: Path) -> list[Row]:
    jobs: dict[str, tuple[str, list[int]]] = {}
    for name in options.families or (*FAMILIES, *HYBRID_FAMILIES):
        model = save_model(name, folder / name)
        for kind in KINDS:
            path = write_gguf(model, folder / f"{name}-{kind}.gguf", kind=kind, tokenizer=None)
            jobs[f"{name} {kind}"] = (str(path), PROMPT)
    for name in NARROW_FAMILIES if not options.families else ():
        fields = {**FAMILIES[name], **WIDE, "moe_intermediate_size": 256}
        model = save_tiny_model(name, folder / f"{name}-wide", **fields)
        for kind in NARROW_KINDS:
            path = write_gguf(model, folder / f"{name}-{kind}.gguf", kind=kind, tokenizer=None)
            jobs[f"{name} {kind}"] = (str(path), PROMPT)
    theirs = ask(options, folder, {"models": jobs, "vocabularies": {}})
    rows = []
    for label, (path, _) in jobs.items():
        name, _, kind = label.partition(" ")
        if f"models/{label}" not in theirs:
            rows.append(
                (label, "llama.cpp refuses", str(theirs[f"error/models/{label}"])[:90], False)
            )
            continue
        apart, agrees, comment = compare(name, kind, Path(path), theirs[f"models/{label}"])
        known = "" if agrees else KNOWN.get(name, "")
        rows.append((label, apart, known or comment, agrees or bool(known)))
    return rows


def compare_heads(options: argparse.Namespace, folder: Path) -> list[Row]:
    jobs: dict[str, tuple[str, tuple[list[int], list[list[float]]]]] = {}
    ours = {}
    for name in HEADS:
        model = save_with_head(name, folder / f"{name}-head")
        path = write_gguf_with_head(model, folder / f"{name}-head.gguf", tokenizer=None)
        states = last_states(*plan_floats(path), PROMPT[:-1])
        head, weights, matrix = mtp_model(path)
        ours[name] = mtp_states(head, weights, states, PROMPT[1:]) @ matrix.T
        jobs[name] = (str(path), (PROMPT[1:], states.tolist()))
    theirs = ask(options, folder, {"models": {}, "heads": jobs, "vocabularies": {}})
    rows = []
    for name, logits in ours.items():
        label = f"MTP head of {name}"
        if f"heads/{name}" not in theirs:
            rows.append(
                (label, "llama.cpp refuses", str(theirs[f"error/heads/{name}"])[:90], False)
            )
            continue
        apart = distance(logits, theirs[f"heads/{name}"])
        rows.append((label, f"{apart:.1e}", f"at most {TOLERANCE:g}", bool(apart <= TOLERANCE)))
    return rows


def compare(name: str, kind: str, path: Path, theirs: np.ndarray) -> tuple[str, bool, str]:
    """Return the difference, whether it is acceptable, and the measure used."""
    exact = native_logits(path, "f32")
    if kind == "F32":
        most = GELU_TOLERANCE if name.startswith("gemma") else TOLERANCE
        apart = distance(exact, theirs)
        return f"{apart:.1e}", bool(apart <= most), f"at most {most:g}"  # also false for NaN
    ours = distance(native_logits(path, "auto"), exact)
    other = distance(theirs, exact)
    agrees = bool(other <= FARTHEST and ours <= FARTHER * other)
    return (
        f"{ours:.1e} / {other:.1e}",
        agrees,
        f"ours / theirs from float32, at most {FARTHER:g} times theirs",
    )


def compare_words(options: argparse.Namespace, folder: Path) -> list[Row]:
    kinds = {pre: (metadata_of(pre), TEXTS) for pre in sorted(PRE_TOKENIZERS)}
    kinds["gemma4"] = (gemma4_metadata(), GEMMA4_TEXTS)
    jobs = {
        name: (write_vocabulary(folder / f"words-{name}.gguf", metadata), texts)
        for name, (metadata, texts) in kinds.items()
    }
    theirs = ask(options, folder, {"models": {}, "vocabularies": jobs})
    rows = []
    for name, (metadata, texts) in kinds.items():
        if f"vocabularies/{name}" not in theirs:
            rows.append(
                (
                    f"words of {name}",
                    "llama.cpp refuses",
                    str(theirs[f"error/vocabularies/{name}"])[:90],
                    False,
                )
            )
            continue
        expected = json.loads(theirs[f"vocabularies/{name}"].tobytes())
        ours = gguf_tokenizer(metadata, name=name)
        other = {
            text
            for text, ids in zip(texts, expected, strict=True)
            if ours.encode(text, add_special_tokens=False) != ids
        }
        agrees = other == set(OTHERWISE.get(name, ()))
        rows.append(
            (
                f"words of {name}",
                f"{len(other)} of {len(texts)} otherwise",
                "as listed" if agrees else "",
                agrees,
            )
        )
    return rows


def ask(options: argparse.Namespace, folder: Path, jobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compute the jobs with llama.cpp in its own environment."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parents[1] / "peers" / "gguf_logits.py"
    command = [
        str(options.peers_python),
        str(script),
        str(folder / "jobs.json"),
        str(folder / "out.npz"),
    ]
    subprocess.run(command, check=True)
    with np.load(folder / "out.npz") as found:
        return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers-python",
        type=Path,
        default=Path(__file__).parents[2] / ".venv-peers" / "bin" / "python",
        metavar="PATH",
        help="Python with llama.cpp (default: that of `make bench-peers`)",
    )
    parser.add_argument(
        "--families", nargs="*", help="check only these families, and no heads or pre-tokenizers"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = compare_models(options, Path(name))
        if not options.families:
            rows += compare_heads(options, Path(name))
            rows += compare_words(options, Path(name))
    width = max(len(row[0]) for row in rows)
    for label, apart, comment, agrees in rows:
        print(f"{label:{width}}  {apart:>20}  {comment}{'' if agrees else '  DISAGREES'}")
    wrong = [row[0] for row in rows if not row[-1]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} agree")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
