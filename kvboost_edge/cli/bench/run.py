"""The run of a benchmark: options, engines, progress and output."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from kvboost_edge import __version__
from kvboost_edge.cli.bench.cases import Case, CaseResult, Sample, check_bounds
from kvboost_edge.cli.bench.measure import CaseTimer, RandomTokens
from kvboost_edge.cli.bench.result_writers import FORMATS, Subject, Writer, open_writer
from kvboost_edge.cli.console import open_console, text_column
from kvboost_edge.cli.session import found_model, loaded_engine
from kvboost_edge.errors import ConfigError
from kvboost_edge.host.processor import describe_cpu

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["numbers", "output_format", "run_bench", "speculation_modes"]

_MOST_REPETITIONS = 1000
_MODES = ("off", "lookup", "draft", "mtp")
_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def numbers(flag: str, texts: Sequence[str] | None, default: int) -> list[int]:
    """Return the values of a flag that may be repeated or hold a list such as 0,8192.

    Args:
        flag: name of the flag, for errors.
        texts: the given values; None if the flag is not given.
        default: value of a flag that is not given.
    """
    found = []
    for text in ",".join(texts or [str(default)]).split(","):
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(
                f"{flag} {text!r} is not a number of tokens; give one or several, such as 0,8192"
            )
        found.append(int(text))
    return list(dict.fromkeys(found))


def speculation_modes(text: str | None) -> list[str]:
    """Return the values of --speculation; [] if the flag is not given.

    Raises ConfigError for an unknown value.
    """
    modes = [] if text is None else text.split(",")
    for mode in modes:
        if mode not in _MODES:
            raise ConfigError(
                f"--speculation {mode!r} is not one of {', '.join(_MODES)}; give one or several, "
                "such as off,lookup"
            )
    return list(dict.fromkeys(modes))


def output_format(text: str) -> str:
    """Return the value of --output. Raises ConfigError if there is no such format."""
    if text in FORMATS:
        return text
    hint = f"; engine options need --option here: --option {text}" if "=" in text else ""
    raise ConfigError(f"--output {text!r} is not one of {', '.join(FORMATS)}{hint}")


def run_bench(
    model: str,
    options: dict[str, Any],
    cases: Sequence[Case],
    *,
    repetitions: int,
    is_warmed_up: bool,
    form: str,
    modes: Sequence[str] = (),
) -> None:
    """Measure and print one row per case. A row is printed as soon as it is complete.

    Args:
        model: path or id of the model.
        options: engine options. Without `speculation` and `draft_model`, the engine does not
            speculate. The cases after a restart use a temporary directory inside `disk_cache_dir`.
        cases: the cases. Those after a restart are the last ones.
        repetitions: number of times that each case is measured.
        is_warmed_up: whether each case runs once before it is measured.
        form: output format.
        modes: values of --speculation, with each of which all cases are measured.
    """
    check_bounds("--repetitions", repetitions, 1, _MOST_REPETITIONS)
    for name in ("redis_url", "redis_trust"):
        if name in options:
            raise ConfigError(
                f"{name} has no effect on a benchmark, which measures one machine; leave it out"
            )
    names = ("disk_cache_dir", "max_disk_bytes")
    tier: dict[str, Any] = {name: options[name] for name in names if name in options}
    _check_tier(tier, is_used=any(case.kind == "restart" for case in cases))
    others = {name: value for name, value in options.items() if name not in tier}
    writer: Writer | None = None
    for mode, engine_options in _runs(others, modes).items():
        writer = _measure(
            model,
            engine_options,
            tier,
            [case._replace(speculation=mode) for case in cases],
            repetitions=repetitions,
            is_warmed_up=is_warmed_up,
            form=form,
            writer=writer,
        )
    if writer is not None:
        writer.end()


def _runs(options: dict[str, Any], modes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the engine options for each value of --speculation, or for "" without the flag.

    Raises:
        ConfigError: the flag contradicts the options.
    """
    if not modes:
        if "draft_vocabulary" in options and not {"speculation", "draft_model"} & options.keys():
            raise ConfigError(
                "draft_vocabulary has no effect without --speculation mtp or --draft-model; add "
                "one of them, or leave draft_vocabulary out"
            )
        chosen = "auto" if "draft_model" in options else "off"
        return {"": {"speculation": chosen, **options}}
    for name in ("speculation", "mtp"):
        if name in options:
            raise ConfigError(
                f"--speculation and the option {name} are both given; give one of them"
            )
    has_draft = "draft_model" in options
    if has_draft != ("draft" in modes):
        raise ConfigError(
            "draft_model has no effect without --speculation draft; add it, or leave one out"
            if has_draft
            else "--speculation draft needs a draft model; add --draft-model MODEL"
        )
    used = {"draft": {*options}, "mtp": {"draft_vocabulary"}}
    drafting = {name for name in options if name.startswith("draft_")}
    if unused := sorted(drafting.difference(*(used.get(mode, ()) for mode in modes))):
        raise ConfigError(
            f"{unused[0]} has no effect on --speculation {','.join(modes)}; leave it out"
        )
    plain = {name: value for name, value in options.items() if not name.startswith("draft_")}
    found = {
        "off": {**plain, "speculation": "off"},
        "lookup": {**plain, "speculation": "auto", "mtp": "off"},
        "draft": {**options, "speculation": "auto"},
        "mtp": {
            **plain,
            **{name: options[name] for name in used["mtp"] & drafting},
            "speculation": "auto",
        },
    }
    return {mode: found[mode] for mode in modes}


