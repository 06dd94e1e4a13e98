"""Configuration and metadata: LMCache's names, refused values, and the names in the errors."""

import pytest

from kvboost_edge import LMCacheEngineConfig, LMCacheEngineMetadata
from kvboost_edge.errors import ConfigError

GIB = 1 << 30


def test_names_of_the_original_engine():
    config = LMCacheEngineConfig(chunk_size=16, save_decode_cache=True, backend="cpu")
    assert (config.chunk_size, config.save_decode_cache, config.places) == (
        16,
        True,
        (("memory", "cpu"),),
    )
    assert config == LMCacheEngineConfig(16, True, "cpu")
    assert LMCacheEngineConfig() == LMCacheEngineConfig(256, False, "memory")
    assert LMCacheEngineConfig().places == (("memory", "memory"),)
    assert LMCacheEngineConfig(backend="file:///a/b").places == (("disk", "/a/b"),)
    assert LMCacheEngineConfig(backend=["memory", "file://b", "valkey://h"]).places == (
        ("memory", "memory"),
        ("disk", "b"),
        ("redis", "valkey://h"),
    )
    assert LMCacheEngineConfig(backend="valkeys://h").places == (("redis", "valkeys://h"),)
    metadata = LMCacheEngineMetadata("model", 2, 1, "huggingface")
    assert (metadata.model_name, metadata.world_size, metadata.worker_id, metadata.fmt) == (
        "model",
        2,
        1,
        "huggingface",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"chunk_size": 2.0}, "chunk_size=2.0"),
        ({"chunk_size": True}, "chunk_size=True"),
        ({"save_decode_cache": 1}, "save_decode_cache=1"),
        ({"max_memory_bytes": 0}, "max_memory_bytes=0"),
        ({"max_memory_bytes": "much"}, "max_memory_bytes='much'"),
        ({"max_memory_bytes": float("nan")}, "max_memory_bytes=nan"),
        ({"max_disk_bytes": float("inf")}, "max_disk_bytes=inf"),
        ({"backend": "disk"}, "backend='disk'"),
        ({"backend": "file://"}, "backend=file://…"),
        ({"backend": 5}, "backend=5"),
        ({"backend": "lm://user:hunter2@h"}, "backend=lm://…"),
        ({"backend": []}, "at least one backend"),
        ({"backend": ["memory", "cpu"]}, "each kind at most once"),
    ],
)
def test_invalid_values_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LMCacheEngineConfig(**options)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_name": ""}, "model_name=''"),
        ({"model_name": None}, "model_name=None"),
        ({"world_size": -1}, "world_size=-1"),
        ({"worker_id": "0"}, "worker_id='0'"),
        ({"fmt": "hf"}, "fmt='hf' must be one of huggingface, vllm"),
    ],
)
def test_invalid_metadata_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        LMCacheEngineMetadata(
            **{"model_name": "m", "world_size": 1, "worker_id": 0, "fmt": "vllm", **change}
        )


def test_each_metadata_has_its_own_space():
    made = [
        LMCacheEngineMetadata(model, size, worker, fmt).space
        for model in ("m", "m1", "m'1")
        for size in (1, 11)
        for worker in (0, 1, 11)
        for fmt in ("vllm", "huggingface")
    ]
    assert len(set(made)) == len(made)
    assert (
        LMCacheEngineMetadata("m", 1, 0, "vllm").space
        == LMCacheEngineMetadata("m", 1, 0, "vllm").space
    )


def test_sizes_accept_units():
    config = LMCacheEngineConfig(max_memory_bytes="500M", max_disk_bytes="8GiB")
    assert (config.max_memory_bytes, config.max_disk_bytes) == (500_000_000, 8 * GIB)


def test_names_and_defaults_of_the_v1_engine():
    config = LMCacheEngineConfig.from_defaults()
    assert (config.chunk_size, config.places, config.max_memory_bytes) == (
        256,
        (("memory", "memory"),),
        5 * GIB,
    )
    assert (config.save_decode_cache, config.save_unfull_chunk) == (False, False)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=64,
        local_cpu=False,
        local_disk="/d",
        max_local_disk_size=1.5,
        remote_url="redis://h",
        save_unfull_chunk=True,
        redis_trust=True,
    )
    assert (config.chunk_size, config.places) == (64, (("disk", "/d"), ("redis", "redis://h")))
    assert (config.max_disk_bytes, config.save_unfull_chunk, config.redis_trust) == (
        1.5 * GIB,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_blending": True}, "enable_blending: not supported"),
        ({"cache_policy": "LFU"}, "cache_policy='LFU'"),
        ({"remote_serde": "cachegen"}, "remote_serde='cachegen'"),
        ({"local_disk": "/d"}, "max_local_disk_size=0.0"),
        ({"local_cpu": False}, "at least one backend"),
        ({"max_local_cpu_size": -1}, "max_local_cpu_size=-1"),
        ({"remote_url": "lm://h"}, "backend=lm://…"),
    ],
)
def test_unsupported_v1_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        LMCacheEngineConfig.from_defaults(**options)


def test_from_env_accepts_the_options_of_from_defaults():
    config = LMCacheEngineConfig.from_env(
        {
            "LMCACHE_CHUNK_SIZE": "32",
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.5",
            "LMCACHE_LOCAL_DISK": "file:///d",
            "LMCACHE_MAX_LOCAL_DISK_SIZE": "2",
            "LMCACHE_LOG_LEVEL": "INFO",
            "PATH": "/",
        }
    )
    assert (config.chunk_size, config.max_memory_bytes, config.max_disk_bytes) == (
        32,
        GIB // 2,
        2 * GIB,
    )
    assert config.places == (("memory", "memory"), ("disk", "/d"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LMCACHE_CHUNK_SIZE", "many", "LMCACHE_CHUNK_SIZE='many' must be a number"),
        ("LMCACHE_LOCAL_CPU", "maybe", "LMCACHE_LOCAL_CPU='maybe' must be true or false"),
        ("LMCACHE_ENABLE_P2P", "1", "LMCACHE_ENABLE_P2P is not supported"),
        ("LMCACHE_CONFIG_FILE", "f", "CONFIG_FILE is not"),
    ],
)
def test_unsupported_environment_variables_are_refused_by_name(name, value, message):
    with pytest.raises(ConfigError, match=message):
        LMCacheEngineConfig.from_env({name: value})
