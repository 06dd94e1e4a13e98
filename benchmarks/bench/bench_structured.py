"""Cost of structured output: decoding with and without a schema, first mask, slowest step.

    python benchmarks/bench/bench_structured.py        # 0.5B shape, a vocabulary of 151,936

The random model cannot answer, so a matching answer is given token by token. The computation is the
same. "sampled" rows are its own output at temperature 1, which is mostly one long string. Both
contenders generate the same number of tokens. Drafts are off, except in the last row of a task,
where tokens that the schema forces are drafted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import harness
from benchmarks.bench.bench_peers import parser_for_models
from benchmarks.data.given_answers import give_answers
from benchmarks.data.large_vocabulary import made_tokenizer, made_words
from benchmarks.data.random_model import kept_gguf
from benchmarks.data.shapes import SHAPES
from benchmarks.engine_parts import with_tokenizer
from kvboost_edge import CPUPagedEngine, EngineConfig, GenerationResult
from kvboost_edge.engine.grammar.compiler import GrammarCompiler
from kvboost_edge.engine.grammar.masks import GrammarConstraint
from kvboost_edge.engine.request.requested_grammar import read_grammar

_PROMPT = 256
_SPECIAL = 290  # rows without a token among the model's 151,936
_BARS = {"overhead": 0.02, "first mask, ms": 20.0, "slowest step, ms": 30.0}


class Task(NamedTuple):
    """A task for structured output.

    Attributes:
        name: Name of the task.
        options: Sampling options with the constraint.
        answer: An answer that matches.
    """

    name: str
    options: dict[str, Any]
    answer: str


def tasks() -> list[Task]:
    rng = random.Random(0)
    words = made_words(5000)

    def text(count: int) -> str:
        return " ".join(rng.choices(words, k=count))

    def person() -> dict[str, Any]:
        name = text(2)
        return {
            "name": name,
            "age": rng.randint(1, 99),
            "note": text(6),
            "score": rng.random(),
            "member": name < "m",
        }

    flat = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "note": {"type": "string", "maxLength": 200},
            "score": {"type": "number"},
            "member": {"type": "boolean"},
        },
        "required": ["name", "age", "note", "score", "member"],
        "additionalProperties": False,
    }
    deep: dict[str, Any] = {
        "type": "object",
        "properties": {
            "team": {"type": "array", "items": flat},
            "parent": {"anyOf": [flat, {"type": "null"}]},
        },
        "required": ["team"],
    }
    codes = [f"{first}-{second}" for first, second in zip(words[:400], words[400:800], strict=True)]
    mail = r"([a-z]{1,30}\.[a-z]{1,30}@[a-z]{2,20}\.(com|org)\n)+"
    free = [{text(1): text(4), text(1): [1, 2.5, None], text(1): {"a": text(3)}} for _ in range(30)]
    return [
        Task(
            "flat records", {"json_schema": _list(flat)}, json.dumps([person() for _ in range(30)])
        ),
        Task(
            "nested records",
            {"json_schema": _list(deep)},
            json.dumps([{"team": [person(), person()], "parent": person()} for _ in range(10)]),
        ),
        Task(
            "400 codes",
            {"json_schema": _list({"enum": codes})},
            json.dumps(rng.choices(codes, k=80)),
        ),
        Task("any objects", {"json_schema": _list({"type": "object"})}, json.dumps(free)),
        Task(
            "regular expression",
            {"regex": mail},
            "".join(
                f"{a}.{b}@{c}.com\n"
                for a, b, c in zip(words, words[1000:1080], words[2000:], strict=False)
            ),
        ),
    ]


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


class Clock:
    """Timer for the seconds that an engine's steps spend on grammars."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        for name in ("masked", "advance", "forced"):
            real = getattr(GrammarConstraint, name)
            setattr(GrammarConstraint, name, self._timed(real, begins=name == "masked"))

    def _timed(self, work: Callable[..., Any], *, begins: bool) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            result = work(*given)
            spent = time.perf_counter() - start
            if begins or not self.seconds:
                self.seconds.append(spent)
            else:
                self.seconds[-1] += spent
            return result

        return timed


