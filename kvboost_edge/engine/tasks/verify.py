"""`verify_correctness`, which compares results with and without the cache or non-prefix reuse.

It compares tokens, logits and distributions. Non-prefix reuse is approximate, so only the distance
of its distributions is limited.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.non_prefix_reuse import ReuseFields
from kvboost_edge.engine.request.prompts import Prompt, encode_prompt
from kvboost_edge.engine.request.request import SamplingParams, check_mode
from kvboost_edge.engine.request.results import CorrectnessReport, GenerationResult, PromptCheck
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.samplers.sampling import sampling_distribution
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.errors import RequestError
from kvboost_edge.reuse.quality_verdict import compare
from kvboost_edge.reuse.recompute import Repair
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["verify"]

# Relative L2 distance of logits that rounding can cause, by compute dtype. Weight formats of the
# native runner are not listed, because its results must be bit-identical.
_TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_TEXTS = (
    "A cache keeps what was computed once so that it need not be computed again. ",
    "The lighthouse keeper wrote the weather into a book every evening, and every morning he "
    "read it aloud. ",
)
_BLOCKS_PER_PROMPT = 3

Floats = npt.NDArray[np.float32]


class VerifiedEngine(Protocol):
    """The part of the engine that is tested. Importing the engine here would be circular."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def runner_info(self) -> RunnerInfo: ...

    def generate(
        self, prompt: Prompt, *, mode: GenerationMode = ..., sampling: SamplingParams | None = ...
    ) -> GenerationResult: ...

    def warm(self, text: Prompt) -> object: ...

    def _logits(self, token_ids: Prompt, start: int, mode: GenerationMode) -> Floats: ...


