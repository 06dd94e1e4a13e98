"""Retrieval and multi-hop questions about generated long texts.

The four tasks follow RULER (Hsieh et al., 2024):

- needle: one magic number is hidden among filler sentences.
- multi_key: several numbers are hidden, and one of them is asked for.
- variables: a chain of assignments is hidden among others; all variables with a value are asked
  for.
- common_words: a long list of words is given; the most frequent ones are asked for.

A question scores the share of expected strings that the greedy answer contains. The texts of a seed
are the same on every machine.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvboost_edge.errors import RequestError

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = [
    "LONGEST_ANSWER",
    "MIN_CONTEXT",
    "TASKS",
    "Question",
    "TaskScore",
    "has_room",
    "make_question",
    "score_answer",
    "score_task",
]

_SAMPLE = 200  # pieces of filler whose tokens are counted

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
    return Question(
        shuffled, lambda: rng.choice(_FILLER), question, tuple(names[:4]), LONGEST_ANSWER
    )


def _common_words(rng: random.Random) -> Question:
    words = rng.sample(_WORDS, len(_WORDS))
    common = words[:3]

    def filler() -> str:
        return rng.choice(common) if rng.random() < 0.4 else rng.choice(words[3:])

    question = "Which three words are the most frequent in the list above? List the three words."
    return Question([], filler, question, tuple(common), 24)


TASKS: Mapping[str, Callable[[random.Random], Question]] = {
    "needle": lambda rng: _needle(rng, 1),
    "multi_key": lambda rng: _needle(rng, 8),
    "variables": _variables,
    "common_words": _common_words,
}
"""Functions that make a question, by task."""
LONGEST_ANSWER = 48
"""Maximum number of tokens of an answer, in any task."""
MIN_CONTEXT = 256
"""Number of tokens below which a question of some task does not fit with usual tokenizers."""


def make_question(task: str, seed: int, num_pieces: int) -> tuple[str, Question]:
    """Return a long text and the question about it.

    Args:
        task: a key of `TASKS`.
        seed: seed of the text.
        num_pieces: pieces of filler in the text.
    """
    rng = random.Random(f"{task} {seed}")
    question = TASKS[task](rng)
    pieces = [question.filler() for _ in range(num_pieces)]
    places = sorted(rng.randrange(num_pieces + 1) for _ in question.parts)
    for place, part in reversed(list(zip(places, question.parts, strict=True))):
        pieces.insert(place, part)
    return " ".join(pieces), question


def score_answer(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that the answer contains."""
    return sum(one in answer for one in expected) / len(expected)


class _TooSmallError(RequestError):
    """The context is too small for a question."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskScore:
    """The score of an engine in one task.

    Attributes:
        task: name of the task.
        questions: number of questions.
        tokens: median number of tokens of the prompts.
        score: mean score of the answers, 0 to 1.
        seconds: median time of an answer.
    """

    task: str
    questions: int
    tokens: int
    score: float
    seconds: float


def score_task(
    engine: CPUPagedEngine,
    task: str,
    *,
    count: int,
    context: int,
    progress: Callable[[int], None] | None = None,
) -> TaskScore:
    """Answer questions of a task and score the answers. The questions depend on no option.

    Args:
        task: a key of `TASKS`.
        count: number of questions.
        context: maximum number of tokens of a prompt and its answer. Prompts are a
            little shorter.
        progress: called with the number of answers after each one.

    Raises:
        RequestError: `context` is too small for a question or exceeds the model's context, or the
            model has no chat template.
    """
    longest = engine.runner_info.max_context
    if context > longest:
        raise RequestError(
            f"context={context} must be at most {longest}, the model's context; lower it"
        )
    scores, lengths, times = [], [], []
    for seed in range(count):
        ids, question = _prompt(engine, task, seed, context)
        started = time.perf_counter()
        result = engine.generate(ids, max_new_tokens=question.longest, temperature=0.0)
        times.append(time.perf_counter() - started)
        scores.append(score_answer(result.output_text, question.expected))
        lengths.append(len(ids))
        if progress is not None:
            progress(seed + 1)
    return TaskScore(
        task,
        count,
        int(statistics.median(lengths)),
        statistics.fmean(scores),
        statistics.median(times),
    )


def has_room(engine: CPUPagedEngine, task: str, context: int) -> bool:
    """Return whether the first question of a task fits in `context` tokens with its answer."""
    try:
        _prompt(engine, task, 0, context)
    except _TooSmallError:
        return False
    return True


def _prompt(
    engine: CPUPagedEngine, task: str, seed: int, context: int
) -> tuple[list[int], Question]:
    """Return a chat prompt of about `context` tokens, never more, and its question."""
    encode = engine.tokenizer.encode
    sample, question = make_question(task, seed, _SAMPLE)
    room = context - question.longest - len(encode(" ".join(question.parts)))
    pieces = int(room * _SAMPLE / len(encode(sample)))
    while pieces > 0:
        text, question = make_question(task, seed, pieces)
        messages = [{"role": "user", "content": f"{text}\n\n{question.question}"}]
        ids = engine.tokenizer.encode_chat(messages, variables={"enable_thinking": False})
        if len(ids) <= context - question.longest:
            return ids, question
        pieces -= max(1, pieces // 100)
    raise _TooSmallError(
        f"a context of {context} tokens is too small for a question of the task {task}; give a "
        "larger one"
    )
