"""The `kvboost-edge warmup` command, which compiles all kernels to make later starts fast."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress

from kvboost_edge.cli.console import counted, open_console, text_column
from kvboost_edge.cli.reuse_check import verdict_words
from kvboost_edge.cli.session import found_model, loaded_engine
from kvboost_edge.config import KV_BIT_PAIRS, GenerationMode
from kvboost_edge.models.locate import BUNDLED_MODEL

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["run_warmup"]

_PROMPTS = ("one two three four five six seven eight nine ten " * 8, "one two three")
_WEIGHTS = ("int8", "int4", "int4-asym", "bf16", "f32")
_SIZES = ("num_blocks", "max_cache_bytes", "max_state_bytes", "max_chunks")
_OF_ONE_MODEL = (*_SIZES, "revision", "token", "local_files_only", "strict")


def run_warmup(model: str, options: dict[str, Any], mode: GenerationMode | None = None) -> None:
    """Compile the kernels, then load and run `model`.

    To compile the kernels of every KV and weight format, short prompts run through the bundled
    model. If the options choose a format, only its kernels are compiled. Running `model` then packs
    its weights.

    Args:
        model: Path or id of the model.
        options: Engine options.
        mode: Cache mode. CHUNK_KV_REUSE also runs the quality gate's test and prints the result.
    """
    console = open_console()
    started = time.perf_counter()
    found_model(model, options)  # report a wrong name before compiling
    forms = _forms(options)
    columns = (
        text_column("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        text_column("{task.description}"),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=len(forms))
        for form in forms:
            bar.update(
                task, description=", ".join(f"{name} {value}" for name, value in form.items())
            )
            _compile(
                {name: value for name, value in options.items() if name not in _OF_ONE_MODEL} | form
            )
            bar.advance(task)
    if forms:
        _compile_rest()
    tests = mode is GenerationMode.CHUNK_KV_REUSE
    if model != BUNDLED_MODEL or not forms or tests:
        small = {} if tests or any(name in options for name in _SIZES) else {"num_blocks": 64}
        with loaded_engine(model, {"max_num_seqs": 4, **small, **options}, console) as engine:
            _answer(engine)
            if tests:
                _test_reuse(engine, console)
    from kvboost_edge.kernels.jit import cache_path
    from kvboost_edge.kernels.library import kernel_library

    seconds = time.perf_counter() - started
    compiled = counted(len(forms), "configuration", "configurations")
    library = kernel_library()
    place = cache_path() if library is None else library.path
    kept = f"compiled kernels are in {place}" if place else "compiled kernels are not kept"
    console.print(f"{compiled} compiled, {model} ready after {seconds:.1f} s; {kept}")


def _forms(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each run. Options that the user gave stay the same in all runs."""
    # The torch runner has no kernels to compile.
    if options.get("runner") == "torch":
        return []
    if "weights" in options or "runner" in options or "dtype" in options:
        first: list[dict[str, Any]] = [{}]
    else:
        first = [{"weights": weights} for weights in _WEIGHTS]
    if "kv_cache_bits" in options:
        return first
    # Weight formats and KV formats have separate kernels. Run each format once instead of all
    # combinations.
    return [*first, *({"kv_cache_bits": bits} for bits in KV_BIT_PAIRS if bits != (16, 16))]


def _compile(options: dict[str, Any]) -> None:
    from kvboost_edge.engine.engine import CPUPagedEngine

    with CPUPagedEngine.from_pretrained(
        BUNDLED_MODEL, num_blocks=64, **{"max_num_seqs": 4, **options}
    ) as engine:
        _answer(engine)


def _compile_rest() -> None:
    """Compile the kernels for GGUF packing, experts and recurrent layers."""
    import numpy as np

    from kvboost_edge.host.processor import default_num_threads
    from kvboost_edge.kernels.aot import compile_ahead
    from kvboost_edge.kernels.linear.k_blocks import pack_blocks
    from kvboost_edge.kernels.linear.weight_formats import FORMATS
    from kvboost_edge.kernels.program.interpreter import apart_entries

    compile_ahead(list(apart_entries.values()), default_num_threads())
    for name, form in FORMATS.items():
        if form.block_bytes:
            pack_blocks(np.zeros((1, form.block_bytes), dtype=np.uint8), name)


def _answer(engine: CPUPagedEngine) -> None:
    engine.generate_batch(list(_PROMPTS), max_new_tokens=3, ignore_eos=True)
    engine.submit(_PROMPTS[0], max_new_tokens=2, ignore_eos=True).result()


def _test_reuse(engine: CPUPagedEngine, console: Console) -> None:
    if engine.config.reuse_gate == "off":
        console.print("non-prefix KV reuse is not tested: reuse_gate='off'")
        return
    console.print(verdict_words(engine.check_reuse()))
