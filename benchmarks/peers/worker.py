"""The process of one engine: answers one JSON request per line of standard input with one JSON
line.

    python worker.py ENGINE MODEL.gguf --threads 2 --capacity 16384 [--kv 16|8]

Requests: {"do": "ttft", "tokens": [...], "cached": n} (n > 0: the first n tokens were computed
before, by "hold"), {"do": "hold", "tokens": [...]}, {"do": "decode", "tokens": [...], "count": n}
(all but the last tokens are held), {"do": "share", "prefix": [...], "suffixes": [[...], ...],
"count": n}, {"do": "memory"}, {"do": "logits", "tokens": [...]}, {"do": "all_logits", "tokens":
[...], "path": FILE.npy} (llama.cpp only), {"do": "read"} (ours only: a plain read of the weights),
{"do": "ask", "tokens": [...], "count": n} (ours only: with what came from where), {"do": "stats"}
(ours only), {"do": "save", "tokens": [...], "path": ...}, {"do": "restore", ...} (llama.cpp only:
what is held to a file, and from there to the first token), {"do": "embed", "inputs": [[...], ...]}
(ours and "llama.cpp embed": vectors of length 1; the answer has those of the first two). One clock
around the whole call for every engine; llama.cpp's stands still while it goes back to what is held,
which a recurrent model has to compute again. Runs in any environment: the engine is imported here
and nothing of the project but it.
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
    """Resident and peak resident memory of this process, MB."""
    found = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024 / 1e6  # "kB" there are of 1,024 bytes
    return {"rss_mb": found["VmRSS"], "peak_mb": found["VmHWM"]}


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Time one request."""
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
    parser.add_argument("engine", choices=_ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--capacity", type=int, default=16384, help="tokens the KV cache holds")
    parser.add_argument("--kv", type=int, default=16, choices=(16, 8), help="bits of a KV number")
    parser.add_argument(
        "--sequences",
        type=int,
        default=9,
        help="llama.cpp only: sequences at a time, each with a state",
    )
    parser.add_argument(
        "--batch", type=int, default=512, help="llama.cpp embed only: tokens of a pass"
    )
    parser.add_argument("--disk", help="ours only: directory of the disk tier")
    parser.add_argument("--disk-bytes", type=float, help="ours only: its cap")
    parser.add_argument(
        "--redis", help="ours only: URL of a Redis server, whoever writes to it is believed"
    )
    options = parser.parse_args()
    # Engines print to standard output: the answers get a file of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.append(
        str(Path(__file__).parents[2])
    )  # last: names of ours hide none of an engine's environment
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
