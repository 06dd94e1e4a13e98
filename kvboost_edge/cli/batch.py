"""The `kvboost-edge batch` command, which answers a file of requests without a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from kvboost_edge.cli.console import counted, open_console, text_column
from kvboost_edge.cli.session import loaded_engine
from kvboost_edge.errors import (
    BackendUnavailable,
    ConfigError,
    KVBoostError,
    RequestError,
    install_extra,
)

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.server.batches.execution import LineRecords
    from kvboost_edge.server.batches.input_lines import BatchLine
    from kvboost_edge.server.batches.route_calls import LineAnswer

__all__ = ["run_batch_file"]

_SHOWN_PROBLEMS = 5
_MAX_LINES = 10_000_000
_MAX_LINE_BYTES = 1 << 28
_SECONDS = 1e8  # time limit of a line, about 3 years


def run_batch_file(file: str, output: str | None, model: str, options: dict[str, Any]) -> None:
    """Answer the lines of a file that have no answer yet.

    Args:
        file: File with one request per line, in the format of OpenAI's batch API.
        output: File for the answers. Lines that fail are written to a second file, whose name ends
            in ".errors.jsonl".
        model: Path or id of the model, which answers all lines whatever model they name.
        options: Engine options.

    Raises:
        KVBoostError: the file has wrong lines, or a file cannot be read or written.
    """
    try:
        from kvboost_edge.server.batches.answered_lines import RecordFile
        from kvboost_edge.server.batches.execution import LineRecords
        from kvboost_edge.server.batches.input_lines import by_prefix, read_lines
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"batch needs the package {error.name!r}; install the extra: {install_extra('server')}"
        ) from error
    path = Path(file)
    answers_path = path.with_suffix(".answers.jsonl") if output is None else Path(output)
    errors_path = answers_path.with_suffix(".errors.jsonl")
    if path.resolve() in (answers_path.resolve(), errors_path.resolve()):
        raise ConfigError(f"{file!r} is also the output file; give another file with --output")
    notes = open_console(stderr=True)
    with _disk_errors():
        lines, problems = read_lines(path, None, _MAX_LINES, _MAX_LINE_BYTES)
        if problems:
            for one in problems[:_SHOWN_PROBLEMS]:
                notes.print(f"line {one.line}: {one.message}")
            first = problems[0]
            raise RequestError(
                f"{file!r} has {counted(len(problems), 'wrong line', 'wrong lines')}; the first is "
                f"line {first.line}: {first.message}"
            )
        with (
            contextlib.closing(RecordFile(answers_path)) as answers,
            contextlib.closing(RecordFile(errors_path)) as errors,
        ):
            records = LineRecords(answers, errors)
            left = by_prefix([line for line in lines if not records.has(line)])
            if len(left) < len(lines):
                done = counted(len(lines) - len(left), "line is", "lines are")
                notes.print(f"{done} answered already", style="dim")
            if left:
                with loaded_engine(model, options, notes) as engine:
                    _answer(engine, path, left, records, notes)
        if not errors_path.stat().st_size:
            errors_path.unlink()
    failed = f", {records.failed:,} failed: {errors_path}" if records.failed else ""
    answered = counted(records.completed, "answer", "answers")
    notes.print(f"{answered} in {answers_path}{failed}", soft_wrap=True)


def _answer(
    engine: CPUPagedEngine,
    path: Path,
    lines: list[BatchLine],
    records: LineRecords,
    notes: Console,
) -> None:
    from kvboost_edge.server.app import create_app, line_app
    from kvboost_edge.server.batches.execution import run_lines
    from kvboost_edge.server.batches.input_lines import read_bodies
    from kvboost_edge.server.batches.route_calls import LineCaller
    from kvboost_edge.server.settings import ServerSettings
    from kvboost_edge.server.work.engine_warmup import learn_template

    learn_template(engine.tokenizer)
    state = create_app(engine, ServerSettings(request_history=0)).state.kv
    caller = LineCaller(line_app(state), None)
    columns = (
        text_column("batch"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        text_column("{task.fields[told]}"),
    )

    async def call(url: str, body: dict[str, Any]) -> LineAnswer:
        # The file may name a model of another service.
        own = {name: value for name, value in body.items() if name != "model"}
        return await caller(url, own, tenant=None, seconds=_SECONDS)

    with Progress(*columns, console=notes, disable=not notes.is_terminal) as bar:
        total = len(lines) + records.completed + records.failed
        task = bar.add_task("", total=total, completed=total - len(lines), told="")

        def advanced() -> None:
            told = f"{records.failed:,} failed" if records.failed else ""
            bar.update(task, advance=1, told=told)

        bodies = read_bodies(path, lines)
        places = state.first.admission.batch
        try:
            asyncio.run(run_lines(bodies, call, records, lambda: places, advanced))
        except KeyboardInterrupt:
            notes.print("interrupted; run the command again to answer the other lines")
            raise


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Convert file errors to one-line messages."""
    try:
        yield
    except OSError as error:
        raise KVBoostError(
            f"{error.filename or 'a file'} cannot be used: {error.strerror}; check the path and "
            "the free disk space"
        ) from error
