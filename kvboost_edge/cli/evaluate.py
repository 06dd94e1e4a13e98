"""The `kvboost-edge eval` command, for perplexity, retrieval and the effect of engine options."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table

from kvboost_edge import shareable
from kvboost_edge.cli.console import counted, open_console, piped_text, text_column
from kvboost_edge.cli.option_parsing import engine_options
from kvboost_edge.cli.session import loaded_engine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.perplexity import MIN_WINDOW, TextScore, score_text
from kvboost_edge.engine.retrieval import (
    LONGEST_ANSWER,
    MIN_CONTEXT,
    TASKS,
    TaskScore,
    has_room,
    score_task,
)
from kvboost_edge.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["parse_against", "run_eval", "run_retrieval"]

_RETRIEVAL_WINDOW = 8192  # tokens


def run_eval(
    file: str,
    model: str,
    options: dict[str, Any],
    against: Sequence[str],
    *,
    window: int | None,
    as_json: bool,
) -> None:
    """Print the perplexity, and the divergence for each set of options in `against`.

    Loads an engine for each of these sets, one after another, while the first engine stays loaded.
    """
    others = _configurations(options, against)
    if window is not None and window < MIN_WINDOW:
        raise ConfigError(f"--window {window} is too small; give at least {MIN_WINDOW} tokens")
    text = _read(file)
    notes = open_console(stderr=True, quiet=as_json)
    with loaded_engine(model, options, notes) as engine:
        ids = engine.tokenizer.encode(text)
        size = min(512, engine.runner_info.max_context) if window is None else window
        _check_prefill(options, others, min(size, len(ids)) - 1)
        num_leading = len(engine.tokenizer.leading_ids)
        scores: list[tuple[str, TextScore]] = []
        if not others:
            with _bar(notes, "scoring", "tokens") as progress:
                score = score_text(
                    engine, ids, window=size, num_leading=num_leading, progress=progress
                )
                scores.append(("", score))
        for name, changed in others:
            with (
                loaded_engine(model, changed, notes) as other,
                _bar(notes, f"against {name}", "tokens") as progress,
            ):
                score = score_text(
                    engine,
                    ids,
                    window=size,
                    num_leading=num_leading,
                    against=other,
                    progress=progress,
                )
                scores.append((name, score))
        form = f"{engine.runner_info.dtype} weights"
    if as_json:
        print(
            json.dumps(
                {
                    "model": model,
                    "file": file,
                    "scores": [_plain(name, score) for name, score in scores],
                }
            )
        )
    else:
        _show(scores, form)


def run_retrieval(
    count: int,
    model: str,
    options: dict[str, Any],
    against: Sequence[str],
    *,
    window: int | None,
    as_json: bool,
) -> None:
    """Print the scores in tasks of `count` questions each, also for each set of options.

    Loads one engine at a time.
    """
    others = _configurations(options, against)
    configurations = [("", options), *others]
    if window is not None and window < MIN_CONTEXT:
        raise ConfigError(
            f"--window {window} is too small for --retrieval; give at least {MIN_CONTEXT} tokens"
        )
    size = _RETRIEVAL_WINDOW if window is None else window
    for name, changed in configurations:
        limit = EngineConfig.from_options(**changed).max_model_len or size
        if window is None:
            size = min(size, limit)
        _check_context(name, size, limit)
    notes = open_console(stderr=True, quiet=as_json)
    found: list[tuple[str, list[TaskScore]]] = []
    forms = []
    for name, changed in configurations:
        with loaded_engine(model, changed, notes) as engine:
            longest = engine.runner_info.max_context
            if not name:  # all engines answer the same questions, so they share one size
                size = min(size, longest) if window is None else size
                _check_prefill(options, others, size - LONGEST_ANSWER)
            _check_context(name, size, longest)
            _check_room(engine, size)
            scores = []
            with _bar(notes, name or "scoring", "questions") as progress:
                for index, task in enumerate(TASKS):

                    def report(done: int, before: int = count * index) -> None:
                        progress(before + done, count * len(TASKS))

                    scores.append(
                        score_task(engine, task, count=count, context=size, progress=report)
                    )
            found.append((name, scores))
            forms.append(f"{engine.runner_info.dtype} weights")
    if as_json:
        rows = [_plain(name, score) for name, scores in found for score in scores]
        print(json.dumps({"model": model, "window": size, "retrieval": rows}))
    else:
        _show_retrieval(found, forms[0], size)


def _check_context(name: str, size: int, longest: int) -> None:
    """Check that a window of `size` tokens fits the context of an engine, `longest` tokens."""
    if size > longest:
        whose = f"of --against {name}" if name else "length"
        raise ConfigError(
            f"a window of {size} tokens exceeds the context {whose}; give a --window of at most "
            f"{longest}"
        )


def _check_room(engine: CPUPagedEngine, size: int) -> None:
    """Check that a window of `size` tokens has room for a question of each task."""
    for task in TASKS:
        if not has_room(engine, task, size):
            raise ConfigError(
                f"a window of {size} tokens is too small for a question of the task {task}; give "
                "a larger --window, or a model with a longer context"
            )


def _configurations(
    options: dict[str, Any], against: Sequence[str]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the options to compare with, by their text, or fail before any model is loaded."""
    others = [(text, {**options, **parse_against(text)}) for text in against]
    own = EngineConfig.from_options(**options)
    for text, changed in others:
        if EngineConfig.from_options(**changed) == own:
            raise ConfigError(
                f"--against {text} changes no option, so both sides would be equal; give another "
                "value, or change the model's own with -o"
            )
    return others


