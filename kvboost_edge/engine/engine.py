"""The public class `CPUPagedEngine`, which runs all requests on one engine thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine import stats
from kvboost_edge.engine.build import EngineParts, build_from_model, build_from_path
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.grammar.compiler import GrammarFields
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.kvboost_views import KVBoostViews
from kvboost_edge.engine.non_prefix_reuse import ReuseFields
from kvboost_edge.engine.offload.tiering import make_tiering
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.prompts import Document, Prompt, SnapshotFields
from kvboost_edge.engine.request.request import Request, RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import CorrectnessReport, GenerationResult, WarmResult
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request_builder import RequestBuilder
from kvboost_edge.engine.samplers.vocabulary import WordFields
from kvboost_edge.engine.sequence_factory import Sequences, make_model_drafts, make_scheduler
from kvboost_edge.engine.spec_decode.speculation import DraftFields
from kvboost_edge.engine.stats import BlockDetail
from kvboost_edge.engine.tasks.blocking_calls import Calls
from kvboost_edge.engine.tasks.documents import Documents
from kvboost_edge.engine.tasks.embedding import Embedding, Embeds
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.engine.tasks.verify import verify
from kvboost_edge.engine.thinking import ReasoningFields
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.host.memory import Region
from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.prompt_groups import group_by_prefix
from kvboost_edge.models.locate import BUNDLED_MODEL
from kvboost_edge.options import as_int, option_of
from kvboost_edge.reuse.quality_verdict import Verdict
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.shareable import shareable_end
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["CPUPagedEngine"]

_LOG = logging.getLogger(__name__)
_MAX_NEW_TOKENS = option_of(SamplingParams, "max_new_tokens").default


# Can be called again to build another engine over the same model.
_Build = Callable[[EngineConfig], EngineParts]

# Options of memory, tiers and drafts that are reset for the quality gate's separate engine.
_OWN_MEMORY: dict[str, Any] = {
    "max_memory": None,
    "max_cache_bytes": None,
    "max_chunks": None,
    "max_pinned_blocks": None,
    "disk_cache_dir": None,
    "max_disk_bytes": None,
    "redis_url": None,
    "redis_trust": False,
    "draft_model": None,
    "draft_weights": "int4",
    "mtp": "off",
}


class CPUPagedEngine(Embeds, KVBoostViews):
    """A language model with a paged KV cache that requests share.

    Create an engine with `from_pretrained`, or from a loaded transformers model and its tokenizer.
    Options are the fields of `EngineConfig`.

    Methods may be called from several threads at once. The engine batches their requests. Close the
    engine with `close()` or `with` to free its memory. Calls to a closed engine raise KVBoostError.
    So do calls in a forked child process, because the engine thread does not exist there.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        chunk_size: int | None = None,
        max_chunks: int | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(chunk_size=chunk_size, max_chunks=max_chunks, **options)
        self._start(functools.partial(build_from_model, model, tokenizer), config)

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path | None = None,
        strict: bool = True,
        *,
        model_name: str | Path | None = None,
        path_or_id: str | Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Self:
        """Load a model directory, a GGUF file or a model from the hub.

        Args:
            model_name_or_path: model directory, GGUF file or hub id. "kvboost-edge/demo" is the
                bundled model, which is also the default.
            strict: the option of the same name. It may be passed by position.
            model_name: alias of model_name_or_path.
            path_or_id: alias of model_name_or_path.
            progress: called with (bytes done, total bytes) while the native runner packs the
                weights, once per model.
            options: fields of `EngineConfig`.

        Raises:
            ConfigError: an option is invalid.
            ModelFormatError: the files are damaged or not supported.
            CapacityError: the weights and the pool do not fit in memory.
            BackendUnavailable: the backend is not available on this machine.
        """
        model = _one_model(
            model_name_or_path=model_name_or_path, model_name=model_name, path_or_id=path_or_id
        )
        build = functools.partial(build_from_path, model, progress=progress)
        return cls._built_by(build, EngineConfig.from_options(strict=strict, **options))

    @classmethod
    def _built_by(cls, build: _Build, config: EngineConfig) -> Self:
        engine = cls.__new__(cls)
        engine._start(build, config)
        return engine

    def _start(self, build: _Build, config: EngineConfig) -> None:
        self._config = config
        self._said_raw = False
        self._parts = parts = build(config)
        drafter = parts.drafter
        kept = drafter if drafter is not None and drafter.has_kv else None
        loads, tiering = make_tiering(parts.manager, parts.backend, parts.tiers, kept)
        info = parts.runner.info
        self._scheduler, speculation = make_scheduler(
            parts.manager,
            loads,
            max_num_seqs=parts.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            target_tpot=config.target_tpot,
            min_chunk_tokens=config.min_chunk_tokens,
            num_layers=len(info.kv_spec.layers),
            closes_blocks=parts.backend.spec.is_quantized,
            whole=not info.stores_kv,
            remembers=bool(parts.tiers),
            history_bytes=parts.history_bytes,
            models=make_model_drafts(drafter, parts.manager, info),
        )
        self._sequences = Sequences(
            parts.tokenizer, speculation, info.vocab_size, parts.eos_token_ids
        )
        self._core = EngineCore(
            parts.runner, parts.backend, self._scheduler, self._sequences, config.debug_checks
        )
        self._core.use_tiers(tiering)
        self._reuse = ReuseFields(config, parts.runner)
        self._drafts = DraftFields(
            config,
            parts.manager,
            is_native=info.name == "native",
            has_drafter=drafter is not None,
        )
        features = (
            self._reuse,
            SnapshotFields(parts.tokenizer, is_recurrent=bool(info.kv_spec.states)),
            self._drafts,
            GrammarFields(),
            ReasoningFields(parts.tokenizer, parts.suppressed),
            WordFields(parts.tokenizer, info.vocab_size),
        )
        self._builder = RequestBuilder(
            parts, config, self._core.check_open, self._core.answers, features
        )
        self._calls = Calls(self._core, self._builder)
        self._embedding = Embedding(parts, self._builder, self._calls)
        self._documents = Documents(parts, config, self._builder, self._core)
        self._gate = QualityGate(
            parts,
            config,
            self._builder,
            self._core,
            self._documents,
            functools.partial(_gate_apart, build, config),
        )
        # The thread references only the core. An unused engine can therefore be garbage collected,
        # and its finalizer stops the thread.
        self._finalizer = weakref.finalize(self, self._core.request_close)
        self._core.start()

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    @property
    def runner_info(self) -> RunnerInfo:
        """Constants of the loaded model, such as architecture, dtype and context."""
        return self._parts.runner.info

    @property
    def weight_regions(self) -> tuple[Region, Region]:
        """Memory regions of the weights and of the draft weights, empty if unknown or absent."""
        drafter = self._parts.drafter
        return (
            self._parts.runner.info.weight_region,
            Region(0, 0) if drafter is None else drafter.runner.info.weight_region,
        )

    @property
    def cache_root(self) -> bytes:
        """Root of the prefix hashes of prompts with exact prefill and without tenant and salt.

        `hashing.shared_root` derives the roots of other tenants, salts and kinds of prefill from
        this one. Engines with equal roots have the same model and KV format.
        """
        return self._parts.root

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling values for sampled requests that do not set their own."""
        return self._parts.sampling

    @property
    def speculates(self) -> bool:
        """True if requests use draft tokens unless they set `speculation`."""
        return self._parts.runner.info.stores_kv and self._drafts.speculates

    @property
    def reuse_refusal(self) -> str | None:
        """Reason why this model does not support mode="chunk_kv_reuse", or None if it does."""
        return self._reuse.refusal

    @property
    def default_reuse_refusal(self) -> str | None:
        """Reason why mode="chunk_kv_reuse" is refused with the engine's options, or None.

        The reason is `reuse_refusal` or a stored verdict of the quality gate.
        """
        return self.reuse_refusal or self._gate.refusal(self._reuse.own_repair())

    # Methods for generation.

    def submit(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        terms: Terms | None = None,
        entry: RequestArrival | None = None,
        **options: Any,
    ) -> RequestHandle:
        """Queue a request and return its handle without waiting.

        Args:
            prompt: text, token ids or chat messages.
            sampling: sampling parameters. Their fields may be given as options instead.
            terms: request settings such as mode, tenant, priority and deadline. Their fields may be
                given as options instead.
            entry: start time of the call, if it began before this method was called.
            options: fields of `SamplingParams` and `Terms`.

        Raises:
            RequestError: the prompt or an option is invalid.
            CapacityError: the request is larger than the pool.
        """
        return self._submit(
            self._builder.read(prompt, {"sampling": sampling, "terms": terms, **options}, entry)
        )

    def check(self, prompt: Prompt, **options: Any) -> int:
        """Check the arguments of `submit` without queueing a request.

        The quality gate does not run here.

        Returns:
            The number of prompt tokens.

        Raises:
            RequestError: the prompt or an option is invalid.
            CapacityError: the request is larger than the pool.
        """
        request = self._builder.read(prompt, options)
        self._scheduler.check_fits(request)
        self._gate.checked(request)
        return request.num_prompt_tokens

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 64,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        temperature: float | None = None,
        do_sample: bool | None = None,
        *,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> GenerationResult:
        """Generate and wait for the whole result.

        An exception while waiting, such as Ctrl-C, cancels the request within one step.

        Args:
            prompt: text, token ids or chat messages.
            max_new_tokens: maximum number of tokens to generate. None generates until the context
                or the KV cache is full.
            mode: how the request uses the cache.
            temperature: sampling temperature.
            do_sample: sample tokens at random instead of taking the most likely one.
            sampling: sampling parameters. Their max_new_tokens applies unless the argument is
                given.
            options: fields of `SamplingParams` and `Terms`.
        """
        options |= _given(temperature=temperature, do_sample=do_sample)
        options |= _length(sampling, max_new_tokens)
        if isinstance(prompt, str):
            self._say_raw()
        return self._run(
            [self._builder.read(prompt, {"mode": mode, "sampling": sampling, **options})]
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = 64,
        temperature: float | None = None,
        do_sample: bool | None = None,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Generate for all prompts in one batch and return the results in order.

        All prompts are checked before the first one is queued. If a request fails, its error is
        raised after all requests are done.

        Args:
            sampling: sampling parameters for all prompts, or a list with one entry per prompt.
        """
        options |= _given(temperature=temperature, do_sample=do_sample)
        options |= _length(sampling, max_new_tokens)
        return self._run(self._read_all(prompts, sampling, {"mode": mode, **options}))

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = 64,
        temperature: float | None = None,
        do_sample: bool | None = None,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:
        """Generate for many prompts, with prompts that share a prefix scheduled together.

        Arguments and errors are those of `generate_batch`.
        """
        options |= _given(temperature=temperature, do_sample=do_sample)
        options |= _length(sampling, max_new_tokens)
        requests = self._read_all(prompts, sampling, {"mode": mode, **options})
        groups = group_by_prefix(
            requests, [r.prompt_ids for r in requests], self._config.block_size
        )
        order = [index for indices in groups.values() for index in indices]
        ordered = [self._builder.renumbered(requests[index]) for index in order]
        by_index = dict(zip(order, self._run(ordered), strict=True))
        return [by_index[index] for index in range(len(requests))]

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """Return an iterator over pieces of the output text.

        The request is checked immediately but queued only by the first `next`. Closing the iterator
        cancels the request.

        Args:
            options: options of `submit`.
        """
        request = self._builder.read(prompt, options)
        self._scheduler.check_fits(request)
        return self._stream(request)

    async def agenerate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """Generate and wait for the whole result with asyncio.

        Cancelling the task cancels the request.
        """
        handle = await self._asubmit(prompt, options)
        try:
            return await handle.aresult()
        finally:
            handle.cancel()

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """Yield pieces of the output text with asyncio.

        Closing the iterator cancels the request.
        """
        handle = await self._asubmit(prompt, options)
        try:
            async for text in handle:
                yield text
        finally:
            handle.cancel()

    def read_ahead(self) -> None:
        """Prepare structured output in the background to speed up its first request."""
        self._sequences.read_ahead()

    # Methods for the cache.

    def warm(
        self,
        text: Prompt | None = None,
        position_offset: int = 0,
        *,
        documents: Sequence[Document] | None = None,
        handles: list[RequestHandle] | None = None,
        **options: Any,
    ) -> WarmResult:
        """Compute the KV of a text in advance so that later prompts can reuse it.

        Prompts that begin with the text reuse its KV as a cached prefix. Documents and text at
        other positions are reused only with mode="chunk_kv_reuse".

        Args:
            text: text, token ids or chat messages.
            position_offset: number of tokens that precede the text in later prompts. If given, the
                text is computed without special tokens.
            documents: texts or token ids. They are split by the chunking options of `EngineConfig`
                or those passed here.
            handles: list that receives the handles of the computed parts, which allows cancelling.
            options: fields of `Terms`, such as tenant, cache_salt, priority, pin and ttl.

        Raises:
            RequestError: the text is invalid, or the model does not support mode="chunk_kv_reuse".
                The quality gate's verdict has no effect, because it depends on the request's
                recompute_* options.
        """
        terms = Terms.taken_from(options)
        alone = self._documents.read(text, position_offset, documents, terms, options)
        if alone is not None:
            self._reuse.own_repair()  # raises if the engine does not support the mode
            return _logged(self._documents.warm(alone, terms, handles))
        request = self._builder.make(cast(Prompt, text), terms, SamplingParams(), prefill_only=True)
        self._run([request])
        return _logged(
            self.warm_result(
                request.prompt_ids,
                tenant=terms.tenant,
                cache_salt=terms.cache_salt,
                prefill=terms.prefill,
            )
        )

    def check_reuse(self, **options: Any) -> Verdict:
        """Return the quality gate's verdict on mode="chunk_kv_reuse".

        If no verdict is stored, the test runs now on a separate engine over the same model. The
        test changes neither this cache nor its statistics.

        Args:
            options: recompute_* options.
        """
        return self._gate.verdict(self._reuse.own_repair(options))

    def pin(
        self,
        prompt: Prompt,
        ttl: float | None = None,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> WarmResult:
        """Compute a prompt if it is not cached, and pin its full blocks.

        Pinning a prompt again replaces its expiry time. Requests that pin the same blocks with
        `pins` do not change it.

        Args:
            ttl: seconds until the pin expires. None keeps the pin until `unpin`.

        Raises:
            CapacityError: the pins would exceed `max_pinned_blocks`.
        """
        return self.warm(
            prompt, tenant=tenant, cache_salt=cache_salt, prefill=prefill, pin=True, ttl=ttl
        )

    def unpin(
        self,
        prompt: Prompt,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
        holder: str | None = None,
    ) -> int:
        """Remove the pin of a prompt. Its blocks stay cached but can be evicted.

        Args:
            holder: `pin_holder` of the requests whose pin is removed. None removes all pins of the
                prompt.

        Returns:
            The number of blocks that no pin holds any more. 0 if the prompt is not pinned with this
            tenant, salt and prefill.
        """
        terms = Terms(tenant=tenant, cache_salt=cache_salt, prefill=prefill)
        token_ids = self._builder.token_ids(prompt, terms)
        with self._core.reading():
            return self._parts.manager.pins.end(
                token_ids[: shareable_end(self._config, len(token_ids), prefill)],
                self._builder.root(terms),
                holder,
            )

    def warm_result(
        self,
        token_ids: Sequence[int],
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> WarmResult:
        """Return the cached part of a prompt in the form that `warm` returns.

        Nothing is computed.
        """
        root = self._builder.root(Terms(tenant=tenant, cache_salt=cache_salt, prefill=prefill))
        with self._core.reading():
            # The last token of a prompt is never served from the cache, so look up one extra token.
            servable = self._parts.manager.peek((*token_ids, 0), root)
        config = self._config
        return WarmResult.of(
            servable,
            len(token_ids),
            config.chunk_tokens,
            config.block_size,
            shareable_end(config, len(token_ids), prefill),
        )

    warm_chunks = warm

    def kept_answers(
        self,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> KeptAnswers:
        """Return the stored token ids of the answers to this tenant's requests.

        They are used automatically when a prompt is given as chat messages.
        """
        terms = Terms(tenant=tenant, cache_salt=cache_salt, prefill=prefill)
        owner = self._builder.tenant_root(terms)
        return KeptAnswers(self._core.answers, owner, self._builder.root(terms))

    def logits(self, token_ids: Prompt, start: int = 0) -> npt.NDArray[np.float32]:
        """Return the logits of token_ids[start:].

        Tokens before `start` may come from the cache.

        Returns:
            float32 array [num_tokens - start, vocab_size]. Row i predicts the token after token
                start + i.
        """
        return self._logits(token_ids, start, GenerationMode.PREFIX_CACHE)

    def verify_correctness(
        self,
        prompts: Sequence[Prompt] | int | None = None,
        max_new_tokens: int = 32,
        *,
        mode: GenerationMode | str = GenerationMode.PREFIX_CACHE,
        **options: Any,
    ) -> CorrectnessReport:
        """Compare the output of each prompt with and without the cache.

        The report compares tokens, logits and distributions.

        Args:
            prompts: list of prompts, or None for prompts made from the tokenizer. An integer is
                taken as max_new_tokens.
            mode: mode to compare. chunk_kv_reuse is approximate, so its report measures how much
                greedy answers change.
            options: sampling options. With mode="chunk_kv_reuse", only recompute_* options.
        """
        if isinstance(prompts, str):
            raise RequestError(
                "prompts must be a list of prompts, not str; put the prompt in a list"
            )
        if isinstance(prompts, (int, np.integer)):
            if max_new_tokens != 32:
                raise RequestError(
                    f"max_new_tokens is given twice: {prompts} and {max_new_tokens}; give it once"
                )
            max_new_tokens = as_int("max_new_tokens", prompts)
            prompts = None
        return verify(self, self._gate, self._reuse, mode, prompts, max_new_tokens, options)

    def paged_stats(self) -> dict[str, Any]:
        """Return figures of the pool, memory and engine, keyed as in `stats.paged_stats`."""
        with self._core.reading():
            return stats.paged_stats(
                self._parts,
                self._scheduler,
                self._config,
                self._core.tiering,
                self._core.step_times,
                self._core.num_waiting(),
            )

    def cache_stats(self) -> dict[str, float]:
        """Return hits, misses and sizes of the cache, keyed as in `stats.cache_stats`."""
        with self._core.reading():
            return stats.cache_stats(self._parts, self._core.tiering)

    def block_map(self) -> list[int]:
        """Return the status of each block as a number.

        0 is free, 1 cached, 2 in use, 3 shared, and 4 in use at another position.
        """
        with self._core.reading():
            return stats.block_map(self._parts, self._scheduler)

    def block_details(self, limit: int = 4096) -> list[BlockDetail]:
        """Return state, token count and reference count of the first `limit` blocks.

        The prompt text is not included.
        """
        with self._core.reading():
            return stats.block_details(self._parts, self._scheduler, limit)

    def take_cache_events(self, whole: bool = False) -> CacheEvents:
        """Return the prefix hashes that entered and left the pool since the last call.

        Snapshots of recurrent state are reported by their `state_hash`. Only one caller may use
        this method, because each call consumes the events. Recording starts with the first call.

        Args:
            whole: list all current hashes instead of changes. The first call always does, and so
                does a call after more changes than there are blocks.
        """
        with self._core.reading():
            return self._parts.manager.events.take(whole)

    def take_tier_events(self, whole: bool = False) -> dict[str, CacheEvents]:
        """Return the prefix hashes that entered and left each offload tier since the last call.

        Hashes of stored recurrent state and of a draft model's KV are included. The engine does not
        query devices or servers, so hashes that left a tier may be reported late. Only one caller
        may use this method, because each call consumes the events. Recording starts with the first
        call.

        Args:
            whole: list all current hashes instead of changes.

        Returns:
            The events by tier name.
        """
        self._core.check_open()
        return self._core.tiering.take_held(whole)

    def num_running(self) -> int:
        """Return the number of requests that hold blocks.

        The call does not wait for a running step.
        """
        return len(self._scheduler.running)

    def num_waiting(self) -> int:
        """Return the number of queued and preempted requests.

        The call does not wait for a running step.
        """
        return self._core.num_waiting()

    def waiting_tokens(self) -> int:
        """Return the number of tokens still to compute for waiting requests.

        The generated tokens of preempted requests count too. The call does not wait for a running
        step.
        """
        return self._core.waiting_tokens()

    def is_alive(self) -> bool:
        """Return whether the engine is open and its thread is running."""
        return self._core.is_alive()

    def failure(self) -> BaseException | None:
        """Return the error that stopped the engine, or None."""
        return self._core.failure

    def reset_cache(self) -> int:
        """Evict all cached blocks that are not in use. Offload tiers are not changed.

        Returns:
            The number of evicted blocks.
        """
        with self._core.reading():
            self._scheduler.speculation.forget_all()
            return self._parts.manager.reset()

    def close(self) -> None:
        """Stop the engine thread and free the pool and the model.

        Unfinished requests fail with KVBoostError. Closing an engine twice has no effect.
        """
        self._finalizer.detach()
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _read_all(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: dict[str, Any],
    ) -> list[Request]:
        requests = self._builder.read_all(prompts, sampling, options)
        for request in requests:
            self._scheduler.check_fits(request)
        return requests

    def _say_raw(self) -> None:
        """Warn once if plain text is used without applying the model's chat template."""
        if self._said_raw or not self._parts.tokenizer.chat_template:
            return
        self._said_raw = True
        _LOG.warning(
            "generate(text) does not apply the model's chat template; to apply it, pass chat "
            "messages: generate([{'role': 'user', 'content': text}])"
        )

    def _submit(self, request: Request) -> RequestHandle:
        handle = self._core.submit(self._gate.checked(request))
        handle.keep_alive(self)
        return handle

    def _stream(self, request: Request) -> Iterator[str]:
        with self._calls.cancelling([request]):
            yield from self._submit(request)

    def _run(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Check all requests, queue them, and wait for the results."""
        for request in requests:
            self._gate.checked(request)
        return self._calls.run(requests, self._submit)

    async def _asubmit(self, prompt: Prompt, options: dict[str, Any]) -> RequestHandle:
        """Queue a request in a worker thread.

        Cancelling the task cancels the request.
        """
        # Tokenizing a long prompt would block the event loop.
        entry = RequestArrival(time.perf_counter())
        task = asyncio.ensure_future(
            asyncio.to_thread(lambda: self._submit(self._builder.read(prompt, options, entry)))
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(
                lambda done: None if done.exception() else done.result().cancel()
            )
            raise

    def _logits(
        self, token_ids: Prompt, start: int, mode: GenerationMode
    ) -> npt.NDArray[np.float32]:
        if isinstance(token_ids, str):
            raise RequestError(
                "token_ids must be token ids, not text; encode it with engine.tokenizer.encode"
            )
        request = self._builder.make(
            token_ids, Terms(mode=mode), SamplingParams(), logits_start=as_int("start", start)
        )
        if not 0 <= start < request.num_prompt_tokens:
            raise RequestError(
                f"start={start} must be in 0..{request.num_prompt_tokens - 1} for this prompt"
            )
        return self._calls.logits(request)[1]


def _one_model(**names: str | Path | None) -> str | Path:
    """Return the model given under one of several argument names, or the bundled model.

    Raises:
        ConfigError: more than one name is used.
    """
    given = _given(**names)
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both name the model; give only one of them")
    if not given:
        _LOG.info("no model given; using the bundled model %s", BUNDLED_MODEL)
    return next(iter(given.values()), BUNDLED_MODEL)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _length(sampling: object, max_new_tokens: int | None) -> dict[str, Any]:
    """Return max_new_tokens as an option, or no option if `sampling` should decide.

    `sampling` decides if it is given and max_new_tokens has its default value.
    """
    unset = sampling is not None and max_new_tokens == _MAX_NEW_TOKENS
    return {} if unset else {"max_new_tokens": max_new_tokens}


@contextlib.contextmanager
def _gate_apart(build: _Build, config: EngineConfig, num_blocks: int) -> Iterator[QualityGate]:
    """Open a separate engine over the same model, without tiers, and yield its quality gate."""
    small = dataclasses.replace(config, num_blocks=num_blocks, **_OWN_MEMORY)
    with CPUPagedEngine._built_by(build, small) as engine:
        yield engine._gate


def _logged(warmed: WarmResult) -> WarmResult:
    """Log the alignment warning of a result, if any, and return the result."""
    if warmed.alignment_warning is not None:
        _LOG.warning("warm: %s", warmed.alignment_warning)
    return warmed
