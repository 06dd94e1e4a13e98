"""Fixtures of a real server on a free loopback port with the bundled model, and of the ASGI app
with a tiny engine.
"""

import logging

import pytest

from helpers.server.live_servers import ADMIN_KEY, ENGINE_OPTIONS, KEYS, app_client, serving


@pytest.fixture(scope="session")
def demo_engine(isolated_cache):
    """Engine of the bundled model, after a first run that compiles missing kernels."""
    from kvboost_edge import CPUPagedEngine

    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **ENGINE_OPTIONS) as engine:
        engine.generate("warm", max_new_tokens=2)
        yield engine


@pytest.fixture(scope="session")
def live_server(demo_engine):
    """Server of the bundled model without API keys."""
    with serving(demo_engine) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server(demo_engine):
    """Server with two API keys, hence two tenants, and an admin key."""
    with serving(demo_engine, api_keys=KEYS, admin_api_keys=(ADMIN_KEY,)) as server:
        yield server


@pytest.fixture(scope="session")
def client(live_server):
    """OpenAI's client of the server without API keys."""
    import openai

    with openai.OpenAI(
        base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
def kept_logging():
    """Restored handlers, levels and propagation of the server's loggers after a test."""
    names = ("kvboost_edge", "kvboost_edge.server", "uvicorn.error")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers = handlers
        logger.propagate = propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def _tiny_engine(tiny_model_dir):
    from kvboost_edge import CPUPagedEngine

    options = {
        "num_blocks": 64,
        "backend": "cpu",
        "dtype": "float32",
        "debug_checks": True,
        "reuse_gate": "off",
    }
    with CPUPagedEngine.from_pretrained(str(tiny_model_dir), **options) as engine:
        yield engine


@pytest.fixture
def tiny_engine(_tiny_engine):
    """Shared tiny engine with an empty pool. Its forward pass is restored after each test."""
    engine = _tiny_engine
    runner = _tiny_engine._core._runner
    forward = runner.forward
    engine.reset_cache()
    yield engine
    runner.forward = forward


@pytest.fixture
async def tiny_app(tiny_engine):
    """Client of the app over ASGI, without a socket. `tiny_app.app` is the application."""
    from kvboost_edge.server.app import create_app
    from kvboost_edge.server.settings import ServerSettings

    app = create_app(tiny_engine, ServerSettings(model_name="tiny", max_queue_tokens=1 << 22))
    async with app_client(app) as client:
        client.app = app
        yield client