class Bench:
    def __init__(
        self, engine: CPUPagedEngine, compiler: GrammarCompiler, options: argparse.Namespace
    ) -> None:
        self.engine = engine
        self.options = options
        self._compiler = compiler
        self.rows: list[dict[str, Any]] = []
        self._clock = Clock()
        self._prompt = np.random.default_rng(0).integers(0, 1000, _PROMPT).tolist()
        self._script: list[int] | None = None
        self._count = 0
        give_answers(lambda _: self._script)

    def vocabulary(self) -> None:
        """Measure the preparation of a vocabulary, which happens once per model."""
        self._row("vocabulary", "read, s", [self._seconds_of(lambda: self._make({"regex": "a"}))])

    def task(self, task: Task) -> None:
        made = [
            self._seconds_of(lambda: self._make(task.options))
            for _ in range(4 * self.options.rounds)
        ]
        self._row(task.name, "first mask, ms", [1e3 * seconds for seconds in made])
        answer = self.engine.tokenizer.encode(task.answer)[: self.options.tokens]
        self._script = answer
        self._count = len(answer)
        self._compare(task, {"temperature": 0.0})
        self._ahead(task)
        self._script = None
        self._compare(task, {"temperature": 1.0, "seed": 1}, how=", sampled")

    def _compare(self, task: Task, sampling: dict[str, Any], how: str = "") -> None:
        ratios = list[float]()
        spent = list[float]()
        slowest = list[float]()
        for number in range(self.options.rounds + 1):
            self._clock.seconds = []
            fitted = self._ask(sampling, self._count, task.options)
            steps = self._clock.seconds
            free = self._ask(sampling, fitted.generated_tokens, {})
            if number and len(steps) > 16:
                ratios.append(_behind_first(fitted) / _behind_first(free) - 1)
                spent.append(1e3 * sum(steps) / _behind_first(fitted))
                slowest.append(1e3 * max(steps))
        name = f"{task.name}{how}"
        if ratios:
            self._row(name, f"overhead ({fitted.generated_tokens} tokens)", ratios)
            self._row(name, "of the time spent on it", spent)
            self._row(name, "slowest step, ms", slowest)

    def _ahead(self, task: Task) -> None:
        """Decode with forced tokens as drafts."""
        ratios = []
        for number in range(self.options.rounds + 1):
            fitted = self._ask(
                {"temperature": 0.0}, self._count, {**task.options, "speculation": "auto"}
            )
            free = self._ask({"temperature": 0.0}, fitted.generated_tokens, {})
            if number:
                ratios.append(_behind_first(free) / _behind_first(fitted))
        share = f"{fitted.accepted_tokens} of {fitted.drafted_tokens} drafts"
        self._row(task.name, f"with drafts, times as fast ({share})", ratios)

    def _ask(
        self, sampling: dict[str, Any], count: int, options: dict[str, Any]
    ) -> GenerationResult:
        self.engine.reset_cache()
        return self.engine.generate(
            self._prompt,
            max_new_tokens=count,
            ignore_eos=not options,
            **{"speculation": "off", **options, **sampling},
        )

    def _make(self, options: dict[str, Any]) -> GrammarConstraint:
        grammar = read_grammar(options)
        assert grammar is not None
        return self._compiler.make(grammar)

    @staticmethod
    def _seconds_of(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def _row(self, task: str, measure: str, values: Sequence[float]) -> None:
        bar = next((bar for name, bar in _BARS.items() if measure.startswith(name)), None)
        row = {
            "task": task,
            "measure": measure,
            "median": statistics.median(values),
            "bar": bar,
            "most": max(values),
        }
        self.rows.append(row)
        print(f"{task}: {measure}: {row['median']:.4f} (most {row['most']:.4f})", flush=True)


def _behind_first(result: GenerationResult) -> float:
    """Return the milliseconds after the first token."""
    return result.token_times_ms[-1] - result.token_times_ms[0]


def main() -> None:
    options = parser_for_models(__doc__)
    harness.add_threads(options)
    options.add_argument("--tokens", type=int, default=200, help="number of tokens per answer")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.shape = "tiny"
        chosen.rounds = 1
        chosen.tokens = 64
    model = chosen.models / f"{chosen.shape}-{chosen.quant}.gguf"
    shape = SHAPES[chosen.shape]
    kept_gguf(model, shape, chosen.quant)
    config = EngineConfig.from_options(num_blocks=128, num_threads=chosen.threads)
    tokenizer, end = made_tokenizer(shape.vocab - _SPECIAL)
    with with_tokenizer(str(model), config, tokenizer, end) as engine:
        compiler = GrammarCompiler(tokenizer, shape.vocab, frozenset({end}))
        bench = Bench(engine, compiler, chosen)
        bench.vocabulary()
        for task in tasks():
            bench.task(task)
        compiler.close()
    harness.report("bench_structured", bench.rows, options=chosen, vocabulary=shape.vocab)


if __name__ == "__main__":
    main()
