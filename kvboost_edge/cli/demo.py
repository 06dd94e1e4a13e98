"""The `kvboost-edge demo` command, which asks questions about a document with and without the
cache.
"""

from __future__ import annotations

import shutil
import sysconfig
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvboost_edge.cli.console import open_console, spinner
from kvboost_edge.cli.render import pool_panel
from kvboost_edge.cli.session import loaded_engine
from kvboost_edge.config import GenerationMode
from kvboost_edge.models.locate.stores import real_model

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.request.results import GenerationResult

__all__ = ["command_name", "run_demo"]

# Each question about the document, and a word that a correct answer contains.
QUESTIONS = (
    ("What is the metal of Worr camera?", "bronze"),
    ("What is the festival of Mount Hanol?", "August"),
    ("What is the hobby of Brot Gorbel?", "running"),
    ("What is the bird of South Bamon?", "snake"),
    ("What is the festival of Fort Lealo?", "February"),
    ("What is the home of Jaina Faisa?", "Darbel"),
    ("What is the code of North Rend?", "9125"),
    ("What is the mine of Lake Brilo?", "lead"),
)
ONE_BY_ONE = 4
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0}


_NAME = "kvboost-edge"


def command_name() -> str:
    """Return the name or path of the command, for use in hints.

    The path is relative if the virtual environment is in the current directory.
    """
    own = Path(sysconfig.get_path("scripts")) / _NAME
    found = shutil.which(_NAME)
    if not own.is_file() or (found is not None and own.samefile(found)):
        return _NAME
    return str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own)


def run_demo(model: str, options: dict[str, Any], *, show_stats: bool = False) -> None:
    """Run and print the whole demo. Needs the bundled model and no network.

    Args:
        model: Path or id of the model.
        options: Engine options.
        show_stats: True to print the statistics of the pool.
    """
    console = open_console()
    document = (
        resources.files("kvboost_edge")
        .joinpath("assets/demo_document.txt")
        .read_text(encoding="utf-8")
        .strip()
    )
    with loaded_engine(model, options, console) as engine:
        with spinner(console, "warming up (not counted below) …"):
            _warm_up(engine)
        counted = f", {len(document.split())} words, put before every question:"
        console.print(Text.assemble("\n", ("One shared document", "bold"), counted))
        console.print(f"{document[:200]} …\n", style="dim")
        _one_by_one(engine, console, document)
        stats, states = _all_at_once(engine, console, document)
        title = "Block pool while the batch ran"
        shown = stats if show_stats else None
        console.print(pool_panel(states, shown, width=console.width, title=title))
    name = command_name()
    if real_model().is_file():
        way = f"{name} chat -m {real_model()}"
    else:
        way = f"choose one with {name} models --suggest, then {name} chat -m NAME"
    console.print(f"To chat with a trained model: {way}", soft_wrap=True, highlight=False)


def _prompt(document: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": question}]


def _warm_up(engine: CPUPagedEngine) -> None:
    """Run unrelated prompts cold, cached and in a batch, then clear the cache."""
    filler = "".join(f"Note {number}. " for number in range(100))
    for _ in range(2):
        engine.generate_batch([_prompt(filler, "Hello!"), _prompt(filler, "Hi")], **SETTINGS)
    engine.reset_cache()


def _one_by_one(engine: CPUPagedEngine, console: Console, document: str) -> None:
    """Ask questions one by one, starting with an empty cache. Repeat the last one without the
    cache.
    """
    table = Table(title="Questions one after another", title_justify="left")
    for name in ("", "question", "answer"):
        table.add_column(name)
    for name in ("prompt", "cached", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, (question, expected) in enumerate(QUESTIONS[:ONE_BY_ONE]):
        result = _ask(engine, document, question)
        _add_row(table, "warm" if index else "cold", question, expected, result)
    off = _ask(engine, document, question, GenerationMode.BASELINE)
    _add_row(table, "off", question, expected, off)
    console.print(table)
    is_same = off.output_token_ids == result.output_token_ids
    same = "the same tokens" if is_same else "DIFFERENT TOKENS"
    after = f"first token after {off.ttft_ms:.0f} and {result.ttft_ms:.0f} ms, "
    sooner = (f"{off.ttft_ms / result.ttft_ms:.1f}x faster", "bold")
    console.print(
        Text.assemble(
            "The last question without and with the cache: ", after, sooner, f", and {same}.\n"
        )
    )


def _ask(
    engine: CPUPagedEngine,
    document: str,
    question: str,
    mode: GenerationMode = GenerationMode.PREFIX_CACHE,
) -> GenerationResult:
    return engine.generate(_prompt(document, question), mode=mode, **SETTINGS)


def _add_row(
    table: Table, kind: str, question: str, expected: str, result: GenerationResult
) -> None:
    right = expected in result.output_text
    shown = Text(result.output_text.strip())
    if not right:
        shown.append(f" (expected {expected})", "red")
    cells = (f"{result.prompt_tokens}", f"{result.cached_tokens}", f"{result.ttft_ms:.0f} ms")
    table.add_row(kind, question, shown, *cells, style="bold" if kind == "warm" else "")


def _all_at_once(
    engine: CPUPagedEngine, console: Console, document: str
) -> tuple[dict[str, Any], list[int]]:
    """Ask all questions in one batch.

    Returns:
        `paged_stats()` and the block map, taken when the most blocks were shared.
    """
    started = time.perf_counter()
    handles = [engine.submit(_prompt(document, question), **SETTINGS) for question, _ in QUESTIONS]
    stats = engine.paged_stats()
    states = engine.block_map()
    for _ in handles[0]:
        now = engine.paged_stats()
        if (now["shared_blocks"], now["used_blocks"]) >= (
            stats["shared_blocks"],
            stats["used_blocks"],
        ):
            stats = now
            states = engine.block_map()
    results = [handle.result() for handle in handles]
    seconds = time.perf_counter() - started
    right = sum(
        expected in result.output_text
        for (_, expected), result in zip(QUESTIONS, results, strict=True)
    )
    tokens = sum(result.generated_tokens for result in results)
    private = sum(-(-result.prompt_tokens // stats["block_size"]) for result in results)
    figures = (
        f": {seconds * 1000:.0f} ms, {tokens / seconds:.0f} tokens per second, {right} of "
        f"{len(QUESTIONS)} answers correct.\n{stats['shared_blocks']} blocks are shared: "
        f"{stats['used_blocks']} blocks are in use, and the prompts would need {private} without "
        "sharing.\n"
    )
    console.print(Text.assemble((f"{len(QUESTIONS)} questions in one batch", "bold"), figures))
    return stats, states
