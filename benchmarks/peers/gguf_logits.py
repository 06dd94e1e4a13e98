"""llama.cpp's logits and token ids for gguf_crosscheck.py, run with llama.cpp's own Python.

    python gguf_logits.py JOBS.json OUT.npz

JOBS: {"models": {name: [path, token ids]}, "heads": {name: [path, [token ids, states]]},
"vocabularies": {name: [path, texts]}}. A head's states are those of the model before each token.

OUT contains float32 [tokens, vocabulary] as "models/NAME" and "heads/NAME", lists of ids in JSON as
"vocabularies/NAME", and the messages of failures as "error/...".
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp as ll
import numpy as np

_MTP_CONTEXT = 1  # LLAMA_CONTEXT_TYPE_MTP
_DECODE = 1  # LLAMA_PROCESS_TYPE_DECODE
_ROOM = 256  # size of a context and of a batch in tokens
_said: list[str] = []


@ll.llama_log_callback
def _listen(level: int, text: bytes, _: Any) -> None:
    if level >= 3:  # keep warnings and errors only
        _said.append(text.decode(errors="replace").strip())


def _loaded(path: str, *, vocab_only: bool = False, load_mtp: bool = False) -> Any:
    params = ll.llama_model_default_params()
    params.vocab_only = vocab_only
    if load_mtp:
        params.load_mtp = True
    model = ll.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(" | ".join(_said[-3:]) or "llama.cpp could not load the file")
    return model


def logits_of(path: str, tokens: list[int]) -> np.ndarray:
    """Return the logits of a prompt. KV is kept in float32, so only the model can differ."""
    model = _loaded(path)
    context = ll.llama_init_from_model(model, _context_params())
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
    found = _read_logits(model, context, len(tokens))
    ll.llama_batch_free(batch)
    ll.llama_free(context)
    ll.llama_model_free(model)
    return found


def head_logits_of(path: str, given: tuple[list[int], list[list[float]]]) -> np.ndarray:
    """Return the logits of the MTP head for tokens from position 1 on, as `logits_of`."""
    tokens, states = given
    model = _loaded(path, load_mtp=True)
    params = _context_params()
    params.ctx_type = _MTP_CONTEXT
    context = ll.llama_init_from_model(model, params)
    batch = ll.llama_batch_ext_init(context)
    kept = []  # the batch refers to these arrays
    for index, (token, state) in enumerate(zip(tokens, states, strict=True)):
        ll.llama_batch_ext_add_token(batch, 0, token)
        position = (ctypes.c_int32 * 1)(index + 1)
        row = (ctypes.c_float * len(state))(*state)
        kept += [position, row]
        ll.llama_batch_ext_set_pos(batch, index, position)
        pointer = ctypes.cast(row, ctypes.POINTER(ctypes.c_float))
        ll.llama_batch_ext_set_embd_token(batch, index, ll.llama_embd(pointer, 1, len(state)))
        ll.llama_batch_ext_set_output_logits(batch, index, True)
    code = ll.llama_process(context, _DECODE, batch)
    if code:
        raise RuntimeError(f"llama_process returned {code}")
    found = _read_logits(model, context, len(tokens))
    ll.llama_batch_ext_free(batch)
    ll.llama_free(context)
    ll.llama_model_free(model)
    return found


def _context_params() -> Any:
    params = ll.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = _ROOM
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    params.type_k = params.type_v = ll.GGML_TYPE_F32
    return params


def _read_logits(model: Any, context: Any, count: int) -> np.ndarray:
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    rows = (ll.llama_get_logits_ith(context, index) for index in range(count))
    return np.stack([np.ctypeslib.as_array(row, shape=(vocab,)).copy() for row in rows])


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
    computed = {"models": logits_of, "heads": head_logits_of, "vocabularies": tokens_of}
    for kind, compute in computed.items():
        for name, (path, given) in jobs.get(kind, {}).items():
            _said.clear()
            try:
                found[f"{kind}/{name}"] = compute(path, given)
            except RuntimeError as error:
                found[f"error/{kind}/{name}"] = np.array(str(error))
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
