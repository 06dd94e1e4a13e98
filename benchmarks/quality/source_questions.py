"""`make quality-source`: accuracy of answers about source code with non-prefix KV reuse.

A context contains six functions of Python's standard library, each as a document. Each function has
one question: the default value of a parameter, or the exception that it raises. A greedy answer is
right if its first line is that value or name. Every question is asked in four ways:

    full          all documents in the prompt, computed exactly
    other order   the same, with the documents in reverse order
    reuse         mode="chunk_kv_reuse" with documents that were warmed one by one
    closed book   no documents, which shows the model's own knowledge of the library

The intervals are 95% Wilson intervals. The difference from `full` is paired. Its p-value is that of
the exact McNemar test, on questions where only one of the two answers is right.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import sys
import sysconfig
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import parser, report
from benchmarks.quality.chunk_reuse import wilson
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import GenerationMode

__all__ = ["Context", "Function", "contexts", "mcnemar", "right", "stdlib_functions"]

PER_CONTEXT = 6
LENGTHS = range(250, 1400)  # allowed length of a function in characters
ANSWER_TOKENS = 16
WAYS = ("full", "other order", "reuse", "closed book")
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
_MARK = "(the text)"


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function of the standard library and its question.

    Attributes:
        value: The right answer.
    """

    name: str
    source: str
    question: str
    value: str


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Functions with different names, in the order of the prompt."""

    functions: tuple[Function, ...]


def stdlib_functions() -> list[Function]:
    """Return the standard library functions for which there is a question."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Function] = {}
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT & set(path.relative_to(root).parts):
            for function in _functions_of(path):
                # names are unique, because questions refer to them
                found.setdefault(function.name, function)
    return list(found.values())


def _functions_of(path: Path) -> Iterator[Function]:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        asked = next(_questions(node), None) if len(source) in LENGTHS else None
        if asked is not None:
            yield Function(node.name, source, *asked)


