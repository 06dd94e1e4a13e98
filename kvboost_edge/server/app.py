"""ASGI application of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from kvboost_edge import __version__
from kvboost_edge.errors import ConfigError
from kvboost_edge.host.memory import available_bytes
from kvboost_edge.server.api.routes import (
    anthropic,
    batches,
    cache,
    embeddings,
    files,
    health,
    llama_cpp,
    models_and_tokens,
    ollama,
    openai,
    requests,
    responses,
    sessions,
)
from kvboost_edge.server.api_errors import install_error_handlers
from kvboost_edge.server.batches.batch_store import BatchStore
from kvboost_edge.server.batches.route_calls import LineCaller
from kvboost_edge.server.batches.service import BatchService
from kvboost_edge.server.cache_report.normalization import Normalizer
from kvboost_edge.server.cache_report.recent_requests import History
from kvboost_edge.server.http import page
from kvboost_edge.server.http.hosts import HostList
from kvboost_edge.server.http.keys import KeyRing
from kvboost_edge.server.http.middleware import AuthMiddleware, Envelope
from kvboost_edge.server.models.changes import ManagedModels, ModelChanges
from kvboost_edge.server.models.exposition import ServerMetrics
from kvboost_edge.server.models.loader import ProcessMemory, reserved_bytes
from kvboost_edge.server.models.registry import Models
from kvboost_edge.server.models.served import ModelSource, ServedModel
from kvboost_edge.server.models.server import ServerState
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.server.state import Shared
from kvboost_edge.server.traces import open_traces
from kvboost_edge.server.work.admission import Bodies
from kvboost_edge.server.work.stored_responses import ResponseStore
from kvboost_edge.tiers.disk.session_records import SessionStore

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = ["ROUTERS", "create_app", "line_app"]

# Routers of all endpoints. FastAPI tries them in this order, so frequently used endpoints come
# first.
ROUTERS = (
    openai.router,
    anthropic.router,
    responses.router,
    ollama.router,
    llama_cpp.router,
    embeddings.router,
    models_and_tokens.router,
    cache.router,
    sessions.router,
    requests.router,
    files.router,
    batches.router,
    health.router,
    page.router,
)
# Routers of the endpoints that answer lines of batches.
LINE_ROUTERS = (openai.router, responses.router, embeddings.router)
# Paths without parameters, so that this list is all that can be reached without a key.
_PAGE_PATHS = frozenset(
    {"/", *(f"/static/{name}" for name in page.STATIC_FILES if name != "index.html")}
)


def line_app(state: ServerState) -> FastAPI:
    """Create an app for calls inside this process: the routes for batches, without middleware."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.kv = state
    _add_routes(app, LINE_ROUTERS)
    install_error_handlers(app, ())
    return app


def _add_routes(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add the routes of routers that have no prefix and no dependencies."""
    # `include_router` builds the types of requests and answers of each route a second time, which
    # delays the first request to each router by 20 to 80 ms.
    for router in routers:
        app.router.routes.extend(router.routes)


def _batch_service(directory: Path, state: ServerState) -> BatchService:
    """Open the batch API. Raises ConfigError if the directory cannot be used."""
    settings = state.settings

    def places() -> int:
        """Return the number of lines that fit in a batch of the largest loaded model."""
        return max((one.admission.batch for one in state.models.loaded), default=1)

    call = LineCaller(line_app(state), settings.batch_background)
    return BatchService(BatchStore(directory, settings), call, settings, places)


def create_app(
    engine: Engine,
    settings: ServerSettings,
    source: ModelSource | None = None,
    others: Sequence[tuple[tuple[str, ...], ModelSource]] = (),
    budget: int | None = None,
    process: ProcessMemory | None = None,
    managed: ManagedModels | None = None,
) -> FastAPI:
    """Create the ASGI application. `app.state.kv` holds its `ServerState`.

    Args:
        engine: engine of the first model, already loaded.
        settings: settings of the server.
        source: source for loading the first model again after it was unloaded; None keeps the model
            loaded.
        others: names and sources of further models, which are loaded on demand.
        budget: maximum bytes of weights, pools and recurrent state of all loaded models; None for
            the memory that is available now.
        process: memory limit of the whole process, which may lower `budget`.
        managed: pulled models to serve and to change; None if models cannot be changed.

    Raises:
        ConfigError: the first model exceeds the budget, or the batch directory cannot be used.
    """
    shared = Shared(
        settings,
        ResponseStore(len(settings.all_keys)),
        Normalizer(settings.normalise),
        _session_store(engine, settings),
        open_traces(settings.otel_endpoint),
    )
    sources = [(settings.model_names, source), *others]
    served = [
        ServedModel(names, one, settings.keep_alive_of(number), History(settings.request_history))
        for number, (names, one) in enumerate(sources)
    ]
    budget = reserved_bytes(engine) + available_bytes() if budget is None else budget
    models = Models(served, shared, budget, process)
    loader = models.loader
    loader.adopt(models.first, loader.prepared(models.first, engine))
    if loader.taken > loader.budget:
        raise ConfigError(
            f"{'max_model_bytes' if process is None else 'max_memory'} allows {loader.budget} "
            f"bytes for models, less than the {loader.taken} bytes of the first model's weights, "
            "pool and recurrent state; raise it, or make the pool smaller (--max-cache-bytes, "
            "--num-blocks)"
        )
    bodies = Bodies(settings)
    changes = None if managed is None else ModelChanges(models, settings, managed)
    state = ServerState(shared, models, bodies, ServerMetrics(models, bodies), changes=changes)
    if settings.batch_dir is not None:
        state = dataclasses.replace(state, batches=_batch_service(Path(settings.batch_dir), state))
    app = FastAPI(
        title="kvboost-edge",
        version=__version__,
        docs_url=None,  # FastAPI's documentation pages would load scripts from a CDN
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.kv = state
    _add_routes(app, ROUTERS)
    routes = app.router.routes
    install_error_handlers(app, (one.path for one in routes if isinstance(one, Route)))
    # The middleware added last is the outermost.
    keys = KeyRing(settings.api_keys, settings.admin_api_keys)
    app.add_middleware(
        AuthMiddleware,
        state=state,
        keys=keys,
        open_paths=health.OPEN_PATHS | _PAGE_PATHS,
        routes=routes,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["DELETE", "GET", "HEAD", "POST"],
            allow_headers=["*"],  # OpenAI's client sends a dozen, and new ones in each version
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Envelope, state=state, hosts=HostList(settings))
    return app


def _session_store(engine: Engine, settings: ServerSettings) -> SessionStore:
    """Return the store of named sessions, in the first model's cache directory if it has one."""
    directory = engine.config.disk_cache_dir
    store = SessionStore(
        None if directory is None else Path(directory),
        max_sessions=settings.max_sessions,
        max_bytes=settings.max_session_bytes,
    )
    store.sweep()
    return store
