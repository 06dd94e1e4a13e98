"""What the commands share: consoles, loading a model with progress, streaming one answer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress

from kvboost_edge.cli.console import text_column
from kvboost_edge.cli.render import PromptBar, reuse_words, tokens_words
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.models.locate import locate_model

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.request.results import GenerationResult

__all__ = ["answer", "found_model", "loaded_engine", "timing_line"]

_LOOK_SECONDS = 0.1  # between two looks at how far a prompt is


@contextmanager
def found_model(model: str, options: dict[str, Any], notes: Console) -> Iterator[Path]:
    """The model's local directory or file, downloaded first if it is a hub id: the hub's client
    shows its bars.
    """
    wanted = {
        name: options[name] for name in ("revision", "token", "local_files_only") if name in options
    }
    yield locate_model(model, **wanted)


@contextmanager
def loaded_engine(
    model: str, options: dict[str, Any], notes: Console, settings: Mapping[str, Any] | None = None
) -> Iterator[CPUPagedEngine]:
    """An engine over `model`, closed at the end whatever happens. Notes and the spinner go to
    `notes`. settings: of the requests it is for; what can be known to be wrong with them is refused
    before the model is fetched, or packed.
    """
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.engine.precheck import check_limit, check_request

    started = time.perf_counter()
    config = EngineConfig.from_options(**options)
    check_request(settings or {})
    with found_model(model, options, notes) as path:
        check_limit(path, config, (settings or {}).get("max_new_tokens"))
    with _loading_bar(notes, model) as progress:
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
            f"{stats['backend']}, {stats['num_threads']} threads, pool of {stats['num_blocks']} "
            f"blocks ({stats['pool_bytes'] / 1e6:.0f} MB), loaded in "
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
def _loading_bar(notes: Console, model: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that only moves to and fro while the model is loaded, and fills while kernels are
    compiled or its weights are packed, with how many of them are.
    """
    from kvboost_edge.kernels.aot import on_compiling

    columns = (text_column("{task.description}"), BarColumn(), text_column("{task.fields[told]}"))
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        loading = bar.add_task(f"loading {model}", total=None, told="")
        counting = bar.add_task("", total=1, told="", visible=False)

        def show(description: str, done: int, total: int, told: str) -> None:
            bar.update(
                counting,
                description=description,
                completed=done,
                total=total,
                told=told,
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
    """Generate, passing each piece of text to `write` as it comes; `notes` shows a bar while a long
    prompt is computed. Sampling parameters that `settings` leaves out have the engine's defaults.
    Ctrl-C cancels the request and raises on.
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


def timing_line(result: GenerationResult) -> str:
    """One line under an answer: what was reused and how long it took."""
    cached = result.exact_cached_tokens
    spans = (result.reused_span_tokens, result.recomputed_tokens)
    return (
        f"{reuse_words(result.prompt_tokens, cached, result.hit_tokens, *spans)} · "
        f"first token {result.ttft_ms:.0f} ms · {tokens_words(result.generated_tokens)}, "
        f"{result.tokens_per_sec:.1f} per second · {result.finish_reason}"
    )
