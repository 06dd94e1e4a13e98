"""Functions shared by several commands, to load a model with progress and to stream an answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress

from kvboost_edge.cli.console import counted, text_column
from kvboost_edge.cli.render import (
    PromptBar,
    draft_words,
    duration_words,
    finish_words,
    reuse_words,
    tokens_words,
)
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.locate.model import READ_BYTES_PER_SECOND, size_on_disk

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.request.results import GenerationResult

__all__ = [
    "answer",
    "check_settings",
    "found_model",
    "loaded_engine",
    "memory_line",
    "timing_line",
]

_FEW_SECONDS = 5.0
_LOOK_SECONDS = 0.1  # interval between updates of a progress bar


def found_model(model: str, options: dict[str, Any]) -> Path:
    """Return the model's local directory or file. Downloads the model first if necessary."""
    wanted = {
        name: options[name] for name in ("revision", "token", "local_files_only") if name in options
    }
    return locate_model(model, **wanted)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check the sampling parameters and other options of later requests.

    Raises:
        ConfigError: An option is invalid.
        BackendUnavailable: The package for structured output is not installed.
    """
    from kvboost_edge.engine.precheck import check_request

    try:
        check_request(settings)
    except RequestError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def loaded_engine(
    model: str, options: dict[str, Any], notes: Console, settings: Mapping[str, Any] | None = None
) -> Iterator[CPUPagedEngine]:
    """Yield an engine for `model`, and close it at the end.

    Args:
        model: Path or id of the model.
        options: Engine options.
        notes: Console for progress and notes.
        settings: Options of later requests. Invalid options are rejected before the model is
            downloaded or packed.
    """
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.engine.precheck import check_limit

    started = time.perf_counter()
    config = EngineConfig.from_options(**options)
    check_settings(settings or {})
    path = found_model(model, options)
    check_limit(path, config, (settings or {}).get("max_new_tokens"))
    with _loading_shown(notes, model, path) as progress:
        from kvboost_edge.engine.engine import CPUPagedEngine
        from kvboost_edge.engine.offload.tiering import tier_places
        from kvboost_edge.kernels.jit import on_first_compilation

        engine = CPUPagedEngine.from_pretrained(str(path), progress=progress, **options)
    on_first_compilation(
        lambda: notes.print("compiling more kernels for this machine, once …", style="dim")
    )
    with engine:
        stats = engine.paged_stats()
        notes.print(
            f"{model}: runner {stats['runner']} ({engine.runner_info.dtype} weights), backend "
            f"{stats['backend']}, {stats['num_threads']} threads, {memory_line(stats)}, loaded in "
            f"{time.perf_counter() - started:.1f} s",
            style="dim",
        )
        places = tier_places(engine.config)
        for name, tier in stats["tiers"].items():
            held = (
                "shared"
                if tier["blocks"] is None
                else f"{tier['blocks']} blocks, {tier['bytes'] / 1e6:.0f} MB"
            )
            notes.print(f"tier {name}: {tier['state'] or held}, {places[name]}", style="dim")
        yield engine


@contextmanager
def _loading_shown(notes: Console, model: str, path: Path) -> Iterator[Callable[[int, int], None]]:
    """Show progress while the model is loaded, and yield the callback for packing."""
    if notes.is_terminal:
        with _loading_bar(notes, model) as progress:
            yield progress
        return
    from kvboost_edge.kernels.aot import on_compiling

    lines = _LoadingLines(notes, model)
    lines.loading(size_on_disk(path))
    on_compiling(lines.compiling)
    try:
        yield lines.packing
    finally:
        on_compiling(None)


class _LoadingLines:
    """Progress of loading outside a terminal, with one line and a time estimate per phase."""

    def __init__(self, notes: Console, model: str) -> None:
        self._notes = notes
        self._model = model
        self._packing_began: tuple[float, int] | None = None
        self._has_said_packing = False

    def loading(self, num_bytes: int) -> None:
        """Print that a model of `num_bytes` is being loaded."""
        seconds = num_bytes / READ_BYTES_PER_SECOND
        # Reading a small file takes less time than the rest of the start, such as imports.
        told = "a few seconds" if seconds < _FEW_SECONDS else f"about {duration_words(seconds)}"
        self._say(f"loading {self._model}, {num_bytes / 1e6:,.0f} MB, {told}")

    def compiling(self, done: int, total: int) -> None:
        """Print once how many kernels are being compiled, with a time estimate."""
        from kvboost_edge.kernels.aot import expected_seconds

        if done == 0:
            kernels = counted(total, "kernel", "kernels")
            about = duration_words(expected_seconds(total))
            self._say(f"compiling {kernels} for this machine, once, about {about}")

    def packing(self, done: int, total: int) -> None:
        """Print once how long packing will take, as soon as its speed is known."""
        now = time.monotonic()
        if self._packing_began is None:
            self._packing_began = (now, done)
        began, first = self._packing_began
        is_measured = done > first and (now - began >= _LOOK_SECONDS or done == total)
        if self._has_said_packing or not is_measured:
            return
        self._has_said_packing = True
        about = duration_words((now - began) * (total - first) / (done - first))
        self._say(
            f"packing the weights of {self._model}, {total / 1e6:,.0f} MB, once, about {about}"
        )

    def _say(self, line: str) -> None:
        self._notes.print(line, style="dim", soft_wrap=True)


@contextmanager
def _loading_bar(notes: Console, model: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar for loading the model, compiling kernels and packing weights."""
    from kvboost_edge.kernels.aot import on_compiling

    columns = (text_column("{task.description}"), BarColumn(), text_column("{task.fields[detail]}"))
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        loading = bar.add_task(f"loading {model}", total=None, detail="")
        counting = bar.add_task("", total=1, detail="", visible=False)

        def show(description: str, done: int, total: int, detail: str) -> None:
            bar.update(
                counting,
                description=description,
                completed=done,
                total=total,
                detail=detail,
                visible=done < total,
            )
            bar.update(loading, visible=done >= total)

        def packed(done: int, total: int) -> None:
            show(
                f"packing the weights of {model}",
                done,
                total,
                f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB",
            )

        def compiled(done: int, total: int) -> None:
            show("compiling kernels for this machine, once", done, total, f"{done} of {total}")

        on_compiling(compiled)
        try:
            yield packed
        finally:
            on_compiling(None)


