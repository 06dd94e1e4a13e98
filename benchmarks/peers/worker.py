"""Process of one engine, which answers one JSON request per line of standard input.

    python worker.py ENGINE MODEL.gguf --threads 2 --capacity 16384 [--kv 16|8]

Requests:

    {"do": "ttft", "tokens": [...], "cached": n}    if n > 0, "hold" has computed n tokens before
    {"do": "hold", "tokens": [...]}
    {"do": "decode", "tokens": [...], "count": n}   all tokens except the last are held
    {"do": "share", "prefix": [...], "suffixes": [[...], ...], "count": n}
    {"do": "memory"}
    {"do": "logits", "tokens": [...]}
    {"do": "all_logits", "tokens": [...], "path": FILE.npy}    llama.cpp only
    {"do": "read"}                                  ours only: a plain read of the weights
    {"do": "ask", "tokens": [...], "count": n}      ours only: also reports the cache hits
    {"do": "stats"}                                 ours only
    {"do": "save", "tokens": [...], "path": ...}    llama.cpp only: write held tokens to a file
    {"do": "restore", ...}                          llama.cpp only: first token from that file
    {"do": "embed", "inputs": [[...], ...]}         ours and "llama.cpp embed": unit vectors, of
                                                    which the answer contains the first two

One clock around the whole call times every engine. For llama.cpp it stops while a recurrent model
recomputes held tokens. The worker runs in any environment, because it imports only the engine and
nothing else of the project.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

_ENGINES = {
    "kvboost_edge": ("engine_kvboost", "Engine"),
    "llama.cpp": ("engine_llama", "Engine"),
    "llama.cpp embed": ("embed_llama", "Engine"),
    "openvino": ("engine_openvino", "Engine"),
}


def memory() -> dict[str, float]:
    """Return the current and peak resident memory of this process in MB."""
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024 / 1e6  # "kB" means 1,024 bytes in this file
    return {"rss_mb": found["VmRSS"], "peak_mb": found["VmHWM"]}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Answer and time one request."""
    what = request["do"]
    if what == "memory":
        return memory()
    if what == "hold":
        engine.hold(request["tokens"])
        return {}
    if what == "read":
        return dict(engine.read())
    if what == "all_logits":
        engine.all_logits(request["tokens"], request["path"])
        return {}
    if what == "stats":
        return dict(engine.stats())
    started = time.perf_counter()
    if what == "ttft":
        result = engine.first_token(request["tokens"], request["cached"])
    elif what == "decode":
        result = engine.decode(request["tokens"], request["count"])
    elif what == "share":
        result = engine.share(request["prefix"], request["suffixes"], request["count"])
    elif what == "ask":
        result = engine.ask(request["tokens"], request["count"])
    elif what == "embed":
        result = engine.embed(request["inputs"])
    elif what in ("save", "restore"):
        result = getattr(engine, what)(request["tokens"], request["path"])
    elif what == "logits":
        result = {"logits": engine.logits(request["tokens"])}
    else:
        raise ValueError(f"unknown request {what!r}")
    return {"seconds": time.perf_counter() - started, **result}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=_ENGINES, help="engine to run")
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument(
        "--threads", type=int, default=2, help="number of compute threads (default: %(default)s)"
    )
    parser.add_argument(
        "--capacity", type=int, default=16384, help="size of the KV cache in tokens"
    )
    parser.add_argument("--kv", type=int, default=16, choices=(16, 8), help="bits per KV value")
    parser.add_argument(
        "--flash-attn",
        choices=("on", "off"),
        default="on",
        help="llama.cpp only: whether it uses flash attention, which 8-bit values need",
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=9,
        help="llama.cpp only: maximum number of sequences, each with a state",
    )
    parser.add_argument(
        "--batch", type=int, default=512, help="llama.cpp embed only: maximum tokens per pass"
    )
    parser.add_argument("--disk", help="ours only: directory of the disk tier")
    parser.add_argument(
        "--disk-bytes", type=float, help="ours only: size limit of the disk tier in bytes"
    )
    parser.add_argument("--redis", help="ours only: URL of a trusted Redis server")
    options = parser.parse_args()
    # Engines print to standard output, so answers use a copy of it.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.append(
        str(Path(__file__).parents[2])
    )  # appended last, so that our modules hide none of the engine's environment
    module, name = _ENGINES[options.engine]
    started = time.perf_counter()
    engine = getattr(importlib.import_module(module), name)(options)
    print(
        json.dumps({"load_s": time.perf_counter() - started, "about": engine.about}),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
