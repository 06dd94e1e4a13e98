"""Table of the memory that models take, in the guide for small boards.

The sizes are computed from the models' shapes, not measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from docs_site.reference.tables import table
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.memory.pool_size import num_open_blocks
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.packed.pack_plan import pack_plan, plan_bytes
from kvboost_edge.runners.native.buffers import largest_bytes
from kvboost_edge.runners.native.select_native import native_kv_spec

__all__ = ["CONTEXT", "BoardMemory", "board_memory", "boards_table", "with_boards"]

CONTEXT = 4096
_PROCESS_BYTES = 250_000_000  # interpreter, packages and machine code on x86-64, rounded up
_COLUMNS = ("model", "format", "weights", "KV cache", "buffers", "process", "total")
_HEAD = table(_COLUMNS, ()).splitlines()[0]
_TABLE = re.compile(re.escape(_HEAD) + r"\n(?:\|.*\n)*")

_QWEN2 = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True}
_MODELS: dict[str, Mapping[str, Any]] = {
    "SmolLM2 135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "Qwen2.5 0.5B": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "Qwen2.5 1.5B": {
        **_QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "Llama 3.2 3B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "Qwen3 4B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 1e6}


class BoardMemory(NamedTuple):
    """Memory of a process with one model and one request of `CONTEXT` tokens, in bytes.

    Attributes:
        weights: packed weights, which are also the size of their file.
        pool: KV cache with 8 bits, with the buffers of partly filled blocks.
        buffers: buffers of the largest pass.
    """

    weights: int
    pool: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.buffers + _PROCESS_BYTES


def board_memory(model: str, weights: str) -> BoardMemory:
    """Return the memory of one of the models in a weight format."""
    spec = describe_model({**_COMMON, **_MODELS[model]})
    config = EngineConfig(max_num_seqs=1, max_model_len=CONTEXT, kv_cache_bits=8)
    kv = native_kv_spec(spec, weights, config.block_size, config.kv_bits)
    num_blocks = CONTEXT // config.block_size
    num_open = num_open_blocks(config, num_blocks, config.block_size)
    return BoardMemory(
        plan_bytes(pack_plan(spec, weights)),
        num_blocks * kv.bytes_per_block + num_open * kv.bytes_per_open_block,
        largest_bytes(spec, min(config.max_batch_tokens, CONTEXT), CONTEXT),
    )


def boards_table() -> str:
    """Return the table, with a row for each model and weight format."""
    rows = []
    for model in _MODELS:
        for weights in ("int4", "int8"):
            found = board_memory(model, weights)
            sizes = (found.weights, found.pool, found.buffers, _PROCESS_BYTES, found.total)
            rows.append((model, f"`{weights}`", *(f"{size / 1e6:,.0f} MB" for size in sizes)))
    return table(_COLUMNS, rows)


def with_boards(page: str) -> str:
    """Replace the table of a page. Raises ValueError unless the page has exactly one."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError("the page must have one table of board memory")
    return _TABLE.sub(lambda found: boards_table(), page)
