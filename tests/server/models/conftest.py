"""Fixtures of two tiny models of different families, and of their responses when served alone."""

import pytest

from helpers.gguf.writer import write_gguf
from helpers.models.fake_hub import fake_hub
from helpers.server.changed_models import REPO
from helpers.server.live_servers import serving
from helpers.server.model_budget import SIZE, Room
from helpers.server.served_models import ASKED, CountedSource
from kvboost_edge.models.locate.managed import managed_models
from kvboost_edge.server.models import loader
from kvboost_edge.server.models.changes import ManagedModels


@pytest.fixture(scope="session")
def second_model_dir(tmp_path_factory):
    from helpers.models.tiny_models import save_tiny_model

    return save_tiny_model("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))


@pytest.fixture
def first(tiny_model_dir):
    return CountedSource(tiny_model_dir)


@pytest.fixture
def second(second_model_dir):
    return CountedSource(second_model_dir)


@pytest.fixture(scope="session")
def alone(tiny_model_dir, second_model_dir):
    """Choice in the response to ASKED by model name, each from a server with only that model."""
    found = {}
    for name, path in (("a", tiny_model_dir), ("b", second_model_dir)):
        with (
            CountedSource(path).open() as engine,
            serving(engine, model_name=name) as server,
            server.client() as client,
        ):
            found[name] = client.post("/v1/completions", json={"model": name, **ASKED}).json()[
                "choices"
            ][0]
    assert found["a"] != found["b"]
    return found


@pytest.fixture
def all_of_one_size(monkeypatch):
    monkeypatch.setattr(loader, "reserved_bytes", lambda engine: SIZE)


@pytest.fixture
async def room(all_of_one_size):
    found = Room()
    yield found
    await found.close()


@pytest.fixture
def hub(tmp_path, second_model_dir, monkeypatch):
    """Simulated hub with the second model as a GGUF file, and an empty store of pulled models."""
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / "own"))
    write_gguf(second_model_dir, tmp_path / "Tiny-Q8_0.gguf", kind="Q8_0")
    files = {"Tiny-Q8_0.gguf": (tmp_path / "Tiny-Q8_0.gguf").read_bytes()}
    with fake_hub(REPO, files, tmp_path / "hub", monkeypatch) as found:
        yield found


@pytest.fixture
def serve(hub, first):
    """Function `serve(**settings)` that starts a server of "a" whose models may be changed."""
    store = managed_models()

    def source_of(model):
        path = store.path_of(model) or first.path
        return CountedSource(
            path, **({"max_model_len": model.context} if model.context else {})
        ).source

    def call(engine, **settings):
        managed = ManagedModels(store, source_of)
        return serving(engine, managed=managed, **{"model_name": "a", **settings})

    with first.open() as engine:
        yield lambda **settings: call(engine, **settings)
