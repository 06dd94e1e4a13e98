"""Tests of the engine's options: rejected values, option names in errors, and default values."""

import re
from pathlib import Path

import numpy as np
import pytest

from kvboost_edge.config import EngineConfig, kv_bits_from_text
from kvboost_edge.errors import ConfigError

TEXT_OPTIONS = ("runner", "backend", "dtype", "device", "revision", "token", "tenant")


@pytest.mark.parametrize("name", TEXT_OPTIONS)
@pytest.mark.parametrize("value", [[], {}, 3, True, b"x", np.array(["auto", "cpu"])], ids=repr)
def test_non_string_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}\b.*must be a string"):
        EngineConfig.from_options(**{name: value})


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        "16",
        "8,4",
        16.0,
        True,
        0,
        5,
        (8,),
        (8, 4, 4),
        (8, 5),
        (16, 8),
        (8, True),
        (8.0, 4),
        np.array([16, 16]),
    ],
    ids=repr,
)
def test_unsupported_kv_cache_bits_are_refused(value):
    with pytest.raises(ConfigError, match=r"^kv_cache_bits="):
        EngineConfig.from_options(kv_cache_bits=value)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (None, (16, 16)),
        (16, (16, 16)),
        (8, (8, 8)),
        (4, (4, 4)),
        ((8, 4), (8, 4)),
        ([4, 8], (4, 8)),
        ((16, 16),) * 2,
    ],
    ids=repr,
)
def test_kv_cache_bits_of_keys_and_values(value, bits):
    config = EngineConfig.from_options(kv_cache_bits=value)
    assert config.kv_bits == bits
    assert not isinstance(config.kv_cache_bits, list), "a frozen config must be hashable"


@pytest.mark.parametrize(
    ("text", "value"), [("16", 16), ("8", 8), ("8,4", (8, 4)), (" 4 , 8 ", (4, 8))]
)
def test_kv_cache_bits_as_text(text, value):
    assert kv_bits_from_text(text) == value


@pytest.mark.parametrize("text", ["", ",", "8,", "eight", "8,4,4", "-8", "8.0"])
def test_invalid_kv_cache_bits_text_is_refused(text):
    with pytest.raises(ConfigError, match=r"^kv_cache_bits="):
        kv_bits_from_text(text)


def test_a_disk_tier_has_a_path_and_a_size():
    assert EngineConfig.from_options(disk_cache_dir="off").disk_cache_dir is None
    assert (
        EngineConfig.from_options(disk_cache_dir="x", max_disk_bytes=8e9).max_disk_bytes
        == 8_000_000_000
    )


@pytest.mark.parametrize("kind", [str, Path])
def test_the_disk_cache_is_an_absolute_path_with_the_home_directory(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for given, expected in (("~/kv", "home/kv"), ("kv", "kv"), (tmp_path / "kv", "kv")):
        config = EngineConfig.from_options(disk_cache_dir=kind(given))
        assert config.disk_cache_dir == tmp_path / expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"disk_cache_dir": ""}, "disk_cache_dir=''"),
        ({"disk_cache_dir": 7}, "disk_cache_dir=7"),
        ({"disk_cache_dir": "false"}, "write './false' for a directory of this name"),
        ({"disk_cache_dir": "a\0b"}, "disk_cache_dir='a\\x00b' is not a valid path"),
        (
            {"disk_cache_dir": "~no such user/kv"},
            "disk_cache_dir='~no such user/kv' is not a valid",
        ),
        ({"max_disk_bytes": 8e9}, "has no effect, because disk_cache_dir is off"),
        ({"disk_cache_dir": "x", "max_disk_bytes": 1000}, "max_disk_bytes=1000 must be at least"),
        ({"disk_cache_dir": "x", "max_disk_bytes": float("inf")}, "max_disk_bytes=inf"),
    ],
    ids=str,
)
def test_invalid_disk_tier_options_are_refused(options, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        EngineConfig.from_options(**options)


def test_threads_are_bounded():
    assert EngineConfig.from_options(num_threads=1024).num_threads == 1024
    with pytest.raises(ConfigError, match=r"num_threads=1025 must be in 1\.\.1024"):
        EngineConfig.from_options(num_threads=1025)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"redis_url": ["redis://:hidden@host"]}, "redis_url must be a URL"),
        ({"redis_url": ""}, "redis_url must be a URL"),
        ({"redis_trust": True}, "redis_trust=True has no effect without redis_url"),
        ({"redis_url": "redis://:hidden@host", "redis_trust": "yes"}, "redis_trust='yes'"),
    ],
)
def test_the_redis_url_is_never_shown(options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        EngineConfig.from_options(**options)
    assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(EngineConfig(redis_url="redis://:hidden@host"))


def test_a_token_is_never_shown():
    assert "hf_secret" not in repr(EngineConfig(token="hf_secret"))
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(token=["hf_secret"])
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recompute_strategy", "left"),
        ("recompute_strategy", None),
        ("recompute_overlap", -1),
        ("recompute_overlap", True),
        ("recompute_ratio", 1.5),
        ("recompute_ratio", float("nan")),
        ("recompute_ratio", "0.1"),
        ("min_chunk_tokens", 0),
        ("min_chunk_tokens", 65537),
        ("min_chunk_tokens", 10**30),
        ("primer_tokens", -1),
        ("primer_tokens", 1.0),
        ("reuse_gate", "on"),
        ("reuse_gate", None),
    ],
)
def test_reuse_options_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}="):
        EngineConfig.from_options(**{name: value})


def test_an_unknown_option_lists_the_known_ones_and_names_the_nearest():
    meant = r"unknown option 'chunk_sise'; did you mean 'chunk_size'\? known options: runner, "
    with pytest.raises(ConfigError, match=meant):
        EngineConfig.from_options(chunk_sise=1)
    with pytest.raises(ConfigError, match="unknown option 'xyzzy'; known options: runner, backend"):
        EngineConfig.from_options(xyzzy=1)


def test_a_memory_limit_of_a_few_bytes_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"max_memory=2 is a number of bytes; did you mean 2GB\?"):
        EngineConfig.from_options(max_memory="2")
    assert EngineConfig.from_options(max_memory=1000).max_memory == 1000
