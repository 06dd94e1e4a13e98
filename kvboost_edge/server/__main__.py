"""Entry point of `python -m kvboost_edge.server`, `kvboost-server` and `kvboost-edge serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvboost_edge.errors import (
    BackendUnavailable,
    ConfigError,
    KVBoostError,
    exit_code,
    install_extra,
)
from kvboost_edge.host.file_memo import FileStamp
from kvboost_edge.host.signals import ENDING_SIGNALS, TERMINATING_SIGNALS
from kvboost_edge.server.default_mode import check_default_mode, log_default_mode
from kvboost_edge.server.logs import configure_logging, log_facts
from kvboost_edge.server.serve_options import NamedModel, ServeOptions, help_text
from kvboost_edge.server.settings import tenant_of_key
from kvboost_edge.server.work.engine_warmup import learn_template, prepare

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.memory.check import PlannedMemory
    from kvboost_edge.server.models.changes import ManagedModels
    from kvboost_edge.server.models.loader import ProcessMemory
    from kvboost_edge.server.models.served import ModelSource

__all__ = ["main", "serve"]

_PROG = "kvboost-server"
_PROGRESS_S = 2.0
_EXTRA = ("fastapi", "h11", "prometheus_client", "pydantic", "starlette", "uvicorn")


def serve(options: ServeOptions) -> None:
    """Load the model and serve requests until a signal ends the process.

    Raises:
        KVBoostError: the model cannot be loaded, or the address cannot be used.
    """
    with _ended_by_signal() as ended:
        _serve(options, ended)


def _log_compiling(done: int, total: int) -> None:
    from kvboost_edge.kernels.aot import expected_seconds

    if done in (0, total):
        left = None if done else round(expected_seconds(total))
        event = "compiling kernels for this machine, once"
        log_facts(logging.INFO, event, done=done, total=total, seconds_left=left)


def _serve(options: ServeOptions, ended: threading.Event) -> None:
    try:
        from kvboost_edge.server.app import create_app
        from kvboost_edge.server.models.served import ModelSource
        from kvboost_edge.server.serve import bind, run_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise BackendUnavailable(
            f"the server needs the package {error.name!r}; install the extra: "
            f"{install_extra('server')}"
        ) from error
    if options.is_replicated:
        _serve_replicas(options, ended)
        return
    from kvboost_edge.host.memory import set_own_limit
    from kvboost_edge.kernels.aot import on_compiling
    from kvboost_edge.kernels.jit import on_first_compilation

    configure_logging(options.settings)
    log_default_mode(options)
    # Bind before loading the model, to report an address in use at once.
    with contextlib.closing(bind(options.settings)) as listener:
        on_compiling(_log_compiling)
        on_first_compilation(lambda: log_facts(logging.INFO, "compiling more kernels, once"))
        # Compute the limits before the first model is loaded, because all models share the memory
        # that is free now.
        options, process = _bounded(options)
        budget = _budget(options)

        def source(model: str, options: ServeOptions) -> ModelSource:
            return ModelSource(
                lambda: _planned(model, options).nbytes,
                lambda stopped: _load(model, options, stopped),
            )

        with _load(options.model, options, threading.Event()) as engine:
            if ended.is_set():
                return
            if (bound := options.engine.get("max_memory")) is not None:
                # Models that are added to a single one choose their format and pool for this much
                # memory, too.
                set_own_limit(bound)
            # A single model stays loaded unless keep_alive is set.
            leaves = bool(options.others) or options.settings.keep_alive is not None
            bare = dataclasses.replace(options, warm=(), warm_systems=(), warm_documents=())
            app = create_app(
                engine,
                options.settings,
                source(options.model, options) if leaves else None,
                [(one.names, source(one.model, bare)) for one in options.others],
                budget,
                process,
                _managed(bare, source),
            )
            if leaves and not engine.paged_stats()["tiers"]:
                log_facts(
                    logging.WARNING,
                    "unloading a model drops its cached blocks; set --disk-cache-dir to keep them",
                )
            run_server(app, options.settings, listener)
            _close_from_now(ended)
    if app.state.kv.models.loader.left is not None:
        # At exit, the interpreter would wait for the threads of an unfinished download. Everything
        # else is closed already.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _managed(
    options: ServeOptions, source: Callable[[str, ServeOptions], ModelSource]
) -> ManagedModels:
    """Return the pulled models, loaded with the options of the server."""
    from kvboost_edge.models.locate.managed import ManagedModel, managed_models
    from kvboost_edge.server.models.changes import ManagedModels
    from kvboost_edge.server.models.served import ModelSource

    store = managed_models()
    first = NamedModel(options.settings.model_names, options.model)
    texts = {one.names[0]: one.model for one in (first, *options.others)}
    # Several models share the options, also if the command line has only one. The loader keeps them
    # within max_memory.
    engine = {name: value for name, value in options.engine.items() if name != "max_memory"}
    shared = dataclasses.replace(options, others=options.others or (first,), engine=engine)

    def source_of(model: ManagedModel) -> ModelSource:
        def path() -> str:
            return texts[model.served] if model.served else str(store.path_of(model))

        limited = _with_context(shared, model.context)
        return ModelSource(
            lambda: source(path(), limited).plan(),
            lambda stopped: source(path(), limited).load(stopped),
        )

    return ManagedModels(store, source_of)


def _with_context(options: ServeOptions, context: int | None) -> ServeOptions:
    """Return the options with a smaller context, if one is given."""
    if context is None:
        return options
    length = min(context, options.engine.get("max_model_len", context))
    return dataclasses.replace(options, engine={**options.engine, "max_model_len": length})


def _serve_replicas(options: ServeOptions, ended: threading.Event) -> None:
    """Run the server with several engines, each in a separate process."""
    from kvboost_edge.server.app import create_app
    from kvboost_edge.server.serve import bind, run_server

    if importlib.util.find_spec("ray") is None:
        flag = f"--workers {options.workers}" if options.ray_address is None else "--ray-address"
        raise BackendUnavailable(
            f"{flag} needs Ray, and the package 'ray' is missing; install the extra: "
            f"{install_extra('ray')}"
        )
    from kvboost_edge.serve_ray.start import log_replicas, start_replicas

    configure_logging(options.settings)
    log_default_mode(options)
    with contextlib.closing(bind(options.settings)) as listener:
        started = time.perf_counter()
        log_facts(logging.INFO, "loading", model=options.model, workers=options.workers)
        with start_replicas(options) as pool:
            log_facts(logging.INFO, "loaded", seconds=round(time.perf_counter() - started, 1))
            log_replicas(pool)
            check_default_mode(pool, options.model, options)
            learn_template(pool.tokenizer)
            if not ended.is_set():
                run_server(create_app(pool, options.settings), options.settings, listener)
                _close_from_now(ended)


def _bounded(options: ServeOptions) -> tuple[ServeOptions, ProcessMemory | None]:
    """Apply `--max-memory` to the single engine or to the model loader.

    A single engine enforces the limit itself, and the loader applies it to models that are added
    later. With several models, the loader enforces it, and each engine sizes its pool as if the
    machine had only this much memory. If `--max-model-bytes` is also given, the smaller limit
    applies, and the server logs both. The flag is deprecated, which the server logs as well.

    Returns:
        The changed options, and the memory limit for the loader, or None without `--max-memory`.
    """
    given = options.settings.max_model_bytes
    if given is not None:
        log_facts(logging.WARNING, "--max-model-bytes is deprecated; use --max-memory instead")
    bound = options.engine.get("max_memory")
    if bound is None:
        return options, None
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.host.memory import process_rss, set_own_limit
    from kvboost_edge.server.models.loader import ProcessMemory

    process = ProcessMemory(EngineConfig(max_memory=bound).max_memory or 0, process_rss())
    allowance = process.for_models
    if given is not None:
        log_facts(
            logging.INFO,
            "--max-memory and --max-model-bytes: the smaller allowance applies",
            max_memory=process.bound,
            measured_overhead=process.base,
            max_memory_allows=allowance,
            max_model_bytes=given,
        )
        allowance = min(allowance, given)
    if allowance <= 0:
        raise ConfigError(
            f"max_memory={process.bound} is less than the {process.base} bytes that a server "
            "needs without a model; raise it"
        )
    if not options.others:
        engine = {**options.engine, "max_memory": process.base + allowance}
        return dataclasses.replace(options, engine=engine), process
    engine = {name: value for name, value in options.engine.items() if name != "max_memory"}
    set_own_limit(allowance)
    return dataclasses.replace(options, engine=engine), process


def _budget(options: ServeOptions) -> int | None:
    """Return the memory limit of all models in bytes, or None for a single permanent model."""
    if options.settings.max_model_bytes is not None or not options.others:
        return options.settings.max_model_bytes
    from kvboost_edge.engine.memory.selection import available_on

    return available_on(_planned(options.model, options).device)


def _planned(model: str, options: ServeOptions) -> PlannedMemory:
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.engine.memory.check import planned_memory

    return planned_memory(model, EngineConfig.from_options(**_engine_options(model, options)[0]))


def _engine_options(model: str, options: ServeOptions) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engine options for one of the models.

    If several models share the options, those that a model would reject are left out for it.

    Returns:
        The options, and the reasons for leaving options out, by flag.
    """
    if not options.others:
        return options.engine, {}
    draft = options.engine.get("draft_model")
    stamps = _stamps(model), () if draft is None else _stamps(str(draft))
    refused = _refused_options(model, stamps, tuple(options.engine.items()))
    engine = {name: value for name, value in options.engine.items() if name not in refused}
    return engine, {f"--{name.replace('_', '-')}": reason for name, reason in refused.items()}


