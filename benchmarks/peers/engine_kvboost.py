"""This project's engine for worker.py. Importing this module makes the benchmarks importable."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.bench.plain_read import idle_read_gb_s, runner_token_weights
from benchmarks.engine_parts import runner_of
from kvboost_edge import CPUPagedEngine


class Engine:
    """CPUPagedEngine with the file's own weights."""

    def __init__(self, options: Any) -> None:
        disk = (
            {"disk_cache_dir": options.disk, "max_disk_bytes": options.disk_bytes}
            if options.disk
            else {}
        )
        shared = {"redis_url": options.redis, "redis_trust": True} if options.redis else {}
        self.engine = CPUPagedEngine.from_pretrained(
            options.model,
            num_blocks=options.capacity // 16,
            num_threads=options.threads,
            kv_cache_bits=options.kv,
            speculation="off",  # off because other engines do not speculate
            **disk,
            **shared,
        )
        stats = self.engine.paged_stats()
        keys = (
            "runner",
            "backend",
            "isa",
            "kernel_path",
            "attention_path",
            "num_threads",
            "pool_bytes",
            "state_bytes",
            "weight_bytes",
        )
        self.about = {key: stats[key] for key in keys}
        self.about |= {"vocab_size": self.engine.runner_info.vocab_size}
        self.num_threads = options.threads

    def _generate(self, tokens: list[int], count: int) -> Any:
        return self.engine.generate(tokens, max_new_tokens=count, temperature=0.0, ignore_eos=True)

    def embed(self, inputs: list[list[int]]) -> dict[str, Any]:
        return {"vectors": self.engine.embed(inputs)[:2].tolist()}

    def hold(self, tokens: list[int]) -> None:
        """Make the cache contain exactly these tokens."""
        self.engine.reset_cache()
        self._generate(tokens, 1)

    def first_token(self, tokens: list[int], cached: int) -> dict[str, Any]:
        if not cached:
            self.engine.reset_cache()
        result = self._generate(tokens, 1)
        assert result.cached_tokens == cached // 16 * 16, (result.cached_tokens, cached)
        return {"tokens": list(result.output_token_ids)}

    def decode(self, tokens: list[int], count: int) -> dict[str, Any]:
        return {"tokens": list(self._generate(tokens, count).output_token_ids)}

    def ask(self, tokens: list[int], count: int) -> dict[str, Any]:
        """Answer a prompt without clearing the cache.

        Returns:
            The cache hits of the prompt by tier, the time to the first token, and that of each
                later token.
        """
        result = self._generate(tokens, count)
        return {
            "tokens": list(result.output_token_ids),
            "cached": result.cached_tokens,
            "hits": dict(result.hit_tokens),
            "ttft_s": result.ttft_ms / 1000,
            "load_s": result.load_ms / 1000,
            "step_s": float(np.median(np.diff(result.token_times_ms))) / 1000
            if count > 1
            else None,
        }

    def stats(self) -> dict[str, Any]:
        """Return `paged_stats`."""
        stats = self.engine.paged_stats()
        return {
            key: stats[key]
            for key in (
                "tiers",
                "bytes_per_block",
                "lost_blocks",
                "pool_bytes",
                "miss_tokens",
                "other_bytes",
            )
        }

    def share(self, prefix: list[int], suffixes: list[list[int]], count: int) -> dict[str, Any]:
        prompts = [prefix + suffix for suffix in suffixes]
        self.engine.generate_batch(prompts, max_new_tokens=count, temperature=0.0, ignore_eos=True)
        return {}

    def read(self) -> dict[str, Any]:
        """Time a plain read of the weights that one token reads, with the engine's threads."""
        address, nbytes = runner_token_weights(runner_of(self.engine))
        return {"nbytes": nbytes, "gb_s": idle_read_gb_s(address, nbytes, self.num_threads)}

    def close(self) -> None:
        """Close the engine, which writes remaining blocks to the disk tier."""
        self.engine.close()

    def logits(self, tokens: list[int]) -> list[float]:
        """Return the logits of the last token."""
        return [float(x) for x in np.asarray(self.engine.logits(tokens, start=len(tokens) - 1))[0]]
