"""Page of public Python names, docs/reference/python.md.

mkdocstrings adds signatures and docstrings when the site is built.
"""

from __future__ import annotations

import kvboost_edge
from docs_site.reference.tables import table

__all__ = ["python_page"]

_HEAD = """# Python classes and functions

All public names of `kvboost_edge`, with their signatures and docstrings. The site shows them; this
file only names them. [Python API](../python.md) shows how to use them.
"""
_GROUPS = {
    "Engine": ("CPUPagedEngine", "RequestHandle", "TokenEvent"),
    "Results": (
        "GenerationResult",
        "TokenLogprobs",
        "WarmResult",
        "PromptCheck",
        "CorrectnessReport",
    ),
    "Options": (
        "EngineConfig",
        "SamplingParams",
        "GenerationMode",
        "ChunkStrategy",
        "RecomputeStrategy",
    ),
    "Errors": (
        "KVBoostError",
        "ConfigError",
        "RequestError",
        "CapacityError",
        "ModelFormatError",
        "BackendUnavailable",
        "CacheCorruption",
    ),
    "Supported models": (
        "check_model_compatibility",
        "CompatibilityReport",
        "SUPPORTED_ARCHITECTURES",
        "UNSUPPORTED_ARCHITECTURES",
    ),
    "KVBoost's interface": (
        "ChunkRegistry",
        "batched_decode",
        "broadcast_kv",
        "chained_hash",
        "content_hash_from_tokens",
        "find_common_chunk_prefix",
        "group_by_prefix",
        "pad_and_mask",
    ),
    "LMCache's interface": (
        "LMCacheEngine",
        "LMCacheEngineBuilder",
        "LMCacheEngineConfig",
        "LMCacheEngineMetadata",
    ),
    "llmds' interface": ("KVCache",),
    "Attention for transformers models": (
        "install_flash_attention",
        "uninstall_flash_attention",
        "flash_attention_available",
        "get_flash_attn_tier",
    ),
}
_ALIASES = {"KVBoost": "CPUPagedEngine", "InferenceEngine": "CPUPagedEngine"}
# The members of these classes are listed in tables on other pages.
_TABLES = {
    "EngineConfig": "Fields: [engine options](options.md#engine).",
    "SamplingParams": "Fields: [sampling options](options.md#sampling).",
}


def python_page() -> str:
    """Return the page, with a directive for each public name in each group."""
    listed = [name for names in _GROUPS.values() for name in names]
    missing = {*kvboost_edge.__all__, "__version__"} - {*listed, *_ALIASES, "__version__"}
    if missing or len(listed) != len(set(listed)):
        raise ValueError(f"each public name belongs to one group; missing: {sorted(missing)}")
    aliases = table(("alias", "of"), [(f"`{new}`", f"`{old}`") for new, old in _ALIASES.items()])
    parts = [_HEAD, f"\n{aliases}\n`kvboost_edge.__version__` is the version.\n"]
    for title, names in _GROUPS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            parts.append(f"\n::: kvboost_edge.{name}\n")
            if name in _TABLES:
                parts.append(f"    options:\n      members: false\n\n{_TABLES[name]}\n")
    return "".join(parts)
