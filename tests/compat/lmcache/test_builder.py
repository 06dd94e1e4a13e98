"""One engine per name and configuration."""

import threading

import numpy as np
import pytest

from helpers.compat.lmcache_cases import kv_of
from kvboost_edge import LMCacheEngineBuilder, LMCacheEngineConfig, LMCacheEngineMetadata
from kvboost_edge.errors import RequestError

CONFIG = LMCacheEngineConfig(4)
METADATA = LMCacheEngineMetadata("m", 1, 0, "vllm")


@pytest.fixture(autouse=True)
def no_engine_stays():
    yield
    for name in ("a", "b"):
        LMCacheEngineBuilder.destroy(name)


def test_an_instance_id_has_one_engine():
    assert LMCacheEngineBuilder.get("a") is None
    engine = LMCacheEngineBuilder.get_or_create("a", CONFIG, METADATA)
    assert LMCacheEngineBuilder.get_or_create("a", LMCacheEngineConfig(4), METADATA) is engine
    assert LMCacheEngineBuilder.get("a") is engine
    assert LMCacheEngineBuilder.get_or_create("b", CONFIG, METADATA) is not engine


@pytest.mark.parametrize(
    ("config", "metadata"),
    [
        (LMCacheEngineConfig(5), METADATA),
        (LMCacheEngineConfig(4, True), METADATA),
        (LMCacheEngineConfig(4, backend="file:///elsewhere"), METADATA),
        (CONFIG, LMCacheEngineMetadata("m", 1, 0, "huggingface")),
    ],
)
def test_another_configuration_under_the_same_name_is_a_value_error(config, metadata):
    engine = LMCacheEngineBuilder.get_or_create("a", CONFIG, METADATA)
    with pytest.raises(
        ValueError, match=r"instance_id='a' exists with another configuration.*destroy it"
    ):
        LMCacheEngineBuilder.get_or_create("a", config, metadata)
    assert LMCacheEngineBuilder.get("a") is engine


def test_destroy_closes_and_ignores_unknown_ids():
    engine = LMCacheEngineBuilder.get_or_create("a", CONFIG, METADATA)
    LMCacheEngineBuilder.destroy("a")
    LMCacheEngineBuilder.destroy("a")
    assert LMCacheEngineBuilder.get("a") is None
    with pytest.raises(RequestError, match="closed"):
        engine.store(np.arange(4), kv_of(np.arange(4)))
    assert LMCacheEngineBuilder.get_or_create("a", LMCacheEngineConfig(5), METADATA) is not engine


def test_concurrent_calls_get_the_same_engine():
    got = []
    start = threading.Barrier(8)

    def ask():
        start.wait()
        got.append(LMCacheEngineBuilder.get_or_create("a", CONFIG, METADATA))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, got))) == 1


def test_messages_contain_no_password():
    secret = LMCacheEngineConfig(
        4, backend="redis://u:hunter2@h", redis_secret="hunter2-hunter2-hunter2"
    )
    LMCacheEngineBuilder.get_or_create("a", secret, METADATA)
    with pytest.raises(ValueError) as caught:
        LMCacheEngineBuilder.get_or_create("a", CONFIG, METADATA)
    assert "hunter2" not in str(caught.value) + repr(secret)
