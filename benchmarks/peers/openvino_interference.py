"""A long prompt next to streams on OpenVINO GenAI's continuous batching, for bench_interference.py.

    python openvino_interference.py MODEL.gguf THREADS STREAMS PROMPT

The last line of output is JSON: `alone` and `during` are milliseconds between two tokens of a
stream, before the long prompt and while it is computed. `prompt` is the time to the long prompt's
first token in seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

_STREAM = 40  # tokens in the prompt of a stream
_ALONE_S = 3.0
_TOKENS = 6000  # maximum length of a stream
_ROOM = 8192  # tokens of KV cache for the streams
_STEP = 512  # tokens per step


class Streams:
    """A pipeline with requests, and the times of their tokens."""

    def __init__(self, path: str, threads: int, prompt: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = (prompt + 8 * _ROOM) // 32
        scheduler.max_num_batched_tokens = _STEP
        scheduler.max_num_seqs = 16
        self._pipe = genai.ContinuousBatchingPipeline(
            path, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._handles: list[Any] = []
        self.times: list[list[float]] = []
        self._rng = np.random.default_rng(1)

    def add(self, length: int, num_tokens: int) -> None:
        """Submit a prompt of random tokens."""
        config = genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = self._rng.integers(1000, 40_000, (1, length), dtype=np.int64)
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
    """Measure one setting, and print the result."""
    path = sys.argv[1]
    threads, streams, prompt = map(int, sys.argv[2:])
    running = Streams(path, threads, prompt)
    for _ in range(streams):
        running.add(_STREAM, _TOKENS)
    while not all(running.times):
        running.step()
    began = time.perf_counter() + _ALONE_S
    while time.perf_counter() < began:
        running.step()
    began = time.perf_counter()
    running.add(prompt, 1)
    while not running.times[-1]:
        running.step()
    ended = running.times[-1][0]
    found: dict[str, Any] = {"prompt": ended - began, "alone": [], "during": []}
    for times in running.times[:-1]:
        for before, after in itertools.pairwise(times):
            if after < began:
                found["alone"].append((after - before) * 1e3)
            elif after <= ended:
                found["during"].append((after - before) * 1e3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
