"""The server as a Ray Serve deployment, for `serve run` and clusters. This module imports Ray.

The server and its replicas form one application.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError
from kvboost_edge.serve_ray.deployment import NAME, replica_deployment
from kvboost_edge.serve_ray.model_files import open_tokenizer
from kvboost_edge.serve_ray.start import connect_pool, flags_of, replica_options
from kvboost_edge.server.app import create_app
from kvboost_edge.server.default_mode import check_default_mode, log_default_mode
from kvboost_edge.server.flags import parse_flags
from kvboost_edge.server.logs import configure_logging
from kvboost_edge.server.serve_options import ServeOptions

__all__ = ["application"]

_PROG = "kvboost_edge.serve_ray:app"
_OPENING_SECONDS = 3600.0  # Packing a large model takes longer than Ray's default limits.


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application, which consists of the server and its replicas."""
    flags = flags_of(arguments)
    options = _parsed(flags)
    cpus = options.engine.get("num_threads") or 1
    engines = replica_deployment(
        replica_options(options),
        workers=options.workers,
        cpus=cpus,
        ingress=NAME,
        drain_seconds=options.settings.drain_seconds,
    )
    # The decorator creates this method.
    bound: serve.Application = Server.bind(flags, engines)  # type: ignore[attr-defined]
    return bound


def _parsed(flags: Sequence[str]) -> ServeOptions:
    """Parse flags; raise ConfigError for invalid ones. argparse alone would end Ray's process."""
    try:
        return parse_flags(flags, _PROG)
    except SystemExit as error:
        # Values may be secrets, so they are left out: Ray logs this message.
        named = " ".join(flag.partition("=")[0] for flag in flags if flag.startswith("--"))
        raise ConfigError(
            f"invalid flags or values: {named}; see `kvboost-edge serve --help`"
        ) from error


def _is_settled() -> bool:
    """Return whether all replicas have this version.

    During an update, replicas of the previous version may have another model.
    """
    status = serve.status().applications.get(serve.get_replica_context().app_name)
    engines = None if status is None else status.deployments.get(NAME)
    return engines is not None and engines.status == "HEALTHY"


@serve.deployment(
    name="server",
    num_replicas=1,  # it keeps the history and counts requests
    ray_actor_options={"num_cpus": 1},
    max_ongoing_requests=100_000,
    graceful_shutdown_wait_loop_s=0.1,
)
@serve.ingress()
class Server:
    """The HTTP server's process. API keys are read from its own environment or files."""

    def __init__(self, flags: Sequence[str], engines: Any) -> None:
        options = _parsed(flags)
        configure_logging(options.settings)
        log_default_mode(options)
        config = EngineConfig.from_options(**options.engine)
        tokenizer, digest = open_tokenizer(options.model, config)
        self._settings = options.settings
        self._opened = connect_pool(
            engines,
            NAME,
            tokenizer,
            digest,
            config,
            seconds=_OPENING_SECONDS,
            is_settled=_is_settled,
        )
        self._pool = self._opened.__enter__()
        check_default_mode(self._pool, options.model, options)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._pool, self._settings)

    def check_health(self) -> None:
        """Do nothing: the server stays healthy without replicas, and answers with an error."""

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._opened.__exit__(None, None, None)
