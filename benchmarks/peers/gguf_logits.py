"""llama.cpp's logits and token ids for gguf_crosscheck.py, run with llama.cpp's own Python.

    python gguf_logits.py JOBS.json OUT.npz

JOBS: {"models": {name: [path, token ids]}, "vocabularies": {name: [path, texts]}}.

OUT contains float32 [tokens, vocabulary] as "models/NAME", lists of ids in JSON as
"vocabularies/NAME", and the messages of failures as "error/...".
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp as ll
import numpy as np

_ROOM = 256  # size of a context and of a batch in tokens
_said: list[str] = []


@ll.llama_log_callback
def _listen(level: int, text: bytes, _: Any) -> None:
    if level >= 3:  # keep warnings and errors only
        _said.append(text.decode(errors="replace").strip())


def _loaded(path: str, *, vocab_only: bool) -> Any:
    params = ll.llama_model_default_params()
    params.vocab_only = vocab_only
    model = ll.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(" | ".join(_said[-3:]) or "llama.cpp could not load the file")
    return model


def logits_of(path: str, tokens: list[int]) -> np.ndarray:
    """Return the logits of a prompt. KV is kept in float32, so only the model can differ."""
    model = _loaded(path, vocab_only=False)
    params = ll.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _ROOM
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.type_k = params.type_v = ll.GGML_TYPE_F32
    context = ll.llama_init_from_model(model, params)
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    batch = ll.llama_batch_init(_ROOM, 0, 1)
    batch.n_tokens = len(tokens)
    for index, token in enumerate(tokens):
        batch.token[index] = token
        batch.pos[index] = index
        batch.n_seq_id[index] = 1
        batch.logits[index] = True
        batch.seq_id[index][0] = 0
    code = ll.llama_decode(context, batch)
    if code:
        raise RuntimeError(f"llama_decode returned {code}")
    found = [
        np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), shape=(vocab,)).copy()
        for i in range(len(tokens))
    ]
    ll.llama_batch_free(batch)
    ll.llama_free(context)
    ll.llama_model_free(model)
    return np.stack(found)


def tokens_of(path: str, texts: list[str]) -> np.ndarray:
    """Return the token ids of texts, with control tokens recognized and without BOS."""
    model = _loaded(path, vocab_only=True)
    vocab = ll.llama_model_get_vocab(model)
    found = []
    for text in texts:
        raw = text.encode()
        room = (ll.llama_token * (len(raw) + 8))()
        count = ll.llama_tokenize(vocab, raw, len(raw), room, len(room), False, True)
        found.append(list(room[:count]))
    ll.llama_model_free(model)
    return np.frombuffer(json.dumps(found).encode(), dtype=np.uint8)


def main() -> None:
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    ll.llama_backend_init()
    ll.llama_log_set(_listen, ctypes.c_void_p(0))
    found = {}
    for kind, compute in (("models", logits_of), ("vocabularies", tokens_of)):
        for name, (path, given) in jobs[kind].items():
            _said.clear()
            try:
                found[f"{kind}/{name}"] = compute(path, given)
            except RuntimeError as error:
                found[f"error/{kind}/{name}"] = np.array(str(error))
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
