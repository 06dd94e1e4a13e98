"""Tests of KVBoost's modules, whose exported names are resolved on first use from one table."""

import importlib
import json
from pathlib import Path

import pytest

import kvboost_edge
from helpers.fresh_process import in_fresh_process

ROOT = Path(__file__).parents[1]
NAMES = {
    "batch": (
        "batched_decode",
        "broadcast_kv",
        "find_common_chunk_prefix",
        "group_by_prefix",
        "pad_and_mask",
    ),
    "chunk_registry": ("ChunkRegistry", "ChunkStrategy"),
    "compat": (
        "SUPPORTED_ARCHITECTURES",
        "UNSUPPORTED_ARCHITECTURES",
        "check_model_compatibility",
    ),
    "engine": (
        "CPUPagedEngine",
        "GenerationMode",
        "GenerationResult",
        "InferenceEngine",
        "KVBoost",
        "RecomputeStrategy",
        "WarmResult",
    ),
    "models": (
        "WarmResult",
        "chained_hash",
        "chunk_id_from_tokens",
        "content_hash_from_tokens",
    ),
}
# Names that are missing at the top level of the package, or that mean another function there.
OWN = {("batch", "pad_and_mask"), ("models", "chunk_id_from_tokens")}
NOT_OFFERED = {
    "": (
        "AssemblyMode BlockAllocator CacheBlendRecompute ChunkBlockMapper DiskTier KVCacheManager "
        "PromptAssembler QuantizedKV SelectiveRecompute dequantize_kv install_paged_attention "
        "paged_attention_fwd quantize_kv uninstall_paged_attention"
    ),
    ".compat": "default_device",
    ".engine": "PromptAssembler KVCacheManager",
    ".models": "AssembledPrompt CachedChunk PastKVType",
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_a_module_exports_its_names(module, name):
    value = getattr(__import__(f"kvboost_edge.{module}", fromlist=[name]), name)
    assert value is not None
    if (module, name) not in OWN:
        assert value is getattr(kvboost_edge, name)


def test_aliases_and_own_names():
    from kvboost_edge import batch, engine, models

    assert engine.InferenceEngine is kvboost_edge.CPUPagedEngine
    assert models.chunk_id_from_tokens is models.content_hash_from_tokens
    assert batch.pad_and_mask is not kvboost_edge.pad_and_mask


def test_the_table_lists_no_other_names():
    listed = {module.rpartition(".")[2]: names for module, names in kvboost_edge._MODULES.items()}
    assert set(listed) == set(NAMES)
    for module, names in listed.items():
        loaded = importlib.import_module(f"kvboost_edge.{module}")
        assert set(names) <= set(kvboost_edge._EXPORTS)
        assert all(getattr(loaded, name) is not None for name in names)


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in NOT_OFFERED.items() for name in names.split()],
)
def test_unavailable_names_suggest_an_alternative(module, name):
    wanted = rf"kvboost_edge{module}\.{name} is not available: .*(use|choose|leave) "
    with pytest.raises(ImportError, match=wanted) as failure:
        getattr(importlib.import_module(f"kvboost_edge{module}"), name)
    assert failure.value.name == name


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in NAMES)])
def test_other_names_do_not_exist(module):
    loaded = importlib.import_module(f"kvboost_edge{module}")
    with pytest.raises(AttributeError, match=rf"'kvboost_edge{module}' has no .*'no_such_name'"):
        _ = loaded.no_such_name


def test_a_from_import_keeps_the_reason():
    with pytest.raises(ImportError, match="see how much of a prompt is cached"):
        from kvboost_edge.models import CachedChunk  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'batched_decode'"):
        from kvboost_edge.models import batched_decode  # noqa: F401 -- a name of another module


def test_modules_are_loaded_on_first_use_and_load_no_heavy_package():
    code = """
import json, sys, kvboost_edge
before = [name for name in sys.modules if name.startswith("kvboost_edge.")]
modules = [getattr(kvboost_edge, name) for name in
           ("batch", "chunk_registry", "compat", "engine", "models")]
kvboost_edge.batch.pad_and_mask([[1, 2], [3]], 0)
kvboost_edge.batch.group_by_prefix(["a"], [[1]], 4)
kvboost_edge.chunk_registry.ChunkRegistry(4).split([1, 2, 3])
kvboost_edge.models.content_hash_from_tokens([1])
heavy = [name for name in ("torch", "transformers", "numba", "onnxruntime") if name in sys.modules]
print(json.dumps([before, heavy]))
"""
    assert json.loads(in_fresh_process(code)) == [[], []]


def test_check_model_compatibility_takes_strict_by_position():
    from kvboost_edge.compat import UNSUPPORTED_ARCHITECTURES, check_model_compatibility

    report = check_model_compatibility({"model_type": "bloom"}, False)
    assert report.reason == UNSUPPORTED_ARCHITECTURES["bloom"]
    with pytest.raises(kvboost_edge.ModelFormatError, match="bloom"):
        check_model_compatibility({"model_type": "bloom"}, True)
