"""Default cache mode of requests, set by `serve --mode`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvboost_edge.config import GenerationMode
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.logs import log_facts

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine
    from kvboost_edge.server.serve_options import ServeOptions
    from kvboost_edge.server.settings import ServerSettings

__all__ = ["check_default_mode", "default_mode", "log_default_mode"]


def default_mode(settings: ServerSettings, engine: Engine) -> GenerationMode:
    """Return the server's default mode, or prefix_cache if the model does not allow that mode."""
    mode = GenerationMode(settings.mode)
    is_refused = mode is GenerationMode.CHUNK_KV_REUSE and engine.default_reuse_refusal is not None
    return GenerationMode.PREFIX_CACHE if is_refused else mode


def log_default_mode(options: ServeOptions) -> None:
    """Log whether answers are approximate by default, and options that only other modes use."""
    given = sorted(name for name in options.engine if name.startswith("recompute_"))
    if options.settings.mode is GenerationMode.CHUNK_KV_REUSE:
        log_facts(
            logging.INFO, "answers are approximate by default: requests without a mode reuse chunks"
        )
    elif given:
        log_facts(
            logging.INFO,
            "options only for requests with kvboost.mode chunk_kv_reuse; --mode makes it the "
            "default",
            options=" ".join(given),
        )


def check_default_mode(engine: Engine, model: str, options: ServeOptions) -> GenerationMode:
    """Return the default mode for a model, and log if the model does not allow the server's mode.

    If the server has several models, such a model uses prefix_cache.

    Raises:
        ConfigError: the only model does not allow the mode.
    """
    mode = default_mode(options.settings, engine)
    if mode is options.settings.mode:
        return mode
    refusal = engine.default_reuse_refusal
    if not options.others:
        raise ConfigError(f"--mode chunk_kv_reuse is refused: {refusal}; use --mode prefix_cache")
    log_facts(
        logging.WARNING,
        "the model refuses --mode chunk_kv_reuse; its default is prefix_cache",
        model=model,
        reason=refusal,
    )
    return mode
