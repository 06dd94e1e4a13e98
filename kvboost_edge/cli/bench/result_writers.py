"""Output of the figures, with the columns and field names of llama-bench."""

from __future__ import annotations

import abc
import csv
import dataclasses
import datetime
import io
import json
from collections.abc import Callable
from typing import Any

from kvboost_edge.cli.bench.cases import CaseResult, mean_and_deviation

__all__ = ["FORMATS", "Subject", "Writer", "open_writer"]

FORMATS = ("md", "csv", "json", "jsonl")

# Heading and width of the columns. Widths only align the Markdown source.
_COLUMNS = (
    ("model", -30),
    ("size", 10),
    ("params", 10),
    ("backend", -10),
    ("threads", 7),
    ("type_k", 6),
    ("type_v", 6),
    ("test", 18),
    ("t/s", 20),
    ("ms", 10),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The measured model and engine. Fields have the names of llama-bench.

    Attributes:
        build_version: version of this package.
        cpu_info: processor and its instruction set.
        backends: runner of the model.
        model_filename: path of the model.
        model_type: architecture and weight format.
        model_size: size of the loaded weights in bytes.
        model_n_params: number of parameters.
        n_batch: maximum number of tokens of a step.
        n_threads: number of compute threads.
        type_k: storage format of keys.
        type_v: storage format of values.
    """

    build_version: str
    cpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_threads: int
    type_k: str
    type_v: str


class Writer(abc.ABC):
    """Output of one row after another.

    Args:
        subject: the measured model and engine.
        write: called with each piece of text.
    """

    def __init__(self, subject: Subject, write: Callable[[str], None]) -> None:
        self.subject = subject
        self.write = write

    @abc.abstractmethod
    def row(self, figures: CaseResult) -> None:
        """Write the figures of one case."""

    def end(self) -> None:  # noqa: B027 - most formats write nothing here
        """Write what follows the last row."""


class _Markdown(Writer):
    """A table like that of llama-bench, with an additional column for the time."""

    def __init__(self, subject: Subject, write: Callable[[str], None]) -> None:
        super().__init__(subject, write)
        self._has_begun = False

    def row(self, figures: CaseResult) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.write(_cells({name: name for name, _ in _COLUMNS}))
            rules = (
                "-" * (abs(width) - (width > 0)) + (":" if width > 0 else "")
                for _, width in _COLUMNS
            )
            self.write(f"| {' | '.join(rules)} |\n")
        subject = self.subject
        rate, deviation = mean_and_deviation(figures.rates)
        mean_seconds, _ = mean_and_deviation(figures.seconds)
        self.write(
            _cells(
                {
                    "model": subject.model_type,
                    "size": _bytes(subject.model_size),
                    "params": _count(subject.model_n_params),
                    "backend": subject.backends,
                    "threads": str(subject.n_threads),
                    "type_k": subject.type_k,
                    "type_v": subject.type_v,
                    "test": figures.case.name,
                    "t/s": f"{rate:.2f} ± {deviation:.2f}",
                    "ms": f"{mean_seconds * 1e3:.1f}",
                }
            )
        )

    def end(self) -> None:
        self.write(f"\nbuild: kvboost-edge {self.subject.build_version}\n")
        self.write(f"cpu: {self.subject.cpu_info}\n")


class _Csv(Writer):
    """Comma-separated values. Each value is quoted, as in llama-bench."""

    def __init__(self, subject: Subject, write: Callable[[str], None]) -> None:
        super().__init__(subject, write)
        self._has_begun = False

    def row(self, figures: CaseResult) -> None:
        fields = _fields(self.subject, figures)
        if not self._has_begun:
            self._has_begun = True
            self.write(f"{','.join(fields)}\n")
        line = io.StringIO()
        csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(fields.values())
        self.write(line.getvalue())


class _Lines(Writer):
    """One JSON object per line."""

    def row(self, figures: CaseResult) -> None:
        self.write(f"{json.dumps(_with_samples(self.subject, figures), ensure_ascii=False)}\n")


class _Json(Writer):
    """A JSON array, which is written at the end."""

    def __init__(self, subject: Subject, write: Callable[[str], None]) -> None:
        super().__init__(subject, write)
        self._rows: list[dict[str, Any]] = []

    def row(self, figures: CaseResult) -> None:
        self._rows.append(_with_samples(self.subject, figures))

    def end(self) -> None:
        self.write(f"{json.dumps(self._rows, ensure_ascii=False, indent=2)}\n")


_WRITERS: dict[str, Callable[[Subject, Callable[[str], None]], Writer]] = {
    "md": _Markdown,
    "csv": _Csv,
    "json": _Json,
    "jsonl": _Lines,
}


def open_writer(form: str, subject: Subject, write: Callable[[str], None]) -> Writer:
    """Return the writer of one of `FORMATS`."""
    return _WRITERS[form](subject, write)


def _fields(subject: Subject, figures: CaseResult) -> dict[str, Any]:
    """Return the fields of a row, of which the test, requests and speculation are our own."""
    case = figures.case
    seconds, deviation = mean_and_deviation(figures.seconds)
    rate, rate_deviation = mean_and_deviation(figures.rates)
    began = datetime.datetime.fromtimestamp(figures.began, datetime.UTC)
    return {
        **dataclasses.asdict(subject),
        "test": case.name,
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.n_depth,
        "n_requests": case.n_requests,
        "speculation": case.speculation,
        "test_time": began.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(seconds * 1e9),
        "stddev_ns": round(deviation * 1e9),
        "avg_ts": round(rate, 6),
        "stddev_ts": round(rate_deviation, 6),
    }


def _with_samples(subject: Subject, figures: CaseResult) -> dict[str, Any]:
    return {
        **_fields(subject, figures),
        "samples_ns": [round(one * 1e9) for one in figures.seconds],
        "samples_ts": [round(one, 6) for one in figures.rates],
    }


def _cells(values: dict[str, str]) -> str:
    cells = (
        values[name].rjust(width) if width > 0 else values[name].ljust(-width)
        for name, width in _COLUMNS
    )
    return f"| {' | '.join(cells)} |\n"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
