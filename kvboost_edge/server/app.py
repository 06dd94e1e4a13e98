"""`create_app`: the ASGI application over one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from kvboost_edge import __version__
from kvboost_edge.server.api.routes import (
    anthropic,
    cache,
    embeddings,
    generation,
    health,
    llama_cpp,
    ollama,
    requests,
    responses,
    text,
)
from kvboost_edge.server.doctor.doctor import Doctor
from kvboost_edge.server.doctor.normalise import Normaliser
from kvboost_edge.server.errors import install_error_handlers
from kvboost_edge.server.http import page
from kvboost_edge.server.http.hosts import HostList
from kvboost_edge.server.http.keys import KeyRing
from kvboost_edge.server.http.middleware import Envelope, Gate
from kvboost_edge.server.metrics import Metrics
from kvboost_edge.server.settings import ServerSettings
from kvboost_edge.server.state import ServerState
from kvboost_edge.server.work.admission import Admission
from kvboost_edge.server.work.remembered import Remembered

if TYPE_CHECKING:
    from kvboost_edge.server.engines import Engine

__all__ = ["ROUTERS", "create_app"]

# Every endpoint is in one of these. Routes are tried in this order, so the busy ones come first.
ROUTERS = (
    generation.router,
    anthropic.router,
    responses.router,
    ollama.router,
    llama_cpp.router,
    embeddings.router,
    text.router,
    cache.router,
    requests.router,
    health.router,
    page.router,
)
# Fixed names, so that no parameter of a path can widen what is open.
_PAGE_PATHS = frozenset({"/", *(f"/static/{name}" for name in page.STATIC_FILES if name != "index.html")})


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """The application. It uses `engine` and does not close it; `app.state.kv` is its `ServerState`."""
    admission = Admission(engine, settings)
    metrics = Metrics(engine, settings.model_name, admission)
    doctor = Doctor(engine, settings.request_history, metrics.observe_cause)
    normaliser, remembered = Normaliser(settings.normalise), Remembered(len(settings.all_keys))
    state = ServerState(
        engine, settings, settings.model_name, metrics, admission, remembered, doctor=doctor, normaliser=normaliser
    )
    app = FastAPI(
        title="kvboost-edge",
        version=__version__,
        docs_url=None,  # they would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.kv = state
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    # The last one added is the outermost.
    keys = KeyRing(settings.api_keys, settings.admin_api_keys)
    routes = [route for router in (*ROUTERS, app.router) for route in router.routes]
    app.add_middleware(Gate, state=state, keys=keys, open_paths=health.OPEN_PATHS | _PAGE_PATHS, routes=routes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["DELETE", "GET", "HEAD", "POST"],
            allow_headers=["*"],  # OpenAI's client sends a dozen of its own, and new ones with each version
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Envelope, state=state, hosts=HostList(settings))
    return app