def answer(
    engine: CPUPagedEngine,
    prompt: Any,
    settings: dict[str, Any],
    write: Callable[[str], None],
    notes: Console,
) -> GenerationResult:
    """Generate an answer, and pass each piece of text to `write` as it arrives.

    `notes` shows a progress bar while a long prompt is computed. Sampling parameters missing in
    `settings` get the engine's defaults. Ctrl-C cancels the request.
    """
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling = {name: value for name, value in settings.items() if name in names}
    terms = {name: value for name, value in settings.items() if name not in names}
    params = engine.sampling_defaults.fill(SamplingParams(**sampling))
    handle = engine.submit(prompt, sampling=params, **terms)
    try:
        with PromptBar(notes) as bar:
            while bar.is_wanted and not handle.started(_LOOK_SECONDS):
                bar.show(handle.progress())
        for piece in handle:
            if piece:
                write(piece)
    except BaseException:
        handle.cancel()
        raise
    return handle.result()


def memory_line(stats: Mapping[str, Any]) -> str:
    """Format the maximum size of the pool and the resident memory of the process."""
    resident = f"{_size(stats['process_rss_bytes'])} resident"
    if not stats["pool_bytes"]:
        return resident
    return f"KV cache up to {_size(stats['pool_bytes'])}, filled as needed; {resident}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"


def timing_line(result: GenerationResult) -> str:
    """Format the cache use, speed and drafts of an answer as one line."""
    cached = result.exact_cached_tokens
    spans = (result.reused_span_tokens, result.recomputed_tokens, result.approximations)
    parts = [
        reuse_words(result.prompt_tokens, cached, result.hit_tokens, *spans),
        f"first token {result.ttft_ms:.0f} ms",
        f"{tokens_words(result.generated_tokens)}, {result.tokens_per_sec:.1f} per second",
        *draft_words(result.drafted_tokens, result.accepted_tokens),
        finish_words(result.finish_reason),
    ]
    return " · ".join(parts)
