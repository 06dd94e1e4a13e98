"""A long prompt next to streams on OpenVINO GenAI's continuous batching, for bench_interference.py.

    python openvino_interference.py JOB

JOB is JSON with the fields of bench_interference.py's Job, the length of the streams' prompts
(`stream`) and the maximum tokens of a step, or null for the library's default (`step`). The last
line of output is JSON with the seconds of each stream's tokens (`times`), of the start of the long
prompt (`began`) and of its first token (`ended`), by one clock.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

_ROOM = 8192  # tokens of KV cache for each of 8 streams


class Streams:
    """A pipeline with requests, and the times of their tokens."""

    def __init__(self, job: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = (job["prompt"] + max(8, job["streams"]) * _ROOM) // 32
        scheduler.max_num_seqs = 16
        if job["step"] is not None:
            scheduler.max_num_batched_tokens = job["step"]
        self._pipe = genai.ContinuousBatchingPipeline(
            job["model"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": job["threads"]}
        )
        self._ids = job["ids"]
        self._handles: list[Any] = []
        self.times: list[list[float]] = []
        self._rng = np.random.default_rng(1)

    def add(self, length: int, num_tokens: int) -> None:
        """Submit a prompt of random tokens."""
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        low, high = self._ids
        ids = self._rng.integers(low, high + 1, (1, length), dtype=np.int64)
        self._handles.append(self._pipe.add_request(len(self._handles), ov.Tensor(ids), config))
        self.times.append([])

    def step(self) -> None:
        """Run one step, and record the times of its tokens."""
        self._pipe.step()
        now = time.perf_counter()
        for handle, times in zip(self._handles, self.times, strict=True):
            if handle.can_read():
                for output in handle.read().values():
                    times += [now] * len(output.generated_ids)


def main() -> None:
    """Run one job, and print the times."""
    job = json.loads(sys.argv[1])
    running = Streams(job)
    for _ in range(job["streams"]):
        running.add(job["stream"], job["tokens"])
    while not all(running.times):
        running.step()
    until = time.perf_counter() + job["alone_s"]
    while time.perf_counter() < until:
        running.step()
    began = time.perf_counter()
    running.add(job["prompt"], 1)
    while not running.times[-1]:
        running.step()
    *streams, prompt = running.times
    print(json.dumps({"times": streams, "began": began, "ended": prompt[0]}))


if __name__ == "__main__":
    main()
