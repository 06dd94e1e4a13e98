"""Measurements of one engine, without tokenization and without HTTP."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvboost_edge.cli.bench.cases import Case, Sample
from kvboost_edge.errors import CapacityError, ConfigError, KVBoostError

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine
    from kvboost_edge.engine.request.results import GenerationResult

__all__ = ["CaseTimer", "RandomTokens"]

_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class RandomTokens:
    """Random token ids, the same in every run.

    A prefix depends only on its length, so a later engine finds it in the disk cache. All other
    tokens differ in each call, so nothing finds them in a cache.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._next = np.random.default_rng(0)

    def prefix(self, length: int) -> list[int]:
        """Return the prefix of this length."""
        return self._drawn(np.random.default_rng((1, length)), length)

    def fresh(self, count: int) -> list[int]:
        """Return tokens that no earlier call returned."""
        return self._drawn(self._next, count)

    def _drawn(self, source: np.random.Generator, count: int) -> list[int]:
        drawn: list[int] = source.integers(0, self._vocab_size, count).tolist()
        return drawn


class CaseTimer:
    """Timing of cases on one engine.

    Args:
        engine: idle engine, used by nobody else.
        tokens: source of prompts.
    """

    def __init__(self, engine: CPUPagedEngine, tokens: RandomTokens) -> None:
        self._engine = engine
        self._tokens = tokens
        self._held: int | None = None

    def check(self, case: Case) -> None:
        """Raise KVBoostError if the engine cannot run the case."""
        block_size = self._engine.config.block_size
        if case.n_depth % block_size:
            raise ConfigError(
                f"the depth {case.n_depth} is not a multiple of {block_size} tokens, the size of a "
                f"cached block; use {case.n_depth // block_size * block_size or block_size}"
            )
        most = self._engine.paged_stats()["max_num_seqs"]
        if case.n_requests > most:
            raise CapacityError(
                f"{case.name} does not fit: the engine computes at most {most} requests at the "
                "same time; lower --shared, or raise --option max_num_seqs=N"
            )
        prompt = [0] * (case.n_depth + case.own_tokens)
        try:
            self._engine.check(prompt, max_new_tokens=case.max_new_tokens)
        except KVBoostError as error:
            raise CapacityError(f"{case.name} does not fit: {error}") from error

    def warm_up(self, case: Case) -> None:
        """Run the work of a case briefly, so that code and weights are in memory."""
        self.sample(case._replace(n_gen=min(case.n_gen, 1)))

    def sample(self, case: Case) -> Sample:
        """Compute the cached tokens if necessary, and time the case.

        Raises:
            CapacityError: the cached tokens do not stay in the pool.
        """
        found = 0
        for _ in range(2):
            self._hold(case.n_depth)
            got = self._timed(case)
            if got.preemptions:
                raise CapacityError(
                    f"{case.name} does not fit: the pool is too small for {case.n_requests} "
                    "requests at the same time; make it larger with --option max_cache_bytes=BYTES"
                )
            found = got.num_cached
            if found == case.n_depth:
                return got
            self._held = None  # evicted; compute it again
        raise CapacityError(
            f"{case.name} does not fit: only {found} of {case.n_depth} tokens stay in the cache; "
            "make it larger with --option max_cache_bytes=BYTES"
        )

    def restored(self, case: Case) -> Sample:
        """Time a case whose cached tokens are on disk. The sample tells how many were found."""
        return self._timed(case)

    def store(self, depth: int) -> None:
        """Compute a prefix, which closing the engine writes to disk."""
        self._compute(depth)

    def _hold(self, depth: int) -> None:
        """Make the cache hold a prefix of this length and nothing else."""
        if depth and self._held == depth:
            return
        self._engine.reset_cache()
        if depth:
            self._compute(depth)
        self._held = depth

    def _compute(self, depth: int) -> None:
        # The additional token lets a hybrid model keep its state after `depth` tokens.
        prompt = [*self._tokens.prefix(depth), *self._tokens.fresh(1)]
        self._engine.generate(prompt, max_new_tokens=1, snapshot_hints=(depth,), **_GREEDY)

    def _timed(self, case: Case) -> Sample:
        prefix = self._tokens.prefix(case.n_depth)
        prompts = [prefix + self._tokens.fresh(case.own_tokens) for _ in range(case.n_requests)]
        began = time.perf_counter()
        results = self._engine.generate_batch(
            prompts, max_new_tokens=case.max_new_tokens, **_GREEDY
        )
        seconds = time.perf_counter() - began
        return Sample(
            seconds if case.kind == "shared" else _seconds_of(case, results[0]),
            min(one.exact_cached_tokens for one in results),
            sum(one.preemptions for one in results),
        )


def _seconds_of(case: Case, result: GenerationResult) -> float:
    """Return the time of the prompt, or that of the tokens after the first one."""
    if not case.n_gen:
        return result.ttft_ms / 1e3
    times = result.token_times_ms
    return (times[case.n_gen] - times[0]) / 1e3
