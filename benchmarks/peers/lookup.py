"""llama.cpp's prompt lookup for bench_speculation.py, as a process that answers prompts.

    lookup.py MODEL THREADS CAPACITY

Each line of standard input is {"tokens": [...], "count": n, "drafts": true}.
"""

from __future__ import annotations

import json
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

_DRAFTED = (
    10  # the default, which its documentation recommends for GPUs; the 2 for CPUs was not faster
)


def main() -> None:
    model = sys.argv[1]
    threads = int(sys.argv[2])
    capacity = int(sys.argv[3])
    common = {
        "n_ctx": capacity,
        "n_threads": threads,
        "n_threads_batch": threads,
        "verbose": False,
        "seed": 0,
    }
    engines = {
        True: Llama(
            model,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=_DRAFTED),
            logits_all=True,
            **common,
        ),
        False: Llama(model, **common),
    }
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        engine = engines[asked["drafts"]]
        engine.reset()
        times: list[float] = []
        for _ in engine.generate(asked["tokens"], temp=0.0, repeat_penalty=1.0):
            times.append(time.perf_counter())
            if len(times) == asked["count"]:
                break
        print(json.dumps({"seconds": times[-1] - times[0], "count": len(times)}), flush=True)


if __name__ == "__main__":
    main()