def _check_prefill(
    options: dict[str, Any], others: Sequence[tuple[str, dict[str, Any]]], longest: int
) -> None:
    """Check that prompts of at most `longest` tokens can show the effect of sparse prefill."""
    own = EngineConfig.from_options(**options)
    for text, changed in others:
        other = EngineConfig.from_options(**changed)
        if own.prefill == other.prefill:
            continue
        if "on-request" in (own.prefill, other.prefill):
            raise ConfigError(
                "prefill='on-request' is exact, because the prompts of this command do not ask for "
                "sparse prefill; use prefill='sparse'"
            )
        size = (own if own.prefill == "sparse" else other).block_size
        if shareable.sparse_end(longest, size) == shareable.FIRST_POSITION:
            least = shareable.FIRST_POSITION + shareable.DENSE_TAIL + size
            raise ConfigError(
                f"--against {text} would show no effect of sparse prefill: the longest prompt has "
                f"{longest:,} tokens, and those of fewer than {least:,} are computed exactly; give "
                "a larger --window, and a text that is as long"
            )


def parse_against(text: str) -> dict[str, Any]:
    """Parse the value of an `--against` flag: NAME=VALUE pairs separated by commas.

    A value may contain a comma, such as 8,4.
    """
    if not text.strip():
        raise ConfigError(
            "--against is empty; give engine options such as weights=int4 or kv_cache_bits=8,4"
        )
    return engine_options(re.split(r",(?=[A-Za-z_]+=)", text))


def _read(file: str) -> str:
    try:
        return piped_text() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}") from error


@contextmanager
def _bar(notes: Console, what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar that counts tokens or questions."""
    columns = (
        text_column("{task.description}"),
        BarColumn(),
        text_column(f"{{task.completed:.0f}} of {{task.total:.0f}} {unit}"),
    )
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plain(name: str, score: TextScore | TaskScore) -> dict[str, Any]:
    return {"against": name or None, **dataclasses.asdict(score)}


def _show(scores: Sequence[tuple[str, TextScore]], form: str) -> None:
    first = scores[0][1]
    table = Table(
        title=f"{first.scored_tokens:,} tokens, windows of {first.window}", title_justify="left"
    )
    table.add_column("")
    for column in ("perplexity", "mean KL", "max KL", "same top token"):
        table.add_column(column, justify="right")
    table.add_row(form, f"{first.perplexity:.4f}", "", "", "")
    for name, score in scores:
        if score.difference is not None:
            apart = score.difference
            cells = (f"{apart.mean_kl:.2e}", f"{apart.max_kl:.2e}", f"{apart.top1_agreement:.2%}")
            table.add_row(name, f"{apart.perplexity:.4f}", *cells)
    open_console().print(table)


def _show_retrieval(
    found: Sequence[tuple[str, Sequence[TaskScore]]], form: str, window: int
) -> None:
    questions = counted(found[0][1][0].questions, "question", "questions")
    table = Table(title=f"{questions} per task, windows of {window:,}", title_justify="left")
    table.add_column("")
    for name, _ in found:
        table.add_column(name or form, justify="right")
    for row in zip(*(scores for _, scores in found), strict=True):
        table.add_row(row[0].task, *(f"{score.score:.1%}" for score in row))
    means = (statistics.fmean(score.score for score in scores) for _, scores in found)
    table.add_row("mean", *(f"{mean:.1%}" for mean in means))
    open_console().print(table)
