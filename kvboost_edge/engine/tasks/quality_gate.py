"""The quality gate of non-prefix KV reuse.

The gate refuses requests if a stored verdict says that reuse harms the model's answers. The test
runs only on demand and on a separate engine. It therefore evicts no cached blocks and changes no
statistics of the user's engine. The model answers questions about a built-in text three times:
computed in full, with the documents in another order, and with reuse. reuse/quality_verdict.py
contains the comparison.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.request.request import Request, RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request_builder import RequestBuilder
from kvboost_edge.engine.schedule.sequence import Floats
from kvboost_edge.engine.tasks.blocking_calls import Calls
from kvboost_edge.engine.tasks.documents import Documents, LoneText
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.host.file_memo import NO_CACHE, FileStamp
from kvboost_edge.reuse.quality_verdict import (
    ANSWER_TOKENS,
    Comparison,
    QualityPrompts,
    Verdict,
    compare,
    make_material,
    outcome_stamp,
    read,
    write,
)
from kvboost_edge.reuse.recompute import Repair

__all__ = ["Privately", "QualityGate"]

_LOG = logging.getLogger(__name__)
_MARK = "(the text)"
_LEAST_FOUND = 0.9  # share of the documents' tokens that must be found in the test's cache
_LOOK_AGAIN_SECONDS = 10.0  # interval between lookups of a missing verdict
_SPARE_BLOCKS = 16  # extra blocks in the pool of the test's engine
_GREEDY = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0, seed=0)


class Privately(NamedTuple):
    """Terms of two private caches, shared neither with each other nor with other requests."""

    full: Terms
    reuse: Terms


class QualityGate:
    """The quality gate of one engine.

    Requests use the stored verdict and never run the test. The class is safe to use from any thread
    except the engine thread. Only one thread runs the test, and other callers of `verdict` wait.

    Args:
        open_apart: Function that opens a separate engine over the same model with a number of
            blocks, and yields that engine's gate.
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        builder: RequestBuilder,
        core: EngineCore,
        documents: Documents,
        open_apart: Callable[[int], AbstractContextManager[QualityGate]],
    ) -> None:
        self._open_apart = open_apart
        self._parts = parts
        self._config = config
        self._builder = builder
        self._core = core
        self._documents = documents
        self._calls = Calls(core, builder)
        self._lock = threading.Lock()
        self._verdicts: dict[Repair, Verdict] = {}
        self._next_look: dict[Repair, float] = {}
        # File stamps of verdicts, or None where the test does not fit the context.
        self._stamps: dict[Repair, FileStamp | None] = {}
        self._has_warned = False
        self._cache_dir = None if config.pack_cache else NO_CACHE

    def checked(self, request: Request) -> Request:
        """Return the request, with `gate="passed"` if a stored verdict says so.

        Raises:
            CapacityError: The request does not fit in the pool.
            RequestError: The stored verdict refuses this kind of reuse.
        """
        if request.repair is None or self._config.reuse_gate != "auto":
            return request
        self._core.scheduler.check_fits(request)
        known = self.require_repair(request.repair)
        return request if known is None else dataclasses.replace(request, gate="passed")

    def require_repair(self, repair: Repair) -> Verdict | None:
        """Return the stored verdict, if any, or None.

        Raises:
            RequestError: The verdict refuses these recompute settings.
        """
        if self._config.reuse_gate != "auto":
            return None
        known = self._known(repair.tested)
        if known is not None:
            _refuse(known)
        elif not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the quality of non-prefix reuse is unchecked for this model; to check it, run "
                "`kvboost-edge reuse-check -m MODEL` once with the same options"
            )
        return known

    def refusal(self, repair: Repair) -> str | None:
        """Return why a stored verdict refuses these recompute settings, or None."""
        try:
            self.require_repair(repair)
        except RequestError as error:
            return str(error)
        return None

    def verdict(self, repair: Repair) -> Verdict:
        """Return the stored verdict, or run the test now.

        Raises:
            RequestError: The model's context is too short for the test.
        """
        repair = repair.tested
        self._core.check_open()
        with self._lock:
            self._next_look.pop(repair, None)
            known = self._known(repair)
            if known is None:
                known = self._verdicts[repair] = self._find_out(repair)
        return known

    def _known(self, repair: Repair) -> Verdict | None:
        """Return the verdict from memory or from the stored file, or None."""
        known = self._verdicts.get(repair)
        if known is None and time.monotonic() >= self._next_look.get(repair, 0.0):
            stamp = self._stamp(repair)
            known = None if stamp is None else read(stamp, self._cache_dir)
            if known is None:
                self._next_look[repair] = time.monotonic() + _LOOK_AGAIN_SECONDS
            else:
                self._verdicts[repair] = known
        return known

    def _find_out(self, repair: Repair) -> Verdict:
        material = self._material(repair)
        _LOG.info("testing non-prefix KV reuse (%s) on built-in text", repair.strategy)
        began = time.perf_counter()
        with self.apart(repair) as gate:
            verdict = gate._measure(repair, material)
        _LOG.info("reuse %s in %.1f s: %s", _word(verdict), time.perf_counter() - began, verdict)
        if (stamp := self._stamp(repair)) is not None:
            write(stamp, verdict, self._cache_dir)
        return verdict

    def _stamp(self, repair: Repair) -> FileStamp | None:
        """Return the file stamp of a verdict, or None if the test does not fit the context."""
        # Cache the stamp. Requests need it on the server's event loop, and tokenizing the test's
        # texts is slow.
        if repair not in self._stamps:
            stamp = None
            with contextlib.suppress(RequestError):
                material = self._material(repair)
                stamp = outcome_stamp(self._parts.identity, repair, self._lead(), material)
            self._stamps[repair] = stamp
        return self._stamps[repair]

    def apart(self, repair: Repair) -> AbstractContextManager[QualityGate]:
        """Open a separate engine with room for the built-in text. The context yields its gate."""
        return self._open_apart(self._num_blocks(self._material(repair)))

    def _num_blocks(self, material: QualityPrompts) -> int:
        """Return the number of blocks that the test's prompts, answers and documents need."""
        size = self._config.block_size
        texts = [len(prompt) + ANSWER_TOKENS for prompt in material.prompts()]
        texts += [len(self._lead()), *map(len, material.documents)]
        return sum(-(-text // size) + 1 for text in texts) + _SPARE_BLOCKS

    def _lead(self) -> tuple[int, ...]:
        size = self._config.block_size
        header = len(self._documents.header)
        primer = self._config.primer_tokens
        return self._documents.lead(header + primer + (-(header + primer) % size if primer else 0))

    def _material(self, repair: Repair) -> QualityPrompts:
        """Return the test's prompts, made to fit the model's context.

        Each document is longer than the part that is recomputed after a chunk boundary.

        Raises:
            RequestError: The context is too short for the test.
        """
        tokenizer = self._parts.tokenizer
        size = self._config.block_size
        most = self._parts.runner.info.max_context
        least = max(self._config.min_chunk_tokens, repair.num_boundary_tokens + 3 * size)
        material = make_material(
            lambda text: tokenizer.encode(text, False),
            *self._frame(),
            most_tokens=most,
            least_tokens=least,
        )
        if material is None:
            raise RequestError(
                "mode='chunk_kv_reuse' cannot be tested: three documents of "
                f"{least} tokens (min_chunk_tokens={self._config.min_chunk_tokens}, "
                f"recompute_overlap={repair.overlap}) do not fit into a prompt of {most} (the "
                "model's context); lower these options, or set reuse_gate='off'"
            )
        return material

    def _frame(self) -> tuple[Sequence[int], Sequence[int] | None]:
        """Return the tokens before and after a prompt's text, by the chat template if any."""
        tokenizer = self._parts.tokenizer
        if tokenizer.chat_template is not None:
            # The chat template is code from the model's files, so it can raise anything.
            with contextlib.suppress(Exception):
                before, after = tokenizer.apply_chat_template(
                    [{"role": "user", "content": _MARK}]
                ).split(_MARK)
                return tokenizer.encode(before, False), tokenizer.encode(after, False)
        return self._documents.header, None

    def _measure(self, repair: Repair, material: QualityPrompts) -> Verdict:
        with self.privately() as whose:
            self._compute(material, whose)
            answers = [
                result.output_token_ids
                for result in self.generate(material.prompts(), whose.full, _GREEDY)
            ]
            order = Comparison()
            reuse = Comparison()
            shared = 0
            total = 0
            for prompt, other, answer in zip(
                material.prompts(), material.prompts(reordered=True), answers, strict=True
            ):
                _, full = self.logits(prompt, answer, whose.full)
                order += compare(full, self.logits(other, answer, whose.full)[1])
                result, rows = self._reused(prompt, answer, whose, repair, material)
                reuse += compare(full, rows)
                shared = shared + result.reused_span_tokens
                total = total + len(prompt)
        return Verdict(
            reuse.mean_kl, order.mean_kl, reuse.agreement, reuse.num_tokens, shared / total
        )

    def _reused(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        whose: Privately,
        repair: Repair,
        material: QualityPrompts,
    ) -> tuple[GenerationResult, Floats]:
        """Return the result and the logits of an answer computed after reused documents."""
        result, rows = self.logits(prompt, answer, whose.reuse, repair)
        found = result.reused_span_tokens + result.recomputed_tokens
        wanted = sum(map(len, material.documents))
        if not result.reused_span_tokens or found < _LEAST_FOUND * wanted:
            raise RequestError(
                f"the quality test of mode='chunk_kv_reuse' found only {found} of {wanted} "
                "document tokens in its cache, so it is inconclusive; change recompute_overlap or "
                "min_chunk_tokens, or set reuse_gate='off'"
            )
        return result, rows

    def prepare(self, repair: Repair, whose: Privately) -> QualityPrompts:
        """Compute each of the test's documents separately and return the test's prompts."""
        material = self._material(repair)
        self._compute(material, whose)
        return material

    def _compute(self, material: QualityPrompts, whose: Privately) -> None:
        lead = self._lead()
        self._documents.compute(
            [LoneText(lead, document) for document in material.documents], whose.reuse
        )

    @contextlib.contextmanager
    def privately(self) -> Iterator[Privately]:
        """Yield terms of two private caches, whose blocks are dropped at the end."""
        # Keep the blocks out of the offload tiers.
        tenant = f"reuse gate {secrets.token_hex(16)}"
        whose = Privately(
            *(
                Terms(tenant=tenant, cache_salt=salt, expect_reuse=True)
                for salt in ("full", "reuse")
            )
        )
        roots = [self._builder.root(terms) for terms in whose]
        content = self._parts.manager.content
        with self._core.reading():
            content.keep_inside(*roots)
        try:
            yield whose
        finally:
            self._core.answers.forget(*roots)
            with contextlib.suppress(KVBoostError):  # the engine may have been closed
                self._documents.forget(*roots)

    def forget(self, whose: Terms) -> None:
        """Drop the unused blocks that belong to these terms."""
        self._documents.forget(self._builder.root(whose))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        whose: Terms,
        params: SamplingParams,
        repair: Repair | None = None,
    ) -> list[GenerationResult]:
        """Generate answers to all prompts in one batch.

        Args:
            prompts: Token ids of the prompts.
            whose: Terms of the requests.
            params: Sampling parameters.
            repair: If given, reuse KV from other positions with these recompute settings.
        """
        entry = RequestArrival(time.perf_counter(), prompt_text="")
        requests = [self._builder.make(prompt, whose, params, entry=entry) for prompt in prompts]
        return self._calls.run([_reusing(request, repair) for request in requests])

    def logits(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        whose: Terms,
        repair: Repair | None = None,
    ) -> tuple[GenerationResult, Floats]:
        """Return the result and the logits that predict each token of an answer.

        The logits are float32 [len(answer), vocab_size].

        Args:
            prompt: Token ids of the prompt.
            answer: Token ids of the answer.
            whose: Terms of the request.
            repair: If given, reuse KV from other positions with these recompute settings.
        """
        entry = RequestArrival(time.perf_counter(), prompt_text="")
        ids = [*prompt, *answer[:-1]]
        request = self._builder.make(
            ids, whose, SamplingParams(seed=0), entry=entry, logits_start=len(prompt) - 1
        )
        return self._calls.logits(_reusing(request, repair))


def _reusing(request: Request, repair: Repair | None) -> Request:
    if repair is None:
        return request
    terms = dataclasses.replace(request.terms, mode=GenerationMode.CHUNK_KV_REUSE)
    return dataclasses.replace(request, terms=terms, repair=repair)


def _word(verdict: Verdict) -> str:
    return "passed" if verdict.passed else "refused"


def _refuse(verdict: Verdict) -> None:
    if not verdict.passed:
        raise RequestError(
            "mode='chunk_kv_reuse' is refused for this model: reuse changes its answers more than "
            f"reordering the documents does ({verdict}); recompute more "
            "(recompute_strategy, recompute_overlap, recompute_ratio), or set reuse_gate='off'"
        )
