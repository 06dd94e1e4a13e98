"""The `kvboost-edge eval` command, for perplexity and the effect of weight and KV formats."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn
from rich.table import Table

from kvboost_edge import shareable
from kvboost_edge.cli.console import open_console, piped_text, text_column
from kvboost_edge.cli.option_parsing import engine_options
from kvboost_edge.cli.session import loaded_engine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.perplexity import MIN_WINDOW, TextScore, score_text
from kvboost_edge.errors import ConfigError, RequestError

__all__ = ["parse_against", "run_eval"]


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
    others = [(text, {**options, **parse_against(text)}) for text in against]
    # Fail before any model is loaded.
    if window is not None and window < MIN_WINDOW:
        raise ConfigError(f"--window {window} is too small; give at least {MIN_WINDOW} tokens")
    own = EngineConfig.from_options(**options)
    for text, changed in others:
        if EngineConfig.from_options(**changed) == own:
            raise ConfigError(
                f"--against {text} changes no option, so both sides would be equal; give another "
                "value, or change the model's own with -o"
            )
    text = _read(file)
    notes = open_console(stderr=True, quiet=as_json)
    with loaded_engine(model, options, notes) as engine:
        ids = engine.tokenizer.encode(text)
        size = min(512, engine.runner_info.max_context) if window is None else window
        _check_prefill(options, others, min(size, len(ids)) - 1)
        num_leading = len(engine.tokenizer.leading_ids)
        scores: list[tuple[str, TextScore]] = []
        if not others:
            with _bar(notes, "scoring") as progress:
                score = score_text(
                    engine, ids, window=size, num_leading=num_leading, progress=progress
                )
                scores.append(("", score))
        for name, changed in others:
            with (
                loaded_engine(model, changed, notes) as other,
                _bar(notes, f"against {name}") as progress,
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


def _check_prefill(
    options: dict[str, Any], others: Sequence[tuple[str, dict[str, Any]]], longest: int
) -> None:
    """Check that prompts of at most `longest` tokens can show the effect of sparse prefill."""
    own = EngineConfig.from_options(**options)
    for text, changed in others:
        other = EngineConfig.from_options(**changed)
        if own.prefill == other.prefill:
            continue
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
def _bar(notes: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar that counts tokens."""
    columns = (
        text_column("{task.description}"),
        BarColumn(),
        text_column("{task.completed:.0f} of {task.total:.0f} tokens"),
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


def _plain(name: str, score: TextScore) -> dict[str, Any]:
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
