"""The schedule of bench_server.py on OpenVINO GenAI's continuous batching, in one process.

    python openvino_load.py MODEL.gguf THREADS TOKENS CAPACITY < schedule.json

Steps have at most 512 tokens and 16 requests. The schedule has a list of [pause in seconds, prompt
token ids] for each client. One thread steps the pipeline and keeps the clients' clocks. The last
line of output is JSON with seconds and rss, and for each request first, gaps, total (in seconds)
and tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    path = sys.argv[1]
    threads = int(sys.argv[2])
    tokens = int(sys.argv[3])
    capacity = int(sys.argv[4])
    clients = json.load(sys.stdin)
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.num_kv_blocks = capacity // 32
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = 16
    pipe = genai.ContinuousBatchingPipeline(
        path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    running: dict[int, dict[str, Any]] = {}
    due = [(client[0][0], number) for number, client in enumerate(clients)]
    at = [0] * len(clients)
    seen = []
    _warm_up(pipe, config)
    started = time.perf_counter()
    identifier = 0
    while due or running:
        now = time.perf_counter() - started
        for entry in sorted(due):
            if entry[0] <= now:
                due.remove(entry)
                prompt = clients[entry[1]][at[entry[1]]][1]
                ids = ov.Tensor(np.array([prompt], dtype=np.int64))
                handle = pipe.add_request(identifier, ids, config)
                running[identifier] = {
                    "client": entry[1],
                    "handle": handle,
                    "start": now,
                    "times": [],
                }
                identifier += 1
        if not running:
            time.sleep(max(0.0, min(due)[0] - now))
            continue
        pipe.step()
        now = time.perf_counter() - started
        for key in list(running):
            entry = running[key]
            if entry["handle"].can_read():
                for output in entry["handle"].read().values():
                    entry["times"] += [now - entry["start"]] * len(output.generated_ids)
            if entry["handle"].get_status() != genai.GenerationStatus.RUNNING:
                times = entry["times"]
                gaps = [b - a for a, b in itertools.pairwise(times)]
                seen.append(
                    {"first": times[0], "gaps": gaps, "total": times[-1], "tokens": len(times)}
                )
                number = entry["client"]
                at[number] += 1
                if at[number] < len(clients[number]):
                    due.append((now + clients[number][at[number]][0], number))
                del running[key]
    seconds = time.perf_counter() - started
    rss = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
    print(json.dumps({"seconds": seconds, "rss": rss, "seen": seen}))


def _warm_up(pipe: Any, config: Any) -> None:
    handle = pipe.add_request(1 << 30, ov.Tensor(np.array([[7] * 80], dtype=np.int64)), config)
    while handle.get_status() == genai.GenerationStatus.RUNNING:
        pipe.step()


if __name__ == "__main__":
    main()
