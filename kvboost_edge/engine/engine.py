"""`CPUPagedEngine`, the public class. One engine thread runs all requests."""

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
from kvboost_edge.engine.offload.tiering import make_tiering
from kvboost_edge.engine.request.answer_ids import KeptAnswers
from kvboost_edge.engine.request.prompts import Document, Prompt, SnapshotFields
from kvboost_edge.engine.request.request import Request, RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import CorrectnessReport, GenerationResult, WarmResult
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request_builder import RequestBuilder
from kvboost_edge.engine.sequence_factory import Sequences, make_scheduler
from kvboost_edge.engine.spans import ReuseFields
from kvboost_edge.engine.spec_decode.speculation import DraftFields
from kvboost_edge.engine.stats import BlockDetail
from kvboost_edge.engine.tasks.calls import Calls
from kvboost_edge.engine.tasks.documents import Documents
from kvboost_edge.engine.tasks.embedding import Embedding, Embeds
from kvboost_edge.engine.tasks.quality_gate import QualityGate
from kvboost_edge.engine.tasks.verify import verify
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.kvcache.events import CacheEvents
from kvboost_edge.kvcache.prompt_groups import group_by_prefix
from kvboost_edge.models.locate import BUNDLED_MODEL
from kvboost_edge.options import as_int, option_of
from kvboost_edge.reuse.quality_gate import Verdict
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["CPUPagedEngine", "TellsResidency"]

_LOG = logging.getLogger(__name__)
_MAX_NEW_TOKENS = option_of(SamplingParams, "max_new_tokens").default


class TellsResidency:
    """The part of the cache that others may see: figures and hashes, no tokens."""

    _core: EngineCore
    _parts: EngineParts

    @property
    def cache_root(self) -> bytes:
        """Root of the prefix hashes of prompts without tenant and salt.

        `hashing.shared_root` makes the roots of other tenants and salts from it. Engines with equal
        roots have the same model and KV format.
        """
        return self._parts.root

    def take_cache_events(self, whole: bool = False) -> CacheEvents:
        """Return the prefix hashes that entered and left the pool since the last call.

        Snapshots of recurrent state are reported by their `state_hash`. One caller may call it;
        nothing is recorded before the first call.

        Args:
            whole: list all current hashes. The first call does so too, and a call after more
                changes than are recorded (one for each block).
        """
        with self._core.reading():
            return self._parts.manager.events.take(whole)

    def take_tier_events(self, whole: bool = False) -> dict[str, CacheEvents]:
        """Return the prefix hashes that entered and left each offload tier since the last call.

        The engine does not query devices or servers, so that a hash that leaves a tier is reported
        later. One caller may call it; nothing is recorded before the first call.

        Args:
            whole: list all current hashes.

        Returns:
            The events by tier name.
        """
        self._core.check_open()
        return {
            name: CacheEvents(*held) for name, held in self._core.tiering.take_held(whole).items()
        }

    def cache_stats(self) -> dict[str, float]:
        """Return hits, misses and sizes of the cache; `stats.cache_stats` lists the keys."""
        with self._core.reading():
            return stats.cache_stats(self._parts, self._core.tiering)


_Build = Callable[[EngineConfig], EngineParts]  # may be called again for the same model

# Options of an engine's memory and tiers, which the quality gate's engine does not share.
_OWN_MEMORY: dict[str, Any] = {
    "max_memory": None,
    "max_cache_bytes": None,
    "max_chunks": None,
    "max_pinned_blocks": None,
    "disk_cache_dir": None,
    "max_disk_bytes": None,
    "redis_url": None,
    "redis_trust": False,
}