def _measure(
    model: str,
    engine_options: dict[str, Any],
    tier: dict[str, Any],
    cases: Sequence[Case],
    *,
    repetitions: int,
    is_warmed_up: bool,
    form: str,
    writer: Writer | None,
) -> Writer:
    """Measure the cases with one set of engine options.

    Args:
        tier: options of the disk tier, for the cases after a restart.
        writer: writer of earlier rows, or None to open one.

    Returns:
        The writer.
    """
    after_restart = [case for case in cases if case.kind == "restart"]
    notes = open_console(stderr=True)
    with contextlib.ExitStack() as loaded:
        engine = loaded.enter_context(loaded_engine(model, engine_options, notes))
        if cases[0].speculation == "mtp" and not engine.paged_stats()["draft_weight_bytes"]:
            raise ConfigError(
                f"--speculation mtp needs a multi-token prediction head, but {model} has none that "
                "is used; leave mtp out"
            )
        tokens = RandomTokens(engine.runner_info.vocab_size)
        meter = CaseTimer(engine, tokens)
        for case in cases:
            meter.check(case)
        path = found_model(model, engine_options)
        writer = writer or open_writer(form, _subject(engine, path, model), _write)
        with _bar(notes, len(cases) * repetitions) as bar:
            for case in cases[: len(cases) - len(after_restart)]:
                bar.name(case)
                if is_warmed_up:
                    meter.warm_up(case)
                began = time.time()
                samples = [bar.counted(meter.sample(case)) for _ in range(repetitions)]
                bar.beside(writer.row, _figures(case, samples, began))
            loaded.close()  # a restarted engine needs the memory
            if after_restart:
                restart = _Restart(path, {**engine_options, **tier}, tokens, after_restart)
                for figures in restart.measured(bar, repetitions, is_warmed_up=is_warmed_up):
                    if isinstance(figures, str):
                        bar.beside(notes.print, figures)
                    else:
                        bar.beside(writer.row, figures)
    return writer