def _stamps(model: str) -> tuple[FileStamp, ...]:
    """Return the stamps of a model's files, or none if they are not at this path."""
    path = Path(model)
    try:
        files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
        return tuple(FileStamp.of(one) for one in files)
    except OSError:  # it is the name of a model on the hub, or locating it says why
        return ()


# Checking a draft model reads two tokenizers, which takes about a second, and a model is planned
# and loaded again and again.
@functools.lru_cache(maxsize=256)
def _refused_options(
    model: str, stamps: tuple[tuple[FileStamp, ...], ...], options: tuple[tuple[str, Any], ...]
) -> dict[str, str]:
    """Return why a model cannot have some options of the engine, by the options' names.

    Errors are raised, and therefore not cached. The stamps are those of the files of the model and
    the draft model, so that changed files are checked again.
    """
    from kvboost_edge.config import EngineConfig
    from kvboost_edge.engine.build import refused_options

    return refused_options(model, EngineConfig.from_options(**dict(options)))


def _load(model: str, options: ServeOptions, stopped: threading.Event) -> CPUPagedEngine:
    """Load a model and prepare its engine for requests.

    Args:
        model: directory, file or name of the model.
        options: options of the server.
        stopped: event that, once set, stops the packing of weights with an error.
    """
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.offload.tiering import tier_places

    started = time.perf_counter()
    from kvboost_edge.models.locate.model import READ_BYTES_PER_SECOND, size_on_disk

    size = size_on_disk(Path(model))
    log_facts(
        logging.INFO,
        "loading",
        model=model,
        megabytes=size // 1_000_000 or None,
        about_seconds=round(size / READ_BYTES_PER_SECOND) or None,
    )
    chosen, ignored = _engine_options(model, options)
    for flag, reason in ignored.items():
        level = logging.WARNING if flag.startswith("--draft-") else logging.INFO
        log_facts(level, f"{flag} is ignored: {reason}", model=model)
    engine = CPUPagedEngine.from_pretrained(model, progress=_log_packing(stopped), **chosen)
    try:
        tenants = [tenant_of_key(key) for key in options.settings.all_keys]
        mode = check_default_mode(engine, model, options)
        prepare(
            engine,
            options.warm,
            options.warm_documents,
            tenants,
            mode,
            warm_systems=options.warm_systems,
        )
        stats = engine.paged_stats()
        shown = {
            name: stats[name]
            for name in ("runner", "backend", "num_threads", "num_blocks", "pool_bytes")
        }
        if stats["draft_weight_bytes"]:
            shown |= {name: stats[name] for name in ("draft_weight_bytes", "draft_pool_bytes")}
        log_facts(logging.INFO, "loaded", seconds=round(time.perf_counter() - started, 1), **shown)
        places = tier_places(engine.config)
        for name, tier in stats["tiers"].items():
            facts = {
                key: tier[key] for key in ("blocks", "bytes", "max_bytes", "writable", "state")
            }
            log_facts(logging.INFO, "tier", tier=name, place=places[name], **facts)
    except BaseException:
        engine.close()
        raise
    return engine


