"""Retrieval and multi-hop questions about long texts, with exact and sparse prefill.

    python benchmarks/quality/long_context.py --model FILE --lengths 8192 16384 30000 --texts 2

The tasks are those of RULER (Hsieh et al., 2024), as in `kvboost-edge eval --retrieval`. There,
each text is prefilled for one task and length. Here, a text serves many questions, because long
prefills are slow:

- A text holds single numbers (needle), many similar numbers (multi_key) and chains of assignments
  (variables) among filler sentences. A second text is a list of words (common_words).
- A question about a length reads that much of the text, and asks for what occurs there. All
  questions of a text share its KV cache.

Both kinds of prefill answer the same questions. A question scores the share of expected strings
that the greedy answer contains. The last columns count the questions that sparse prefill answers
better and worse.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import parser, report
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.retrieval import FILLER, score_answer

KEYS, NEEDLES, CHAINS = 16, 3, 3  # per length
LINKS = 4
LONGEST = 48  # tokens of an answer
ROOM = 160  # tokens of the template, a question and its answer
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
COLORS = "amber black brown cobalt copper crimson green grey indigo ivory olive scarlet".split()
THINGS = (
    "anchor basket candle dragon engine feather garden hammer kettle ladder mirror saddle".split()
)
CITIES = "Athens Bergen Cairo Dublin Essen Faro Geneva Havana Izmir Jakarta Kyoto Lisbon".split()
WORDS = (
    "bottle copper desert falcon glacier harbor insect jungle kitten lemon marble needle orange "
    "pencil quarry ribbon tunnel umbrella valley window yellow zipper island jacket"
).split()


class Question(NamedTuple):
    """A question about the first part of a text.

    Attributes:
        task: name of the task.
        section: number of the last section of the text that is read.
        text: the question.
        expected: strings that the answer must contain.
    """

    task: str
    section: int
    text: str
    expected: tuple[str, ...]


class LongText(NamedTuple):
    """The sections of a text, each ending at one of the lengths, and the questions about it."""

    sections: list[str]
    questions: list[Question]


def _scatter(rng: random.Random, facts: Sequence[str], pieces: list[str]) -> str:
    """Return the pieces with the facts, in their order, at random places."""
    places = sorted(rng.randrange(len(pieces) + 1) for _ in facts)
    for place, fact in reversed(list(zip(places, facts, strict=True))):
        pieces.insert(place, fact)
    return " ".join(pieces)


def facts_text(rng: random.Random, sizes: Sequence[int]) -> LongText:
    """Return a text of facts among filler, and questions about them.

    Args:
        rng: source of names, numbers and places.
        sizes: number of filler sentences of each section.
    """
    names = [f"{color} {thing}" for color in COLORS for thing in THINGS]
    rng.shuffle(names)
    cities = rng.sample(CITIES, len(CITIES))
    keys: list[Question] = []
    needles: list[Question] = []
    chains: list[Question] = []
    sections, questions = [], []
    for section, size in enumerate(sizes):
        facts = []
        for _ in range(KEYS):
            name, number = names.pop(), str(rng.randrange(100_000, 1_000_000))
            facts.append(f"The magic number of the {name} is {number}.")
            text = f"What is the magic number of the {name} in the text above? Answer with it."
            keys.append(Question("multi_key", section, text, (number,)))
        for _ in range(NEEDLES):
            city, number = cities.pop(), str(rng.randrange(1_000, 10_000))
            facts.append(f"The night train to {city} leaves from platform {number}.")
            text = f"From which platform does the night train to {city} leave? Answer with it."
            needles.append(Question("needle", section, text, (number,)))
        rng.shuffle(facts)
        links = []
        for _ in range(CHAINS):
            chain = ["".join(rng.sample(LETTERS, 5)) for _ in range(LINKS)]
            value = str(rng.randrange(10_000, 100_000))
            links.append(
                [
                    f"VAR {chain[0]} = {value}.",
                    *(f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(chain)),
                ]
            )
            text = (
                f"Which {LINKS} variables in the text above have the value {value}, directly or "
                "through other variables? List their names."
            )
            chains.append(Question("variables", section, text, tuple(chain)))
        for step in range(LINKS):  # a chain's links stay in order
            at = [round(len(facts) * (step + 1) / (LINKS + 1))] * len(links)
            for place, chain_links in zip(at, links, strict=True):
                facts.insert(place + step, chain_links[step])
        sections.append(_scatter(rng, facts, [rng.choice(FILLER) for _ in range(size)]))
        for kind, count in ((keys, KEYS), (needles, NEEDLES), (chains, CHAINS)):
            for one in rng.sample(kind, count):
                questions.append(one._replace(section=section))
    return LongText(sections, questions)


def words_text(rng: random.Random, sizes: Sequence[int]) -> LongText:
    """Return a list of words, and for each section the question for the most frequent ones."""
    words = rng.sample(WORDS, len(WORDS))
    common = words[:3]
    text = "Which three words are the most frequent in the list above? List the three words."
    sections = [
        " ".join(
            rng.choice(common) if rng.random() < 0.4 else rng.choice(words[3:]) for _ in range(size)
        )
        for size in sizes
    ]
    questions = [
        Question("common_words", section, text, tuple(common)) for section in range(len(sizes))
    ]
    return LongText(sections, questions)


def fitted(engine: CPUPagedEngine, make: Any, seed: str, lengths: Sequence[int]) -> LongText:
    """Return a text whose first sections fit the lengths, with a question and an answer."""
    encode = engine.tokenizer.encode
    sizes = [64] * len(lengths)
    for _ in range(4):
        sections = make(random.Random(seed), sizes).sections
        ends = [len(encode(" ".join(sections[: at + 1]))) for at in range(len(lengths))]
        starts = [0, *ends]
        wanted = [0, *(length - ROOM for length in lengths)]
        sizes = [
            max(1, round(size * (wanted[at + 1] - wanted[at]) / (ends[at] - starts[at]) - 0.5))
            for at, size in enumerate(sizes)
        ]
    return make(random.Random(seed), sizes)


def prompts(engine: CPUPagedEngine, text: LongText) -> Iterator[tuple[Question, list[int]]]:
    """Yield each question with its chat prompt, the longest prompt first."""
    for question in sorted(text.questions, key=lambda one: -one.section):
        shown = " ".join(text.sections[: question.section + 1])
        messages = [{"role": "user", "content": f"{shown}\n\n{question.text}"}]
        yield question, engine.tokenizer.encode_chat(messages, variables={"enable_thinking": False})


def ask(chosen: Any, prefill: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the answered questions of all texts, and the seconds of the first of each text."""
    answered, firsts = [], []
    longest = max(chosen.lengths)
    with CPUPagedEngine.from_pretrained(
        chosen.model,
        prefill=prefill,
        kv_cache_bits=chosen.kv_cache_bits,
        num_threads=chosen.threads,
        max_model_len=longest,
        max_num_seqs=1,
        num_blocks=longest // 16 + 128,
    ) as engine:
        makers = {"facts": facts_text, "words": words_text}
        for kind, count in (("facts", chosen.texts), ("words", chosen.word_lists)):
            for seed in range(chosen.first, chosen.first + count):
                text = fitted(engine, makers[kind], f"{kind} {seed}", chosen.lengths)
                for index, (question, ids) in enumerate(prompts(engine, text)):
                    started = time.perf_counter()
                    result = engine.generate(ids, max_new_tokens=LONGEST, temperature=0.0)
                    seconds = time.perf_counter() - started
                    if index == 0:
                        firsts.append(seconds)
                    answered.append(
                        {
                            "text": f"{kind} {seed}",
                            "task": question.task,
                            "length": chosen.lengths[question.section],
                            "tokens": len(ids),
                            "score": score_answer(result.output_text, question.expected),
                        }
                    )
                done = statistics.fmean(one["score"] for one in answered)
                print(
                    f"{prefill}: {kind} {seed}, {len(answered)} questions, {done:.3f}", flush=True
                )
    return answered, firsts


