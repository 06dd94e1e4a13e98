"""llama.cpp for worker.py, through the C interface of llama-cpp-python.

Sequences share a prefix as in llama.cpp's server.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as ll
import numpy as np

_BATCH = 2048


_HELD = 0
_ONWARD = 1


class Engine:
    """A llama.cpp context with unified KV cache, and f16 or q8_0 KV.

    Sequence 0 holds the cached tokens. Each request replaces the end of this sequence with its own
    tokens. The memory of a recurrent model cannot be rolled back, so sequence 0 is kept and a copy
    of it continues. If sequence 0 has too many tokens, it is recomputed from the start. This work
    is not timed.
    """

    def __init__(self, options: Any) -> None:
        ll.llama_backend_init()
        ll.llama_log_set(_silent, ctypes.c_void_p(0))
        self.model = ll.llama_model_load_from_file(
            str(options.model).encode(), ll.llama_model_default_params()
        )
        params = ll.llama_context_default_params()
        params.n_ctx = options.capacity
        params.n_batch = _BATCH
        params.n_ubatch = 512
        params.n_seq_max = options.sequences
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = int(options.flash_attn == "on")
        params.kv_unified = True
        params.type_k = params.type_v = ll.GGML_TYPE_F16 if options.kv == 16 else ll.GGML_TYPE_Q8_0
        self.context = ll.llama_init_from_model(self.model, params)
        self.memory = ll.llama_get_memory(self.context)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(_BATCH, 0, 1)
        self.is_recurrent = ll.llama_model_is_recurrent(self.model) or ll.llama_model_is_hybrid(
            self.model
        )
        self.position = -1  # tokens that a recurrent model's sequence 0 holds
        self.about = {"system_info": ll.llama_print_system_info().decode()}

    def _run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode rows of (token, position, sequence, wants logits), at most _BATCH."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        code = ll.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _next(self, row: int) -> int:
        logits = np.ctypeslib.as_array(
            ll.llama_get_logits_ith(self.context, row), shape=(self.vocab,)
        )
        return int(logits.argmax())

    def _prefill(self, tokens: list[int], start: int, sequence: int) -> int:
        last = len(tokens) - 1
        for first in range(start, len(tokens), _BATCH):
            stop = min(first + _BATCH, len(tokens))
            self._run([(tokens[i], i, sequence, i == last) for i in range(first, stop)])
        return self._next(-1)

    def _clear(self) -> None:
        ll.llama_memory_clear(self.memory, True)
        self.position = -1

    def _take_up(self, tokens: list[int], count: int) -> int:
        """Return the sequence that contains the first `count` cached tokens and may be extended."""
        if not self.is_recurrent:
            ll.llama_memory_seq_rm(self.memory, _HELD, count, -1)
            return _HELD
        ll.llama_memory_seq_rm(self.memory, _ONWARD, -1, -1)
        if not count:
            self._clear()
            return _ONWARD
        if not 0 <= self.position <= count:
            self._clear()
        if self.position < count:
            self._prefill(tokens[:count], max(self.position, 0), _HELD)
            self.position = count
        ll.llama_memory_seq_cp(self.memory, _HELD, _ONWARD, -1, -1)
        return _ONWARD

    def hold(self, tokens: list[int]) -> None:
        self._clear()
        # Decoding after all cached tokens recomputes the last one, which a recurrent model's memory
        # cannot do.
        self.position = len(tokens) - 1 if self.is_recurrent else len(tokens)
        self._prefill(tokens[: self.position], 0, _HELD)

    def first_token(self, tokens: list[int], cached: int) -> dict[str, Any]:
        sequence = self._take_up(tokens, cached)
        started = time.perf_counter()
        made = self._prefill(tokens, cached, sequence)
        return {"tokens": [made], "seconds": time.perf_counter() - started}

    def save(self, tokens: list[int], path: str) -> dict[str, Any]:
        """Write the KV of these cached tokens to a file."""
        array = (ll.llama_token * len(tokens))(*tokens)
        nbytes = ll.llama_state_seq_save_file(self.context, path.encode(), 0, array, len(tokens))
        if not nbytes:
            raise RuntimeError(f"llama.cpp saved nothing to {path}")
        return {"nbytes": nbytes}

    def restore(self, tokens: list[int], path: str) -> dict[str, Any]:
        """Compute a prompt's first token from KV in a file: read the file, then run one token.

        Both are timed, so the answer leaves out the seconds of the token alone.
        """
        self._clear()
        array = (ll.llama_token * len(tokens))()
        count = ctypes.c_size_t()
        if not ll.llama_state_seq_load_file(
            self.context, path.encode(), 0, array, len(tokens), ctypes.byref(count)
        ):
            raise RuntimeError(f"llama.cpp restored nothing from {path}")
        assert list(array)[: count.value] == tokens
        return {"tokens": self.first_token(tokens, len(tokens) - 1)["tokens"]}

    def decode(self, tokens: list[int], count: int) -> dict[str, Any]:
        last = len(tokens) - 1
        sequence = self._take_up(tokens, last)
        started = time.perf_counter()
        made = [self._prefill(tokens, last, sequence)]
        while len(made) < count:
            self._run([(made[-1], last + len(made), sequence, True)])
            made.append(self._next(-1))
        return {"tokens": made, "seconds": time.perf_counter() - started}

    def share(self, prefix: list[int], suffixes: list[list[int]], count: int) -> dict[str, Any]:
        start = len(prefix)
        self._take_up(prefix, start)
        for sequence in range(1, len(suffixes) + 1):
            ll.llama_memory_seq_rm(self.memory, sequence, -1, -1)
            ll.llama_memory_seq_cp(self.memory, _HELD, sequence, -1, -1)
        rows: list[tuple[int, int, int, bool]] = []
        ends = []
        for sequence, suffix in enumerate(suffixes, 1):
            rows += [
                (token, start + i, sequence, i == len(suffix) - 1) for i, token in enumerate(suffix)
            ]
            ends.append(len(rows) - 1)
        self._run(rows)
        tokens = [self._next(end) for end in ends]
        for step in range(count - 1):
            at = [start + len(suffix) + step for suffix in suffixes]
            self._run([(t, p, s, True) for s, (t, p) in enumerate(zip(tokens, at, strict=True), 1)])
            tokens = [self._next(row) for row in range(len(suffixes))]
        for sequence in range(1, len(suffixes) + 1):
            ll.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        return {}

    def all_logits(self, tokens: list[int], path: str) -> None:
        """Write the logits of every token, float32 [len(tokens), vocab], to a .npy file.

        `tokens` must fit in one batch.
        """
        self._clear()
        self._run([(token, i, 0, True) for i, token in enumerate(tokens)])
        rows = [ll.llama_get_logits_ith(self.context, i) for i in range(len(tokens))]
        np.save(path, np.stack([np.ctypeslib.as_array(row, shape=(self.vocab,)) for row in rows]))

    def logits(self, tokens: list[int]) -> list[float]:
        """Return the logits of the last token."""
        self._clear()
        self._prefill(tokens, 0, _HELD)
        return np.ctypeslib.as_array(
            ll.llama_get_logits_ith(self.context, -1), shape=(self.vocab,)
        ).tolist()

    def close(self) -> None:
        """Do nothing, because the process ends."""


@ll.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    """Discard the library's log."""