def _log_packing(stopped: threading.Event | None = None) -> Callable[[int, int], None]:
    """Return a progress callback that logs a line every few seconds while weights are packed."""
    due = time.monotonic() + _PROGRESS_S
    first: tuple[float, int] | None = None

    def log(done: int, total: int) -> None:
        nonlocal due, first
        if stopped is not None and stopped.is_set():
            raise KVBoostError(
                "the server is shutting down; the weights will be packed at the next start"
            )
        now = time.monotonic()
        if first is None:
            first = (now, done)
        if now >= due:
            due = now + _PROGRESS_S
            began, before = first
            left = (now - began) * (total - done) / (done - before) if done > before else None
            log_facts(
                logging.INFO,
                "packing weights",
                percent=100 * done // total,
                megabytes=total // 1_000_000,
                seconds_left=None if left is None else round(left),
            )

    return log


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[threading.Event]:
    """Make SIGTERM end the process with exit code 0 while the model loads.

    A second SIGTERM ends the process at once. After serving, `_close_from_now` makes a signal end
    the shutdown early too.

    Yields:
        An event that is set by the signal.
    """
    # As process 1 of a container, the process has no default action for SIGTERM. The event backs up
    # SystemExit, which code that swallows exceptions may lose.
    ended = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield ended
        return

    def end(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            log_facts(logging.WARNING, "exiting immediately", signal=signal.Signals(number).name)
            sys.stderr.flush()
            os._exit(128 + number)
        ended.set()
        log_facts(logging.INFO, "stopped while loading", signal=signal.Signals(number).name)
        raise SystemExit(0)

    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    for number in TERMINATING_SIGNALS:
        signal.signal(number, end)
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _close_from_now(ended: threading.Event) -> None:
    """Make the next signal, including Ctrl-C, end the process at once."""
    ended.set()
    # KeyboardInterrupt would only end the current wait, and the shutdown would go on to the next
    # one.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0 after a regular end, 1 after an error, 2 for wrong usage or an invalid
        option, 130 if interrupted.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    if given in (["--help"], ["-h"]):  # without typer, which is slow to import
        print(help_text(_PROG))
        return 0
    from kvboost_edge.server.flags import parse_flags

    try:
        serve(parse_flags(given, _PROG))
    except KVBoostError as error:
        print(f"{_PROG}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
