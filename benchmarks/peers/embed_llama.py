"""llama.cpp embeddings for worker.py, through the C interface of llama-cpp-python.

Each pass takes as many texts as fit, pooled as the file specifies.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as ll
import numpy as np

_MOST_TEXTS = 64


class Engine:
    """A llama.cpp context for embeddings with flash attention.

    A pass of at most `options.batch` tokens is one micro batch, which bidirectional attention
    requires.
    """

    def __init__(self, options: Any) -> None:
        ll.llama_backend_init()
        ll.llama_log_set(_silent, ctypes.c_void_p(0))
        self.model = ll.llama_model_load_from_file(
            str(options.model).encode(), ll.llama_model_default_params()
        )
        params = ll.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.most = options.batch
        params.n_seq_max = _MOST_TEXTS
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = 1
        params.kv_unified = True
        params.embeddings = True
        self.context = ll.llama_init_from_model(self.model, params)
        self.memory = ll.llama_get_memory(self.context)
        self.size = ll.llama_model_n_embd(self.model)
        self.batch = ll.llama_batch_init(self.most, 0, 1)
        pooling = ll.llama_pooling_type(self.context)
        self.about = {
            "system_info": ll.llama_print_system_info().decode(),
            "pooling": pooling,
            "batch": self.most,
        }

    def embed(self, inputs: list[list[int]]) -> dict[str, Any]:
        found: list[Any] = []
        texts: list[list[int]] = []
        for tokens in inputs:
            if len(texts) == _MOST_TEXTS or sum(map(len, texts)) + len(tokens) > self.most:
                found += self._pass(texts)
                texts = []
            texts.append(tokens)
        found += self._pass(texts)
        assert len(found) == len(inputs)
        return {"vectors": [vector.tolist() for vector in found[:2]]}

    def _pass(self, texts: list[list[int]]) -> list[Any]:
        if self.memory:
            ll.llama_memory_clear(self.memory, True)
        batch = self.batch
        row = 0
        for sequence, tokens in enumerate(texts):
            for position, token in enumerate(tokens):
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = True
                row += 1
        batch.n_tokens = row
        code = ll.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        vectors = []
        for sequence in range(len(texts)):
            found = ll.llama_get_embeddings_seq(self.context, sequence)
            vector = np.ctypeslib.as_array(found, shape=(self.size,)).astype(np.float32)
            vectors.append(vector / np.linalg.norm(vector))
        return vectors

    def close(self) -> None:
        ll.llama_free(self.context)
        ll.llama_model_free(self.model)


@ll.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Discard the library's log."""
