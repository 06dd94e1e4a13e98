"""The quality gate of non-prefix KV reuse, which runs before the first request that uses it.

The model answers questions on a built-in text three times: computed in full, with the documents in
another order, and with reuse. See reuse/quality_gate.py for what is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvboost_edge.config import EngineConfig, GenerationMode
from kvboost_edge.engine.build import EngineParts
from kvboost_edge.engine.core import EngineCore
from kvboost_edge.engine.request.request import Request, RequestArrival, SamplingParams
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.request_builder import Intake
from kvboost_edge.engine.schedule.sequence import Floats
from kvboost_edge.engine.tasks.calls import Calls
from kvboost_edge.engine.tasks.documents import Documents, LoneText
from kvboost_edge.errors import KVBoostError, RequestError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.reuse.quality_gate import (
    ANSWER_TOKENS,
    Comparison,
    Material,
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
_LEAST_FOUND = 0.9  # of the documents' tokens
_TRIES = 5
_GREEDY = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.0, seed=0)


class Privately(NamedTuple):
    """Two caches of a test's own: what the one holds the other does not find, and nobody else
    either.
    """

    full: Terms
    reuse: Terms


class QualityGate:
    """Of one engine. Safe to use from any thread but the engine's: the test's requests are computed
    there, beside all others. One thread tests, the others that need the outcome wait for it.
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        intake: Intake,
        core: EngineCore,
        documents: Documents,
    ) -> None:
        self._parts = parts
        self._config = config
        self._intake = intake
        self._core = core
        self._documents = documents
        self._calls = Calls(core)
        self._lock = threading.Lock()
        self._verdicts: dict[Repair, Verdict] = {}
        self._cache_dir = None if config.pack_cache else NO_CACHE

    def require(self, request: Request) -> None:
        """RequestError where reuse as this request has it is refused; the first time that takes a
        test. Errors that a request ends with in any case, CapacityError, come before.
        """
        if request.repair is not None and self._config.reuse_gate == "auto":
            self._core.scheduler.check_fits(request)
            self.require_repair(request.repair)

    def require_repair(self, repair: Repair) -> None:
        """The same for requests to come."""
        if self._config.reuse_gate == "auto":
            _refuse(self.verdict(repair))

    def recall(self, request: Request) -> None:
        """RequestError where reuse is known to be refused. Tests nothing."""
        if request.repair is not None and self._config.reuse_gate == "auto":
            known = self._verdicts.get(request.repair.tested)
            if known is not None:
                _refuse(known)

    def verdict(self, repair: Repair) -> Verdict:
        """The outcome, of this process, kept from an earlier one, or of a test now. RequestError
        where a test has no room.
        """
        repair = repair.tested
        known = self._verdicts.get(repair)
        if known is not None:
            return known
        self._core.check_open()
        with self._lock:
            known = self._verdicts.get(repair)
            if known is None:
                known = self._verdicts[repair] = self._find_out(repair)
        return known

    def _find_out(self, repair: Repair) -> Verdict:
        lead = self._lead()
        material = self._material(repair)
        stamp = outcome_stamp(self._parts.identity, repair, lead, material)
        verdict = read(stamp, self._cache_dir)
        if verdict is None:
            _LOG.info("testing reuse at other positions (%s) on built-in text", repair.strategy)
            began = time.perf_counter()
            verdict = self._measure(repair, material)
            _LOG.info(
                "reuse %s in %.1f s: %s", _word(verdict), time.perf_counter() - began, verdict
            )
            write(stamp, verdict, self._cache_dir)
        return verdict

    def _lead(self) -> tuple[int, ...]:
        size = self._config.block_size
        header = len(self._documents.header)
        primer = self._config.primer_tokens
        return self._documents.lead(header + primer + (-(header + primer) % size if primer else 0))

    def _material(self, repair: Repair) -> Material:
        """Prompts that fit the model, and the pool beside their documents; documents of which
        something is left behind a seam.
        """
        tokenizer = self._parts.tokenizer
        size = self._config.block_size
        pool = self._parts.manager.usable_block_count * size - len(self._lead())
        most = min(self._parts.runner.info.max_context, pool // 2 - 16 * size)
        least = max(self._config.min_chunk_tokens, repair.num_seam_tokens + 3 * size)
        material = make_material(
            lambda text: tokenizer.encode(text, False),
            *self._frame(),
            most_tokens=most,
            least_tokens=least,
        )
        if material is None:
            raise RequestError(
                "mode='chunk_kv_reuse' is refused: its test has no room for three documents of "
                f"{least} tokens (min_chunk_tokens={self._config.min_chunk_tokens}, "
                f"recompute_overlap={repair.overlap}) in a prompt of {max(0, most)} (the model's "
                "context, or half of the pool); change these, or give reuse_gate='off'"
            )
        return material

    def _frame(self) -> tuple[Sequence[int], Sequence[int] | None]:
        """What stands before and behind the text of a prompt: a chat's marks where the model has a
        template.
        """
        tokenizer = self._parts.tokenizer
        if tokenizer.chat_template is not None:
            with contextlib.suppress(Exception):  # a template is a program that came with the model
                before, behind = tokenizer.apply_chat_template(
                    [{"role": "user", "content": _MARK}]
                ).split(_MARK)
                return tokenizer.encode(before, False), tokenizer.encode(behind, False)
        return self._documents.header, None

    def _measure(self, repair: Repair, material: Material) -> Verdict:
        with self.privately() as whose:
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
        material: Material,
    ) -> tuple[GenerationResult, Floats]:
        """Logits behind the documents; what others drive out of the pool meanwhile is computed
        again.
        """
        for _ in range(_TRIES):
            self._compute(self._lead(), material, whose)
            result, rows = self.logits(prompt, answer, whose.reuse, repair)
            found = result.reused_span_tokens + result.recomputed_tokens
            wanted = sum(map(len, material.documents))
            if result.reused_span_tokens and found >= _LEAST_FOUND * wanted:
                return result, rows
        raise RequestError(
            f"mode='chunk_kv_reuse' is refused: its test found {found} of {wanted} tokens again, "
            "what is computed anew proves nothing; the pool is too busy (num_blocks, "
            "max_cache_bytes), try again"
        )

    def prepare(self, repair: Repair, whose: Privately) -> Material:
        """The test's prompts, once their documents are computed alone."""
        material = self._material(repair)
        self._compute(self._lead(), material, whose)
        return material

    def _compute(self, lead: tuple[int, ...], material: Material, whose: Privately) -> None:
        self._documents.compute(
            [LoneText(lead, document) for document in material.documents], whose.reuse
        )

    @contextlib.contextmanager
    def privately(self) -> Iterator[Privately]:
        """Caches that nobody else finds; what was put into them is forgotten at the end, and no
        tier is given it.
        """
        tenant = f"reuse gate {secrets.token_hex(16)}"
        whose = Privately(
            *(
                Terms(tenant=tenant, cache_salt=salt, expect_reuse=True)
                for salt in ("full", "reuse")
            )
        )
        roots = [self._intake.root(terms) for terms in whose]
        content = self._parts.manager.content
        with self._core.reading():
            content.keep_inside(*roots)
        try:
            yield whose
        finally:
            self._core.answers.forget(*roots)
            with contextlib.suppress(
                KVBoostError
            ):  # the engine was closed: nothing is left to be forgotten
                self._documents.forget(*roots)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        whose: Terms,
        params: SamplingParams,
        repair: Repair | None = None,
    ) -> list[GenerationResult]:
        """Answers, all computed together; `repair` as below. Nothing is tested before."""
        entry = RequestArrival(time.perf_counter(), prompt_text="")
        requests = [self._intake.make(prompt, whose, params, entry=entry) for prompt in prompts]
        return self._calls.run([_reusing(request, repair) for request in requests])

    def logits(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        whose: Terms,
        repair: Repair | None = None,
    ) -> tuple[GenerationResult, Floats]:
        """Logits, float32 [len(answer), vocab_size], that each token of an answer is sampled from;
        with `repair` behind what the prompt shares at other positions.
        """
        entry = RequestArrival(time.perf_counter(), prompt_text="")
        ids = [*prompt, *answer[:-1]]
        request = self._intake.make(
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
            f"another order of the documents does ({verdict}); repair more (recompute_strategy, "
            "recompute_overlap, recompute_ratio), or give reuse_gate='off'"
        )