def _questions(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield questions about a function with their answers."""
    for parameter, default in _defaults(node.args):
        if _tells_reading(default):
            yield (
                f"What is the default value of the parameter `{parameter}` of the function "
                f"`{node.name}`? Answer with the value alone.",
                str(ast.literal_eval(default)),
            )
    raised = {_raised(one) for one in ast.walk(node) if isinstance(one, ast.Raise)}
    if len(raised) == 1 and (name := raised.pop()) is not None:
        yield (
            f"Which exception does the function `{node.name}` raise? Answer with its name alone.",
            name,
        )


def _raised(node: ast.Raise) -> str | None:
    raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return raised.id if isinstance(raised, ast.Name) and raised.id[0].isupper() else None


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    """Yield each parameter that has a default, and the default's expression."""
    named = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    if arguments.defaults:
        yield from zip(named[-len(arguments.defaults) :], arguments.defaults, strict=True)
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            yield one.arg, default


def _tells_reading(default: ast.expr) -> bool:
    """Return whether a default is hard to guess, unlike None, a flag, 0, 1 or ""."""
    if not isinstance(default, ast.Constant) or isinstance(default.value, bool):
        return False
    value = default.value
    return isinstance(value, (int, float, str)) and str(value).strip() not in ("", "0", "1")


def contexts(functions: Sequence[Function], number: int, seed: str) -> list[Context]:
    """Return contexts of `PER_CONTEXT` functions, drawn with the seed.

    If there are too few functions, some occur in several contexts.
    """
    draw = random.Random(f"{seed} source questions")
    drawn: list[Function] = []
    while len(drawn) < number * PER_CONTEXT:
        drawn += draw.sample(functions, len(functions))
    groups = [drawn[at : at + PER_CONTEXT] for at in range(0, number * PER_CONTEXT, PER_CONTEXT)]
    return [Context(tuple(dict.fromkeys(group))) for group in groups]


def right(answer: str, value: str) -> bool:
    """Return whether the answer's first line is the value, possibly in quotes or as code."""
    line = answer.strip().split("\n")[0].strip().rstrip(".").strip("`'\" ")
    return line == value.strip("'\" ")


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test."""
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**total)


class Asker:
    """Builder of an engine's prompts from tokens, so that documents are found in the cache."""

    def __init__(self, engine: CPUPagedEngine) -> None:
        self._engine = engine
        text = engine.tokenizer.apply_chat_template([{"role": "user", "content": _MARK}])
        before, after = text.split(_MARK)
        self._before = engine.tokenizer.encode(before, False)
        self._after = engine.tokenizer.encode(after, False)

    def document(self, function: Function) -> list[int]:
        return self._engine.tokenizer.encode(f"{function.source}\n\n", False)

    def prompt(self, documents: Sequence[Sequence[int]], question: str) -> list[int]:
        asked = self._engine.tokenizer.encode(question, False)
        return [*self._before, *(id for one in documents for id in one), *asked, *self._after]

    def ask(self, context: Context) -> Iterator[dict[str, Any]]:
        """Ask every question of a context in every way and yield one row per question."""
        engine = self._engine
        engine.reset_cache()
        documents = [self.document(one) for one in context.functions]
        engine.warm(documents=documents, cache_salt="reuse")
        for function in context.functions:
            plain = self.prompt(documents, function.question)
            prompts = {
                "full": plain,
                "other order": self.prompt(documents[::-1], function.question),
                "reuse": plain,
                "closed book": self.prompt([], function.question),
            }
            row: dict[str, Any] = {"function": function.name, "tokens": len(plain)}
            for way in WAYS:
                options: dict[str, Any] = {"cache_salt": "full"}
                if way == "reuse":
                    options = {"cache_salt": "reuse", "mode": GenerationMode.CHUNK_KV_REUSE}
                result = engine.generate(prompts[way], ANSWER_TOKENS, **options)
                row[way] = right(result.output_text, function.value)
                row[f"{way} text"] = result.output_text
                if way == "reuse":
                    row["reused"] = result.reused_span_tokens / len(plain)
            yield row


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per way: its accuracy with interval, and the paired difference from `full`."""
    found = []
    for way in WAYS:
        hits = sum(row[way] for row in rows)
        pairs = Counter((row["full"], row[way]) for row in rows)
        low, high = wilson(hits, len(rows)) or (0.0, 1.0)
        found.append(
            {
                "way": way,
                "questions": len(rows),
                "right": hits,
                "accuracy": round(hits / len(rows), 3),
                "low": round(low, 3),
                "high": round(high, 3),
                "only full right": pairs[True, False],
                "only this right": pairs[False, True],
                "p": round(mcnemar(pairs[True, False], pairs[False, True]), 3),
                "same text as full": round(
                    sum(row[f"{way} text"] == row["full text"] for row in rows) / len(rows), 3
                ),
                "reused": round(sum(row["reused"] for row in rows) / len(rows), 3)
                if way == "reuse"
                else 0.0,
            }
        )
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--model", required=True, help="model directory or GGUF file")
    options.add_argument(
        "--questions", type=int, default=300, help="number of questions (default: 300)"
    )
    options.add_argument("--seed", default="reported", help="seed for drawing functions")
    given = options.parse_args()
    wanted = 12 if given.quick else given.questions
    drawn = contexts(stdlib_functions(), -(-wanted // PER_CONTEXT), given.seed)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with CPUPagedEngine.from_pretrained(given.model, num_blocks=1024, reuse_gate="off") as engine:
        asker = Asker(engine)
        for context in drawn:
            rows += asker.ask(context)
            hits = ", ".join(f"{way} {sum(row[way] for row in rows)}" for way in WAYS)
            seconds = time.monotonic() - began
            print(f"{len(rows)} of {wanted} questions, {seconds:.0f} s: {hits}", flush=True)
    report(
        "quality-source",
        summary(rows[:wanted]),
        options=given,
        model=Path(given.model).name,
        tokens=round(sum(row["tokens"] for row in rows) / len(rows)),
    )


if __name__ == "__main__":
    main()
