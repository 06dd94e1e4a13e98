"""OpenVINO GenAI for worker.py: LLMPipeline with paged attention, prefix caching and u8 KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class Engine:
    """OpenVINO GenAI, with KV blocks for as many tokens as the other engines.

    A step has at most 512 tokens, as in the other engines, instead of an unlimited number. Other
    settings that affect the speed are the library's defaults.
    """

    def __init__(self, options: Any) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.num_kv_blocks = options.capacity // 32
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 16
        properties = {"INFERENCE_NUM_THREADS": options.threads, "PERFORMANCE_HINT": "LATENCY"}
        if options.kv == 16:
            properties["KV_CACHE_PRECISION"] = "f16"
        self.pipe = genai.LLMPipeline(
            str(options.model), "CPU", scheduler_config=scheduler, **properties
        )
        self.about = {"version": genai.__version__}

    def _generate(self, rows: list[list[int]], count: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        ids = ov.Tensor(np.array(rows, dtype=np.int64))
        mask = ov.Tensor(np.ones((len(rows), len(rows[0])), dtype=np.int64))
        result = self.pipe.generate(genai.TokenizedInputs(ids, mask), config)
        return [list(tokens) for tokens in result.tokens]

    def hold(self, tokens: list[int]) -> None:
        self._generate([tokens], 1)

    def first_token(self, tokens: list[int], cached: int) -> dict[str, Any]:
        """Time the first token of a prompt. The parent sends new prompts, so each one is cold."""
        return {"tokens": self._generate([tokens], 1)[0]}

    def decode(self, tokens: list[int], count: int) -> dict[str, Any]:
        return {"tokens": self._generate([tokens], count)[0]}

    def share(self, prefix: list[int], suffixes: list[list[int]], count: int) -> dict[str, Any]:
        self._generate([prefix + suffix for suffix in suffixes], count)
        return {}

    def close(self) -> None:
        """Do nothing, because the process ends."""
