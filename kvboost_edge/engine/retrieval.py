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
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvboost_edge.errors import RequestError

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = [
    "FILLER",
    "LONGEST_ANSWER",
    "MIN_CONTEXT",
    "TASKS",
    "LongText",
    "Question",
    "TaskScore",
    "has_room",
    "make_text",
    "score_answer",
    "score_task",
]

_SAMPLE = 200  # pieces of filler whose tokens are counted

FILLER = (
    "The grass is green, the sky is blue and the sun is yellow.",
    "Trains leave the station every hour, and most of them are on time.",
    "A baker gets up early, long before the first guests of the day arrive.",
    "Rivers carry sand to the sea, where it forms beaches and islands.",
    "The library opens at nine and closes when the last reader has left.",
    "In winter the lake freezes, and children skate on it until dark.",
)
"""Sentences between which facts are hidden."""
_WORDS = (
    *("anchor", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island"),
    *("jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "quarry", "ribbon"),
    *("saddle", "tunnel", "umbrella", "valley", "window", "yellow", "zipper", "bottle", "copper"),
    *("desert", "falcon", "glacier", "harbor", "insect", "jungle", "kitten", "lemon", "marble"),
)


class Question(NamedTuple):
    """A question about a text, and the strings that the answer must contain."""

    question: str
    expected: tuple[str, ...]


class LongText(NamedTuple):
    """The content of a text, and questions about it.

    Attributes:
        parts: sentences of the text that filler is inserted between.
        filler: function that returns another piece of filler.
        questions: the questions about the text, in random order.
        longest: maximum number of tokens of an answer.
    """

    parts: list[str]
    filler: Callable[[], str]
    questions: list[Question]
    longest: int


def _number(rng: random.Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def _needle(rng: random.Random, keys: int) -> LongText:
    names = rng.sample(_WORDS, keys)
    numbers = [_number(rng) for _ in names]
    parts = [
        f"The magic number of the {name} is {number}."
        for name, number in zip(names, numbers, strict=True)
    ]
    questions = [
        Question(
            f"What is the magic number of the {name} in the text above? Answer with the number.",
            (number,),
        )
        for name, number in zip(names, numbers, strict=True)
    ]
    rng.shuffle(questions)  # the first ones must not ask for the start of the text
    return LongText(parts, lambda: rng.choice(FILLER), questions, 16)


def _variables(rng: random.Random) -> LongText:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names = ["".join(rng.sample(letters, 5)) for _ in range(8)]
    values = [_number(rng) for _ in range(2)]
    chains = (names[:4], names[4:])
    parts = []
    for chain, value in zip(chains, values, strict=True):
        parts.append(f"VAR {chain[0]} = {value}.")
        parts += [f"VAR {name} = VAR {before}." for before, name in itertools.pairwise(chain)]
    order = sorted(range(8), key=lambda at: (at % 4, at // 4))  # both chains, link by link
    shuffled = [parts[at] for at in order]
    questions = [
        Question(
            f"Which variables in the text above have the value {value}, directly or through other "
            "variables? List their names.",
            tuple(chain),
        )
        for chain, value in zip(chains, values, strict=True)
    ]
    rng.shuffle(questions)
    return LongText(shuffled, lambda: rng.choice(FILLER), questions, LONGEST_ANSWER)


def _common_words(rng: random.Random) -> LongText:
    words = rng.sample(_WORDS, len(_WORDS))
    common = words[:3]

    def filler() -> str:
        return rng.choice(common) if rng.random() < 0.4 else rng.choice(words[3:])

    question = "Which three words are the most frequent in the list above? List the three words."
    return LongText([], filler, [Question(question, tuple(common))], 24)


TASKS: Mapping[str, Callable[[random.Random], LongText]] = {
    "needle": lambda rng: _needle(rng, 1),
    "multi_key": lambda rng: _needle(rng, 8),
    "variables": _variables,
    "common_words": _common_words,
}
"""Functions that make the content of a text, by task."""
LONGEST_ANSWER = 48
"""Maximum number of tokens of an answer, in any task."""
MIN_CONTEXT = 256
"""Number of tokens below which a question of some task does not fit with usual tokenizers."""


def make_text(task: str, seed: int, num_pieces: int) -> tuple[str, LongText]:
    """Return a long text and its content.

    Args:
        task: a key of `TASKS`.
        seed: seed of the text.
        num_pieces: pieces of filler in the text.
    """
    rng = random.Random(f"{task} {seed}")
    content = TASKS[task](rng)
    pieces = [content.filler() for _ in range(num_pieces)]
    places = sorted(rng.randrange(num_pieces + 1) for _ in content.parts)
    for place, part in reversed(list(zip(places, content.parts, strict=True))):
        pieces.insert(place, part)
    return " ".join(pieces), content


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
        seconds: median time of the first answer about each text. Prefix caching makes the others
            faster.
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

    Asks all questions about a text one after another, so that they share its KV cache.

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
    scores: list[float] = []
    lengths, times = [], []
    for asked in itertools.islice(_questions(engine, task, context), count):
        started = time.perf_counter()
        result = engine.generate(asked.ids, max_new_tokens=asked.longest, temperature=0.0)
        if asked.is_first:
            times.append(time.perf_counter() - started)
        scores.append(score_answer(result.output_text, asked.expected))
        lengths.append(len(asked.ids))
        if progress is not None:
            progress(len(scores))
    return TaskScore(
        task,
        count,
        int(statistics.median(lengths)),
        statistics.fmean(scores),
        statistics.median(times),
    )


def has_room(engine: CPUPagedEngine, task: str, context: int) -> bool:
    """Return whether the first questions of a task fit in `context` tokens with their answers."""
    try:
        _prompts(engine, task, 0, context)
    except _TooSmallError:
        return False
    return True


class _Prompt(NamedTuple):
    """A prompt with a question, and whether it is the first one about its text."""

    ids: list[int]
    expected: tuple[str, ...]
    longest: int
    is_first: bool


def _questions(engine: CPUPagedEngine, task: str, context: int) -> Iterator[_Prompt]:
    """Yield the questions of a task, text by text, without end."""
    for seed in itertools.count():
        yield from _prompts(engine, task, seed, context)


def _prompts(engine: CPUPagedEngine, task: str, seed: int, context: int) -> list[_Prompt]:
    """Return a chat prompt of about `context` tokens, never more, for each question of a text."""
    encode = engine.tokenizer.encode
    sample, content = make_text(task, seed, _SAMPLE)
    room = context - content.longest - len(encode(" ".join(content.parts)))
    pieces = int(room * _SAMPLE / len(encode(sample)))
    while pieces > 0:
        text, content = make_text(task, seed, pieces)
        prompts = [
            _Prompt(_encode(engine, text, question), question.expected, content.longest, index == 0)
            for index, question in enumerate(content.questions)
        ]
        if all(len(prompt.ids) <= context - prompt.longest for prompt in prompts):
            return prompts
        pieces -= max(1, pieces // 100)
    raise _TooSmallError(
        f"a context of {context} tokens is too small for a question of the task {task}; give a "
        "larger one"
    )


def _encode(engine: CPUPagedEngine, text: str, question: Question) -> list[int]:
    messages = [{"role": "user", "content": f"{text}\n\n{question.question}"}]
    return engine.tokenizer.encode_chat(messages, variables={"enable_thinking": False})