def verify(
    engine: VerifiedEngine,
    gate: QualityGate,
    reuse: ReuseFields,
    mode: GenerationMode | str,
    prompts: Sequence[Prompt] | None,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> CorrectnessReport:
    """Compare the results of a mode with a full computation.

    Raises:
        RequestError: The mode reuses nothing, or an option or prompt is invalid.
    """
    checked = check_mode(mode)
    if checked is GenerationMode.CHUNK_KV_REUSE:
        return _verify_reuse(engine, gate, reuse.own_repair(options), prompts, max_new_tokens)
    if checked is not GenerationMode.PREFIX_CACHE:
        raise RequestError(
            f"mode={checked.value!r} does not reuse KV, so there is nothing to compare; use "
            "'prefix_cache' or 'chunk_kv_reuse'"
        )
    return _verify_exact(engine, prompts, max_new_tokens, options)


def _verify_exact(
    engine: VerifiedEngine,
    prompts: Sequence[Prompt] | None,
    max_new_tokens: int,
    options: Mapping[str, Any],
) -> CorrectnessReport:
    """Check every prompt. Decoding is greedy unless sampling options are given.

    Raises:
        RequestError: The list is empty, or a prompt is invalid.
    """
    params = SamplingParams.from_options(**options, max_new_tokens=max_new_tokens)
    chosen = _default_prompts(engine, max_new_tokens) if prompts is None else list(prompts)
    if not chosen:
        raise RequestError(
            "prompts is an empty list; give at least one prompt, or None for the default ones"
        )
    tolerance = _TOLERANCES.get(engine.runner_info.dtype, 0.0)
    return CorrectnessReport(
        checks=tuple(_check(engine, prompt, params, tolerance) for prompt in chosen),
        logit_tolerance=tolerance,
    )


def _verify_reuse(
    engine: VerifiedEngine,
    gate: QualityGate,
    repair: Repair,
    prompts: Sequence[Prompt] | None,
    max_new_tokens: int,
) -> CorrectnessReport:
    """Compare greedy answers computed in full with answers that reuse KV from other positions.

    Args:
        engine: The engine under test.
        gate: The engine's quality gate.
        repair: The recompute settings to test.
        prompts: Prompts over documents that are cached without tenant and salt. None uses the
            gate's prompts, whose documents are computed now and dropped afterwards.
        max_new_tokens: Maximum length of the answers in tokens.

    Raises:
        RequestError: The list is empty, a prompt is invalid, or the gate's test does not fit the
            context.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, seed=0)
    if prompts is not None and not prompts:
        raise RequestError(
            "prompts is an empty list; give at least one prompt, or None for the default ones"
        )
    info = engine.runner_info
    given = [encode_prompt(one, engine.tokenizer, info.vocab_size)[1] for one in prompts or ()]
    limit = gate.verdict(repair).bound
    with contextlib.ExitStack() as stack:
        if prompts is None:  # a separate engine does not evict blocks from this one's cache
            gate = stack.enter_context(gate.apart(repair))
        whose = stack.enter_context(gate.privately())
        ids = given or gate.prepare(repair, whose).prompts()
        owner = whose.reuse if prompts is None else Terms()
        # One prompt at a time, so that full computations evict few blocks of the documents.
        groups = [ids] if prompts is None else [[one] for one in ids]
        checks = [
            check
            for group in groups
            for check in _reuse_checks(engine, gate, repair, group, whose.full, owner, params)
        ]
    return CorrectnessReport(
        checks=tuple(checks),
        logit_tolerance=0.0,
        mode=GenerationMode.CHUNK_KV_REUSE,
        kl_limit=limit,
    )


def _reuse_checks(
    engine: VerifiedEngine,
    gate: QualityGate,
    repair: Repair,
    ids: Sequence[Sequence[int]],
    alone: Terms,
    owner: Terms,
    params: SamplingParams,
) -> Iterable[PromptCheck]:
    """Compare the answers to prompts that are computed together.

    Args:
        engine: The engine under test.
        gate: The engine's quality gate.
        repair: The recompute settings to test.
        ids: The prompts.
        alone: Terms of the full computations, whose blocks are dropped afterwards.
        owner: Terms under which the documents are cached.
        params: Sampling parameters.
    """
    texts = [engine.tokenizer.decode(one, skip_special_tokens=False) for one in ids]
    colds = gate.generate(ids, alone, params)
    answers = [cold.output_token_ids for cold in colds]
    full = [gate.logits(one, answer, alone)[1] for one, answer in zip(ids, answers, strict=True)]
    gate.forget(alone)
    reused = [
        gate.logits(one, answer, owner, repair) for one, answer in zip(ids, answers, strict=True)
    ]
    warms = gate.generate(ids, owner, params, repair)
    return map(_reuse_check, texts, colds, warms, full, reused)


def _reuse_check(
    text: str,
    cold: GenerationResult,
    warm: GenerationResult,
    cold_logits: Floats,
    reused: tuple[GenerationResult, Floats],
) -> PromptCheck:
    num_reused = reused[0].reused_span_tokens
    warm_logits = reused[1]
    each = [
        compare(one[None], other[None]).kl
        for one, other in zip(cold_logits, warm_logits, strict=True)
    ]
    found = _compared(text, cold, warm, cold_logits, warm_logits, max(each))
    problem = None
    if not num_reused:
        problem = (
            "nothing was reused: warm its documents first, in a pool with room for the documents "
            "and the prompt"
        )
    elif not found.text_equal:
        problem = "the answer with reuse is a different text"
    return dataclasses.replace(found, reused_tokens=num_reused, problem=problem)


def _check(
    engine: VerifiedEngine, prompt: Prompt, params: SamplingParams, tolerance: float
) -> PromptCheck:
    info = engine.runner_info
    cold = engine.generate(prompt, mode=GenerationMode.BASELINE, sampling=params)
    engine.warm(prompt)
    # Both runs use the same seed. Set do_sample, because a seed alone would turn a greedy run into
    # a sampled one.
    same_draws = dataclasses.replace(params, seed=cold.seed, do_sample=params.samples)
    warm = engine.generate(prompt, sampling=same_draws)
    _, ids = encode_prompt(prompt, engine.tokenizer, info.vocab_size)
    tokens = [*ids, *cold.output_token_ids[:-1]]
    cold_logits = engine._logits(tokens, len(ids) - 1, GenerationMode.BASELINE)
    warm_logits = engine._logits(tokens, len(ids) - 1, GenerationMode.PREFIX_CACHE)
    kl = _largest_kl(cold_logits, warm_logits, tokens, len(ids), params)
    found = _compared(cold.prompt, cold, warm, cold_logits, warm_logits, kl)
    relative = found.relative_logit_l2
    problem = None
    if warm.cached_tokens == 0:
        problem = (
            f"nothing was reused: the prompt has {len(ids)} tokens, and only full blocks of "
            f"{engine.config.block_size} are reused"
        )
    elif not (relative <= tolerance if tolerance else np.array_equal(cold_logits, warm_logits)):
        problem = f"the logits differ by {relative:.3g} relative, more than {tolerance:.3g}"
    elif params.samples and not kl <= tolerance:
        problem = f"the distributions differ by KL {kl:.3g}, more than {tolerance:.3g}"
    elif not found.text_equal and (tolerance == 0 or not params.samples):
        problem = "the cached run generated different tokens"
    return dataclasses.replace(found, problem=problem)


def _compared(
    prompt: str,
    cold: GenerationResult,
    warm: GenerationResult,
    cold_logits: Floats,
    warm_logits: Floats,
    kl: float,
) -> PromptCheck:
    """Return the differences between a full and a cached run, without a problem."""
    similar = compare(cold_logits, warm_logits)
    return PromptCheck(
        prompt=prompt,
        prompt_tokens=cold.prompt_tokens,
        reused_tokens=warm.cached_tokens,
        max_logit_difference=float(np.abs(cold_logits - warm_logits).max()),
        relative_logit_l2=float(
            np.linalg.norm(cold_logits - warm_logits) / np.linalg.norm(cold_logits)
        ),
        kl_divergence=kl,
        mean_kl=similar.mean_kl,
        agreement=similar.agreement,
        text_equal=cold.output_token_ids == warm.output_token_ids,
        cold_text=cold.output_text,
        warm_text=warm.output_text,
        problem=None,
    )


def _largest_kl(
    cold: Floats, warm: Floats, tokens: list[int], num_prompt: int, params: SamplingParams
) -> float:
    """Return the largest KL(cold || warm) over the positions in nats, including penalties."""
    # Disable truncation. At its sharp edge, a rounding error would make the KL infinite.
    smooth = dataclasses.replace(
        params, top_k=None, top_p=None, min_p=None, do_sample=params.samples
    )
    largest = 0.0
    for row in range(len(cold)):
        so_far = tokens[: num_prompt + row]
        p = sampling_distribution(cold[row], so_far, num_prompt, smooth)
        q = sampling_distribution(warm[row], so_far, num_prompt, smooth)
        held = p > 1e-12
        largest = max(
            largest, float(np.sum(p[held] * np.log(p[held] / np.maximum(q[held], 1e-300))))
        )
    return largest


def _default_prompts(engine: VerifiedEngine, max_new_tokens: int) -> list[list[int]]:
    """Return the built-in texts as token ids, repeated to fill several blocks and a partial one."""
    length = _BLOCKS_PER_PROMPT * engine.config.block_size + 5
    length = min(length, engine.runner_info.max_context - max_new_tokens)
    prompts = []
    for text in _TEXTS:
        ids = engine.tokenizer.encode(text)
        prompts.append((ids * (length // max(len(ids), 1) + 1))[: max(length, 1)])
    return prompts