def rows_of(answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the mean scores in percent by length and task, and for all questions."""
    first = next(iter(answers.values()))
    groups = [*sorted({(one["length"], one["task"]) for one in first}), (0, "all")]
    rows = []
    for length, task in groups:
        chosen = [
            at
            for at, one in enumerate(first)
            if task == "all" or (one["length"], one["task"]) == (length, task)
        ]
        scores = {name: [found[at]["score"] for at in chosen] for name, found in answers.items()}
        row: dict[str, Any] = {"length": length or "all", "task": task, "questions": len(chosen)}
        row |= {name: round(100 * statistics.fmean(found), 1) for name, found in scores.items()}
        if len(scores) == 2:
            one, other = scores.values()
            row["better"] = sum(b > a for a, b in zip(one, other, strict=True))
            row["worse"] = sum(b < a for a, b in zip(one, other, strict=True))
        rows.append(row)
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", required=True, help="GGUF file or model directory")
    options.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[8192, 16384, 30000],
        metavar="TOKENS",
        help="lengths of the prompts with their answers, ascending (default: 8192 16384 30000)",
    )
    options.add_argument("--texts", type=int, default=2, help="texts of facts (default: 2)")
    options.add_argument("--word-lists", type=int, default=1, help="lists of words (default: 1)")
    options.add_argument("--first", type=int, default=0, help="seed of the first text (default: 0)")
    options.add_argument(
        "--prefill",
        nargs="+",
        default=["exact", "sparse"],
        help="kinds of prefill to compare (default: exact sparse)",
    )
    options.add_argument(
        "--kv-cache-bits", type=int, default=8, help="bits per KV value (default: %(default)s)"
    )
    options.add_argument(
        "--threads", type=int, help="number of compute threads (default: all CPUs)"
    )
    chosen = options.parse_args()
    if chosen.quick:
        chosen.lengths, chosen.texts = [1024, 8704], 1
    answers, seconds = {}, {}
    for prefill in chosen.prefill:
        answers[prefill], seconds[prefill] = ask(chosen, prefill)
    print({name: [round(one, 1) for one in found] for name, found in seconds.items()})
    report("long-context", rows_of(answers), options=chosen, model=Path(chosen.model).name)


if __name__ == "__main__":
    main()