class CPUPagedEngine(Embeds, KVBoostViews, TellsResidency):
    """A language model with a paged KV cache that requests share.

    Make one with `from_pretrained`, or from a loaded transformers model and its tokenizer. Options
    are the fields of `EngineConfig`.

    All methods may be called from several threads at once, and their requests are computed in one
    batch. Close the engine (`close()` or `with`) to free its memory. A later call raises
    KVBoostError, and so does any call in a process forked from this one, because the engine's
    thread does not exist there.
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
        """Load a model directory, a GGUF file or a model of the hub.

        Args:
            model_name_or_path: model directory, GGUF file, hub id, or "kvboost-edge/demo", which is
                part of the package; None: that one.
            strict: option of this name, also by position.
            model_name: another name of model_name_or_path.
            path_or_id: another name of model_name_or_path.
            progress: called with (bytes done, bytes in all) while the native runner packs the
                weights, once per model.
            options: fields of `EngineConfig`.

        Raises:
            ConfigError: an option is invalid.
            ModelFormatError: the files are damaged or not supported.
            CapacityError: weights and pool do not fit in memory.
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
        loads, tiering = make_tiering(parts.manager, parts.backend, parts.tiers)
        info = parts.runner.info
        self._scheduler, speculation = make_scheduler(
            parts.manager,
            loads,
            max_num_seqs=parts.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            target_tpot=config.target_tpot,
            min_chunk_tokens=config.min_chunk_tokens,
            closes_blocks=parts.backend.spec.is_quantized,
            whole=not info.stores_kv,
            history_bytes=parts.history_bytes,
        )
        self._sequences = Sequences(
            parts.tokenizer, speculation, info.vocab_size, parts.eos_token_ids
        )
        self._core = EngineCore(
            parts.runner, parts.backend, self._scheduler, self._sequences, config.debug_checks
        )
        self._core.use_tiers(tiering)
        self._reuse = ReuseFields(config, parts.runner)
        features = (
            self._reuse,
            SnapshotFields(parts.tokenizer, is_recurrent=bool(info.kv_spec.states)),
            DraftFields(config, parts.manager, is_native=info.name == "native"),
            GrammarFields(),
        )
        self._builder = RequestBuilder(
            parts, config, self._core.check_open, self._core.answers, features
        )
        self._calls = Calls(self._core)
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
        # The thread references only the core. An engine without references is therefore collected,
        # and its finalizer ends the thread.
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
        """Constants of the loaded model: architecture, dtype, vocabulary, context."""
        return self._parts.runner.info

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """Sampling values of requests that are sampled and do not name their own."""
        return self._parts.sampling

    @property
    def reuse_refusal(self) -> str | None:
        """Reason that mode="chunk_kv_reuse" is refused for this model, or None."""
        return self._reuse.refusal

    @property
    def default_reuse_refusal(self) -> str | None:
        """Reason that mode="chunk_kv_reuse" with the engine's options is refused, or None.

        It is `reuse_refusal`, or a stored verdict of the quality gate.
        """
        return self.reuse_refusal or self._gate.refusal(self._reuse.own_repair())

    # Generation.

    def submit(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        terms: Terms | None = None,
        entry: RequestArrival | None = None,
        **options: Any,
    ) -> RequestHandle:
        """Queue a request and return at once.

        Args:
            prompt: text, token ids or chat messages.
            sampling: sampling parameters; or give its fields as options.
            terms: mode, tenant, cache_salt, priority, deadline, retention and others; or give its
                fields as options.
            entry: start of the call, if that was earlier.
            options: fields of `SamplingParams` and `Terms`.

        Raises:
            RequestError: the prompt or an option is wrong.
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
            RequestError: as `submit`.
            CapacityError: as `submit`.
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
            max_new_tokens: most tokens to generate; None: up to the end of the context.
            mode: use of the cache.
            temperature: sampling temperature.
            do_sample: draw tokens at random.
            sampling: sampling parameters, with their own max_new_tokens.
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
        """Generate for all prompts together; return the results in their order.

        All prompts are checked before the first is queued. A request's error is raised once all are
        done.

        Args:
            sampling: sampling parameters for all prompts, or a list with one entry for each.
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
        """Generate for many prompts like `generate_batch`, grouped by prefix.

        Prompts that share a prefix run together, while it is in the pool.
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
        """Return an iterator over pieces of the output text, as they become certain.

        The request is checked at once and queued by the first `next`. Closing the iterator cancels
        it.

        Args:
            options: options of `submit`.
        """
        request = self._builder.read(prompt, options)
        self._scheduler.check_fits(request)
        return self._stream(request)

    async def agenerate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """Generate and wait for the whole result; `generate` for asyncio.

        Cancelling the task cancels the request.
        """
        handle = await self._asubmit(prompt, options)
        try:
            return await handle.aresult()
        finally:
            handle.cancel()

    async def astream(self, prompt: Prompt, **options: Any) -> AsyncIterator[str]:
        """Yield pieces of the output text; `stream` for asyncio.

        Closing the iterator cancels the request.
        """
        handle = await self._asubmit(prompt, options)
        try:
            async for text in handle:
                yield text
        finally:
            handle.cancel()

    def read_ahead(self) -> None:
        """Prepare structured output in the background, so that the first such request need not
        wait.
        """
        self._sequences.read_ahead()

    # Cache.

    def warm(
        self,
        text: Prompt | None = None,
        position_offset: int = 0,
        *,
        documents: Sequence[Document] | None = None,
        handles: list[RequestHandle] | None = None,
        **options: Any,
    ) -> WarmResult:
        """Compute a text once, so that prompts that begin with it find it in the cache.

        Documents, and text at another position, are found anywhere by mode="chunk_kv_reuse".

        Args:
            text: text, token ids or chat messages.
            position_offset: number of tokens before the text in later prompts. The text is then
                computed without special tokens.
            documents: texts or token ids, split by the options of `EngineConfig` or those given
                here.
            handles: list that receives the handles of the computed parts, for cancelling.
            options: fields of `Terms`: tenant, cache_salt, priority, ...; pin and ttl as in `pin`.

        Raises:
            RequestError: the text is invalid, or mode="chunk_kv_reuse" is refused.
        """
        terms = Terms.taken_from(options)
        alone = self._documents.read(text, position_offset, documents, terms, options)
        if alone is not None:
            self._gate.require_repair(self._reuse.own_repair())
            return _logged(self._documents.warm(alone, terms, handles))
        request = self._builder.make(cast(Prompt, text), terms, SamplingParams(), prefill_only=True)
        self._run([request])
        return _logged(
            self.warm_result(request.prompt_ids, tenant=terms.tenant, cache_salt=terms.cache_salt)
        )

    def check_reuse(self, **options: Any) -> Verdict:
        """Return the quality gate's verdict on mode="chunk_kv_reuse", stored or tested now.

        The test runs on another engine over the same model. It evicts nothing from this cache and
        does not count in its figures.

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
    ) -> WarmResult:
        """Compute a prompt if it is not cached, and pin its full blocks.

        Pinning it again sets a new end.

        Args:
            ttl: seconds until the pin ends; None: until `unpin`.

        Raises:
            CapacityError: `max_pinned_blocks` leaves no room.
        """
        return self.warm(prompt, tenant=tenant, cache_salt=cache_salt, pin=True, ttl=ttl)

    def unpin(
        self, prompt: Prompt, *, tenant: str | None = None, cache_salt: str | None = None
    ) -> int:
        """End the pin of a prompt; its blocks stay cached like others.

        Returns:
            The number of blocks that other pins do not hold either. 0 if this tenant and salt did
                not pin the prompt.
        """
        terms = Terms(tenant=tenant, cache_salt=cache_salt)
        token_ids = self._builder.token_ids(prompt, terms)
        with self._core.reading():
            return self._parts.manager.pins.end(token_ids, self._builder.root(terms))

    def warm_result(
        self, token_ids: Sequence[int], *, tenant: str | None = None, cache_salt: str | None = None
    ) -> WarmResult:
        """Return the cached part of a prompt as `warm` reports it, without computing anything."""
        root = self._builder.root(Terms(tenant=tenant, cache_salt=cache_salt))
        with self._core.reading():
            # One more token, because the last token of a prompt is never taken from the cache.
            servable = self._parts.manager.peek((*token_ids, 0), root)
        config = self._config
        return WarmResult.of(servable, len(token_ids), config.chunk_tokens, config.block_size)

    warm_chunks = warm

    def kept_answers(
        self, *, tenant: str | None = None, cache_salt: str | None = None
    ) -> KeptAnswers:
        """Return the stored token ids of this tenant's answers.

        Chat messages given as a prompt use them automatically.
        """
        owner, root = (
            self._builder.root(Terms(tenant=tenant, cache_salt=salt)) for salt in (None, cache_salt)
        )
        return KeptAnswers(self._core.answers, owner, root)

    def logits(self, token_ids: Prompt, start: int = 0) -> npt.NDArray[np.float32]:
        """Return the logits of token_ids[start:], computed by the normal paged path.

        Tokens before `start` may come from the cache.

        Returns:
            float32 [num_tokens - start, vocab_size]. Row i belongs to token start + i and predicts
                the next token.
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
        """Run each prompt without and with the cache; compare tokens, logits and distributions.

        Args:
            prompts: prompts; None: prompts made from the tokenizer. An integer here is
                max_new_tokens.
            mode: the mode to compare. chunk_kv_reuse is approximate, so the report measures how far
                greedy answers change.
            options: sampling options; with mode="chunk_kv_reuse", only recompute_*.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is a string; verify_correctness takes a list of prompts")
        if isinstance(prompts, (int, np.integer)):
            if max_new_tokens != 32:
                raise RequestError(f"max_new_tokens is given twice: {prompts} and {max_new_tokens}")
            max_new_tokens = as_int("max_new_tokens", prompts)
            prompts = None
        return verify(self, self._gate, self._reuse, mode, prompts, max_new_tokens, options)

    def paged_stats(self) -> dict[str, Any]:
        """Return figures of pool, memory and engine; `stats.paged_stats` lists the keys."""
        with self._core.reading():
            return stats.paged_stats(
                self._parts,
                self._scheduler,
                self._config,
                self._core.tiering,
                self._core.step_times,
            )

    def block_map(self) -> list[int]:
        """Return one number per block.

        0: free, 1: cached, 2: in use, 3: shared, 4: in use at another position.
        """
        with self._core.reading():
            return stats.block_map(self._parts, self._scheduler)

    def block_details(self, limit: int = 4096) -> list[BlockDetail]:
        """Return state, tokens and references of the first `limit` blocks, without prompt text."""
        with self._core.reading():
            return stats.block_details(self._parts, self._scheduler, limit)

    def num_running(self) -> int:
        """Return the number of requests that hold blocks, without waiting for the engine."""
        return len(self._scheduler.running)

    def num_waiting(self) -> int:
        """Return the number of queued or preempted requests, without waiting."""
        return self._core.num_waiting()

    def waiting_tokens(self) -> int:
        """Return the number of tokens of waiting requests, without waiting.

        The output that a preempted request had generated is included.
        """
        return self._core.waiting_tokens()

    def is_alive(self) -> bool:
        """Return whether the engine can take requests: not closed, and its thread is alive."""
        return self._core.is_alive()

    def failure(self) -> BaseException | None:
        """Return the error that stopped the engine, or None."""
        return self._core.failure

    def reset_cache(self) -> int:
        """Remove all cached blocks of the pool that are not in use. Tiers keep theirs.

        Returns:
            The number of removed blocks.
        """
        with self._core.reading():
            self._scheduler.speculation.forget_all()
            return self._parts.manager.reset()

    def close(self) -> None:
        """End the engine thread and free pool and model; running requests fail.

        It may be called again.
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
        """Log once that text is used as it is although the model has a chat template."""
        if self._said_raw or not self._parts.tokenizer.chat_template:
            return
        self._said_raw = True
        _LOG.warning(
            "generate(text) uses the text as it is; chat messages, as in "
            "generate([{'role': 'user', 'content': text}]), use the model's chat template"
        )

    def _submit(self, request: Request) -> RequestHandle:
        handle = self._core.submit(self._gate.checked(request))
        handle.keep_alive(self)
        return handle

    def _stream(self, request: Request) -> Iterator[str]:
        with self._calls.cancelling([request]):
            yield from self._submit(request)

    def _run(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Queue all requests, or none, and wait for the results."""
        for request in requests:
            self._gate.checked(request)
        return self._calls.run(requests, self._submit)

    async def _asubmit(self, prompt: Prompt, options: dict[str, Any]) -> RequestHandle:
        """Queue a request in another thread; cancelling the task cancels it."""
        # Tokenizing may take long, so it does not run in the event loop.
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
                "logits takes token ids, not text; encode it with engine.tokenizer.encode"
            )
        request = self._builder.make(
            token_ids, Terms(mode=mode), SamplingParams(), logits_start=as_int("start", start)
        )
        if not 0 <= start < request.num_prompt_tokens:
            raise RequestError(
                f"start={start} must be in 0..{request.num_prompt_tokens - 1}, the tokens given"
            )
        return self._calls.logits(request)[1]


