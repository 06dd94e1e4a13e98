"""Draft models: speed of new code and free chat with a draft model, relative to no drafts.

    python benchmarks/bench/bench_draft_model.py MODEL DRAFT [--tokens 96] [--quick] [--out FILE]

MODEL and DRAFT are GGUF files of one family with equal vocabularies, such as Qwen2.5-Coder 1.5B
and 0.5B. One engine answers each prompt greedily, in turn without drafts, with
speculation="auto", and with "on" and at most 3 draft tokens, each time with an empty cache. The
answers must be equal. The ratio is that of the time per token after the first one. Before each
kind of task, its first prompt is answered once, which is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.engine_parts import pass_costs
from kvboost_edge import CPUPagedEngine, GenerationResult

# None of them are among the recorded prompts of simulators/speculation.py.
_PROMPTS = {
    "new code": (
        "Write a Python function that merges overlapping intervals, with a docstring.",
        "Write a C program that counts the lines, words and bytes of its input.",
        "Write a JavaScript function that debounces another function.",
        "Write a Python class for a bank account with deposits, withdrawals and a history.",
        "Write a bash script that renames all .jpeg files of a directory to .jpg.",
        "Write a Java method that checks whether a string is a palindrome, and JUnit tests for it.",
        "Write a Python script that reads a CSV file and prints the mean of each column.",
        "Write a TypeScript interface and a reducer for a shopping cart.",
    ),
    "free chat": (
        "What can I cook with chickpeas, spinach and rice?",
        "Why do cats purr?",
        "How do I prepare for my first marathon?",
        "Explain inflation in simple words.",
        "Write a short poem about the sea in winter.",
        "Which habits help to sleep better?",
        "How do noise-cancelling headphones work?",
        "Suggest names for a small bakery, and say why they fit.",
    ),
}
_WAYS: dict[str, dict[str, Any]] = {
    "off": {"speculation": "off"},
    "auto": {"speculation": "auto"},
    "on, at most 3": {"speculation": "on", "max_draft_tokens": 3},
}


def _ask(engine: CPUPagedEngine, question: str, way: str, tokens: int) -> GenerationResult:
    messages = [{"role": "user", "content": question}]
    engine.reset_cache()
    return engine.generate(messages, tokens, temperature=0.0, **_WAYS[way])


def _seconds_per_token(result: GenerationResult) -> float:
    times = result.token_times_ms
    return (times[-1] - times[0]) / 1e3 / (len(times) - 1)


def measure(
    engine: CPUPagedEngine, kind: str, tokens: int, num_prompts: int
) -> list[dict[str, Any]]:
    """Return one row for each way of answering the prompts of a kind."""
    questions = _PROMPTS[kind][:num_prompts]
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    drafted = dict.fromkeys(_WAYS, 0)
    accepted = dict.fromkeys(_WAYS, 0)
    for way in _WAYS:
        _ask(engine, questions[0], way, tokens)
    for question in questions:
        answers = {way: _ask(engine, question, way, tokens) for way in _WAYS}
        if len({answer.output_token_ids for answer in answers.values()}) > 1:
            raise RuntimeError(f"the answers to {question!r} differ between {list(_WAYS)}")
        for way, answer in answers.items():
            seconds[way].append(_seconds_per_token(answer))
            drafted[way] += answer.drafted_tokens
            accepted[way] += answer.accepted_tokens
    rows = []
    for way, times in seconds.items():
        ratios = [off / one for off, one in zip(seconds["off"], times, strict=True)]
        row = {
            "task": kind,
            "speculation": way,
            "times as fast": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "ms per token": 1e3 * statistics.median(times),
            "drafted": drafted[way],
            "accepted": accepted[way],
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def _pass_rows(engine: CPUPagedEngine) -> dict[str, list[float]]:
    """Return the engine's estimates of a pass of 1 to 8 rows in ms, of both models."""
    return {
        name: [round(1e3 * of.seconds(count, 0.0), 1) for count in range(1, 9)]
        for name, of in pass_costs(engine).items()
    }


def main() -> None:
    options: argparse.ArgumentParser = harness.parser(__doc__ or "")
    options.add_argument("model", type=Path, help="GGUF file of the model")
    options.add_argument("draft", type=Path, help="GGUF file of the draft model")
    options.add_argument("--tokens", type=int, default=96, help="tokens per answer")
    harness.add_threads(options)
    options.add_argument("--draft-vocabulary", type=int, help="option of the engine")
    chosen = options.parse_args()
    num_prompts = 1 if chosen.quick else 8
    rows = []
    with CPUPagedEngine.from_pretrained(
        str(chosen.model),
        draft_model=str(chosen.draft),
        num_blocks=256,
        num_threads=chosen.threads,
        draft_vocabulary=chosen.draft_vocabulary,
    ) as engine:
        for kind in _PROMPTS:
            rows += measure(engine, kind, chosen.tokens, num_prompts)
        passes = _pass_rows(engine)
    harness.report("bench_draft_model", rows, options=chosen, pass_ms=passes)


if __name__ == "__main__":
    main()
