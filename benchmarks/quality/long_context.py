"""Retrieval and multi-hop questions over generated long texts, with exact and sparse prefill.

The four tasks follow RULER (Hsieh et al., 2024):

- needle: one magic number is hidden among filler sentences.
- multi_key: several numbers are hidden, and one of them is asked for.
- variables: a chain of assignments is hidden among others; all variables with a value are asked
  for.
- common_words: a long list of words is given; the most frequent ones are asked for.

A question scores the share of expected strings that the greedy answer contains. The texts of a seed
are the same on every machine.

    python benchmarks/quality/long_context.py --model FILE --context 8192 --count 20
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import parser, report
from kvboost_edge import CPUPagedEngine

__all__ = ["TASKS", "Question", "make_question", "score"]

_FILLER = (
    "The grass is green, the sky is blue and the sun is yellow.",
    "Trains leave the station every hour, and most of them are on time.",
    "A baker gets up early, long before the first guests of the day arrive.",
    "Rivers carry sand to the sea, where it forms beaches and islands.",
    "The library opens at nine and closes when the last reader has left.",
    "In winter the lake freezes, and children skate on it until dark.",
)
_WORDS = (
    *("anchor", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island"),
    *("jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "quarry", "ribbon"),
    *("saddle", "tunnel", "umbrella", "valley", "window", "yellow", "zipper", "bottle", "copper"),
    *("desert", "falcon", "glacier", "harbor", "insect", "jungle", "kitten", "lemon", "marble"),
)


class Question(NamedTuple):
    """A text with a question, and the strings that the answer must contain.

    Attributes:
        parts: sentences or words of the text, which filler may be inserted between.
        filler: function that returns another piece of filler.
        question: the question after the text.
        expected: strings of the answer.
        longest: maximum number of tokens of the answer.
    """

    parts: list[str]
    filler: Callable[[], str]
    question: str
    expected: tuple[str, ...]
    longest: int


def _number(rng: random.Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def _needle(rng: random.Random, keys: int) -> Question:
    names = rng.sample(_WORDS, keys)
    numbers = [_number(rng) for _ in names]
    parts = [
        f"The magic number of the {name} is {number}."
        for name, number in zip(names, numbers, strict=True)
    ]
    asked = rng.randrange(keys)
    question = (
        f"What is the magic number of the {names[asked]} in the text above? Answer with the number."
    )
    return Question(parts, lambda: rng.choice(_FILLER), question, (numbers[asked],), 16)


def _variables(rng: random.Random) -> Question:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names = ["".join(rng.sample(letters, 5)) for _ in range(8)]
    values = [_number(rng) for _ in range(2)]
    parts = []
    for chain, value in zip((names[:4], names[4:]), values, strict=True):
        parts.append(f"VAR {chain[0]} = {value}.")
        parts += [f"VAR {name} = VAR {before}." for before, name in pairwise(chain)]
    order = sorted(range(8), key=lambda at: (at % 4, at // 4))  # both chains, link by link
    question = (
        f"Which variables in the text above have the value {values[0]}, directly or through other "
        "variables? List their names."
    )
    shuffled = [parts[at] for at in order]
    return Question(shuffled, lambda: rng.choice(_FILLER), question, tuple(names[:4]), 48)


def _common_words(rng: random.Random) -> Question:
    words = rng.sample(_WORDS, len(_WORDS))
    common = words[:3]

    def filler() -> str:
        return rng.choice(common) if rng.random() < 0.4 else rng.choice(words[3:])

    question = "Which three words are the most frequent in the list above? List the three words."
    return Question([], filler, question, tuple(common), 24)


TASKS: dict[str, Callable[[random.Random], Question]] = {
    "needle": lambda rng: _needle(rng, 1),
    "multi_key": lambda rng: _needle(rng, 8),
    "variables": _variables,
    "common_words": _common_words,
}


def make_question(task: str, seed: int, num_pieces: int) -> tuple[str, Question]:
    """Return the text of a question, with `num_pieces` pieces of filler, and the question."""
    rng = random.Random(f"{task} {seed}")
    question = TASKS[task](rng)
    pieces = [question.filler() for _ in range(num_pieces)]
    places = sorted(rng.randrange(num_pieces + 1) for _ in question.parts)
    for place, part in reversed(list(zip(places, question.parts, strict=True))):
        pieces.insert(place, part)
    return " ".join(pieces), question


def score(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that the answer contains."""
    return sum(one in answer for one in expected) / len(expected)


def _prompt(engine: CPUPagedEngine, task: str, seed: int, context: int) -> tuple[list[int], Any]:
    """Return a chat prompt of about `context` tokens, never more."""
    sample, _ = make_question(task, seed, 200)
    each = len(engine.tokenizer.encode(sample)) / 200
    pieces = int((context - 200) / each)
    while True:
        text, question = make_question(task, seed, pieces)
        messages = [{"role": "user", "content": f"{text}\n\n{question.question}"}]
        ids = engine.tokenizer.encode_chat(messages)
        if len(ids) <= context - question.longest:
            return ids, question
        pieces -= max(1, pieces // 100)


def _row(engine: CPUPagedEngine, task: str, context: int, count: int) -> dict[str, Any]:
    scores, times, lengths = [], [], []
    for seed in range(count):
        ids, question = _prompt(engine, task, seed, context)
        started = time.perf_counter()
        result = engine.generate(ids, max_new_tokens=question.longest, temperature=0.0)
        times.append(time.perf_counter() - started)
        scores.append(score(result.output_text, question.expected))
        lengths.append(len(ids))
    return {
        "prefill": engine.config.prefill,
        "task": task,
        "questions": count,
        "tokens": statistics.median(lengths),
        "score": round(100 * statistics.fmean(scores), 1),
        "median_s": round(statistics.median(times), 2),
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", required=True, help="GGUF file or model directory")
    options.add_argument(
        "--context",
        type=int,
        default=8192,
        metavar="TOKENS",
        help="length of the prompts (default: %(default)s)",
    )
    options.add_argument("--count", type=int, default=20, help="questions per task")
    options.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks (default: all)"
    )
    options.add_argument(
        "--prefill",
        nargs="+",
        default=["exact", "sparse"],
        help="kinds of prefill to compare (default: %(default)s)",
    )
    options.add_argument(
        "--kv-cache-bits", type=int, default=8, help="bits per KV value (default: %(default)s)"
    )
    options.add_argument(
        "--threads", type=int, help="number of compute threads (default: all CPUs)"
    )
    chosen = options.parse_args()
    count = 1 if chosen.quick else chosen.count
    rows = []
    for prefill in chosen.prefill:
        with CPUPagedEngine.from_pretrained(
            chosen.model,
            prefill=prefill,
            kv_cache_bits=chosen.kv_cache_bits,
            num_threads=chosen.threads,
            max_model_len=chosen.context,
            max_num_seqs=1,
            num_blocks=chosen.context // 16 + 64,
        ) as engine:
            for task in chosen.tasks:
                rows.append(_row(engine, task, chosen.context, count))
                print(rows[-1], flush=True)
    report("long-context", rows, options=chosen, model=Path(chosen.model).name)


if __name__ == "__main__":
    main()