def _one_model(**names: str | Path | None) -> str | Path:
    """Return the model that is given under one of these names, or the bundled one.

    Raises ConfigError if it is given under two names.
    """
    given = _given(**names)
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both name the model; give only one of them")
    if not given:
        _LOG.info("no model is given: %s, which is part of the package", BUNDLED_MODEL)
    return next(iter(given.values()), BUNDLED_MODEL)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _length(sampling: object, max_new_tokens: int | None) -> dict[str, Any]:
    """Return the option max_new_tokens; nothing if `sampling` has its own and it is not given."""
    unset = sampling is not None and max_new_tokens == _MAX_NEW_TOKENS
    return {} if unset else {"max_new_tokens": max_new_tokens}


@contextlib.contextmanager
def _gate_apart(build: _Build, config: EngineConfig, num_blocks: int) -> Iterator[QualityGate]:
    """Open another engine over the same model, without tiers; yield its quality gate."""
    small = dataclasses.replace(config, num_blocks=num_blocks, **_OWN_MEMORY)
    with CPUPagedEngine._built_by(build, small) as engine:
        yield engine._gate


def _logged(warmed: WarmResult) -> WarmResult:
    """Log the alignment warning of a result, if it has one, and return the result."""
    if warmed.alignment_warning is not None:
        _LOG.warning("warm: %s", warmed.alignment_warning)
    return warmed