class _Restart:
    """The cases after a restart.

    Args:
        path: the model.
        options: engine options.
        tokens: source of prompts.
        cases: the cases.
    """

    def __init__(
        self, path: Path, options: dict[str, Any], tokens: RandomTokens, cases: Sequence[Case]
    ) -> None:
        self._path = path
        self._options = options
        self._tokens = tokens
        self._cases = cases

    def measured(
        self, bar: _Bar, repetitions: int, *, is_warmed_up: bool
    ) -> Iterator[CaseResult | str]:
        """Store the prefixes, and time the first request for each of them in new engines.

        Yields:
            The figures of each case, or the reason why it is left out.
        """
        parent = self._options.get("disk_cache_dir")
        samples: dict[Case, list[Sample]] = {case: [] for case in self._cases}
        with tempfile.TemporaryDirectory(prefix="kvboost-edge-bench-", dir=parent) as directory:
            with self._meter(directory) as meter:
                for case in self._cases:
                    bar.name(case)
                    meter.store(case.n_depth)
            began = time.time()
            for _ in range(repetitions):
                with self._meter(directory) as meter:
                    if is_warmed_up:
                        meter.warm_up(Case("pp", self._cases[0].n_prompt, 0, 0))
                    for case in self._cases:
                        bar.name(case)
                        samples[case].append(bar.counted(meter.restored(case)))
        for case in self._cases:
            found = min(one.num_cached for one in samples[case])
            if found == case.n_depth:
                yield _figures(case, samples[case], began)
            else:
                yield (
                    f"{case.name} is left out: only {found} of {case.n_depth} tokens were found on "
                    "disk; raise --option max_disk_bytes=BYTES, or add --no-restart"
                )

    @contextlib.contextmanager
    def _meter(self, directory: str) -> Iterator[CaseTimer]:
        from kvboost_edge.engine.engine import CPUPagedEngine

        options = {**self._options, "disk_cache_dir": directory}
        with CPUPagedEngine.from_pretrained(str(self._path), **options) as engine:
            yield CaseTimer(engine, self._tokens)


class _Bar:
    """Progress over all repetitions, on a terminal."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def name(self, case: Case) -> None:
        self._bar.update(self._task, description=case.name, refresh=True)

    def counted(self, sample: Sample) -> Sample:
        """Count a repetition, and return it."""
        self._bar.update(self._task, advance=1, refresh=True)
        return sample

    def beside(self, work: Callable[[Any], None], given: Any) -> None:
        """Call a function that prints, without the bar on the screen."""
        self._bar.stop()
        work(given)
        self._bar.start()


@contextlib.contextmanager
def _bar(notes: Console, total: int) -> Iterator[_Bar]:
    columns = (text_column("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        console=notes,
        transient=True,
        auto_refresh=False,  # a thread that draws would take time from the measured work
        redirect_stdout=False,  # rows go to standard output, which may be a file
        disable=not notes.is_terminal,
    ) as bar:
        yield _Bar(bar, total)


def _figures(case: Case, samples: Sequence[Sample], began: float) -> CaseResult:
    return CaseResult(case, tuple(one.seconds for one in samples), began)


def _subject(engine: CPUPagedEngine, path: Path, model: str) -> Subject:
    from kvboost_edge.models.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(path, rope_range=engine.config.rope_range)
    info = engine.runner_info
    stats = engine.paged_stats()
    cpu = describe_cpu()
    type_k, type_v = (
        _TYPES[info.kv_spec.dtype] if bits == 16 else f"int{bits}" for bits in info.kv_spec.bits
    )
    return Subject(
        build_version=__version__,
        cpu_info=f"{cpu.model} ({cpu.isa})",
        backends=info.name,
        # A model of the hub is known by its name, not by its file in the hub's cache.
        model_filename=str(path) if Path(model).exists() else model,
        model_type=f"{info.architecture} {info.dtype}",
        model_size=info.weight_bytes,
        model_n_params=checkpoint.summary().num_params,
        n_batch=engine.config.max_batch_tokens,
        n_threads=stats["num_threads"],
        type_k=type_k,
        type_v=type_v,
    )


def _check_tier(tier: dict[str, Any], *, is_used: bool) -> None:
    """Raise ConfigError if options of the disk tier do not fit the cases.

    Args:
        tier: the given options.
        is_used: whether there are cases after a restart.
    """
    directory = tier.get("disk_cache_dir")
    if tier and directory != "off" and not is_used:
        raise ConfigError(
            f"{next(iter(tier))} has no effect without rows after a restart; leave it out, or give "
            "a depth with -d"
        )
    if directory == "off" and is_used:
        raise ConfigError(
            "disk_cache_dir=off leaves nothing to read after a restart; add --no-restart"
        )
    if directory not in (None, "off") and not Path(str(directory)).is_dir():
        raise ConfigError(
            f"disk_cache_dir={str(directory)!r} is not a directory; create it, or leave it out to "
            "use the directory for temporary files"
        )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
