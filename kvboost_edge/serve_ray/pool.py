"""A pool of replicas with the interface of one engine, for the server."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost_edge.config import EngineConfig, resolve_prefill
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.answer_ids import AnswerStore, KeptAnswers
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.engine.request.prompts import Document, Prompt, encode_prompt, resolve_max_tokens
from kvboost_edge.engine.request.request import RequestArrival, SamplingParams, resolve_sampling
from kvboost_edge.engine.request.results import WarmResult
from kvboost_edge.engine.request.sampling_defaults import SamplingDefaults
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.engine.stats import BlockDetail
from kvboost_edge.errors import KVBoostError
from kvboost_edge.kvcache.hashing import encode_tokens, prefix_hashes, shared_root
from kvboost_edge.runners.base import RunnerInfo
from kvboost_edge.serve_ray.aggregation import summed_cache, summed_paged
from kvboost_edge.serve_ray.in_flight import CancelledBeforeStart, Flight
from kvboost_edge.serve_ray.messages import Description, ReplicaFigures, Sent
from kvboost_edge.serve_ray.replicas import Replicas
from kvboost_edge.serve_ray.routing.prompt_chain import PromptChain
from kvboost_edge.server.api_errors import NoReplica
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["ReplicaView", "ReplicatedEngine"]

# Time after which a replica without an answer is left out.
_ASKING_SECONDS = 10.0  # for actions
_SAYING_SECONDS = 5.0  # for statistics
_WHOSE = ("tenant", "cache_salt", "prefill")


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaView:
    """Statistics of one replica when it was asked. The block map is always current."""

    pool: ReplicatedEngine = dataclasses.field(repr=False)
    figures: ReplicaFigures

    def paged_stats(self) -> dict[str, Any]:
        return self.figures.paged

    def cache_stats(self) -> dict[str, float]:
        return self.figures.cache

    def num_running(self) -> int:
        return self.figures.num_running

    def num_waiting(self) -> int:
        return self.figures.num_waiting

    def waiting_tokens(self) -> int:
        return self.figures.waiting_tokens

    def block_map(self) -> list[int]:
        return self.pool.blocks_of(self.figures.replica, 0)[0]

    def block_details(self, limit: int = 4096) -> list[BlockDetail]:
        return self.pool.blocks_of(self.figures.replica, limit)[1]


class ReplicatedEngine:
    """Several replicas with the interface of `CPUPagedEngine`, for `server.app.create_app`.

    Prompts are tokenized here. A request goes to the replica with the shortest expected time to
    first token. Resets, unpins and documents for non-prefix reuse go to all replicas. Statistics
    are sums over the replicas, and `replicas` returns them one by one.

    Closing the pool ends its thread. The replicas belong to Ray and keep running.
    """

    def __init__(self, replicas: Replicas, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._config = config
        self._answers = AnswerStore()
        self._numbers = itertools.count()
        self._name = secrets.token_hex(4)
        self._flights: dict[int, Flight] = {}

    @property
    def _about(self) -> Description:
        """Description of the replicas. It changes once a newer version has replaced all of them."""
        return self._replicas.about

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def runner_info(self) -> RunnerInfo:
        return self._about.info

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        return self._about.sampling_defaults

    @property
    def speculates(self) -> bool:
        return self._about.speculates

    @property
    def reuse_refusal(self) -> str | None:
        return self._about.reuse_refusal

    @property
    def default_reuse_refusal(self) -> str | None:
        return self._about.default_reuse_refusal

    @property
    def generates(self) -> bool:
        return self._about.generates

    @property
    def embedding_size(self) -> int:
        return self._about.embedding_size

    # Requests.

    def submit(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        terms: Terms | None = None,
        entry: RequestArrival | None = None,
        **options: Any,
    ) -> RequestHandle:
        """Send a request to a replica, and return its handle at once.

        Raises RequestError for an invalid request. The handle raises errors that only a replica
        detects, such as a full pool.
        """
        entry = RequestArrival(time.perf_counter()) if entry is None else entry
        self._check_open()
        terms = Terms.taken_from(options, terms)
        params = resolve_sampling(sampling, options)
        about = self._about
        info = about.info
        params.check_vocabulary(info.vocab_size)
        root = self._root(terms.tenant, terms.cache_salt, terms.prefill)
        text, ids = encode_prompt(
            prompt, self._tokenizer, info.vocab_size, functools.partial(self._answers.find, root)
        )
        if params.max_new_tokens != 0:
            resolve_max_tokens(len(ids), params, info.max_context)
        hashes = prefix_hashes(ids, root, about.block_size)
        sent = self._sent(ids, terms, params, entry, text or None)._replace(hashes=b"".join(hashes))
        key = terms.cache_key
        has_states = bool(info.kv_spec.states)
        chain = PromptChain.of_hashes(
            hashes, len(ids), about.block_size, root, key, has_states=has_states
        )
        number = next(self._numbers)
        handle = RequestHandle(number, self._cancel, self._look, len(ids))
        flight = Flight(
            sent,
            chain,
            handle,
            self._replicas.router,
            choices=self._replicas.choices,
            call=self._replicas.generate,
            end=self._replicas.cancel,
            keep=self._keep,
        )
        self._flights[number] = flight
        try:
            self._replicas.start(self._fly(number, flight))
        except BaseException:
            del self._flights[number]
            raise
        return handle

    def embed(
        self, texts: Sequence[Document], dimensions: int | None = None, **options: Any
    ) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = self._compute(
            "embed", (list(texts), dimensions), options, size=sum(map(len, texts))
        )
        return found

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[float]:
        found: list[float] = self._compute(
            "rerank",
            (query, list(documents)),
            options,
            # The prompts begin with the query, so it is computed once.
            size=len(query) + sum(map(len, documents)),
        )
        return found

    # The cache.

    def warm(
        self,
        text: Prompt | None = None,
        position_offset: int = 0,
        *,
        documents: Sequence[Document] | None = None,
        handles: list[RequestHandle] | None = None,
        **options: Any,
    ) -> WarmResult:
        """Compute a prompt prefix in one replica, but documents and texts at an offset in all."""
        # Prompts with the prefix go to the replica that has it. Prompts with the documents may go
        # to any replica.
        if documents is None and not position_offset:
            whose = {name: options[name] for name in _WHOSE if name in options}
            handle = self.submit(text or "", sampling=SamplingParams(max_new_tokens=0), **options)
            if handles is not None:
                handles.append(handle)
            handle.result()
            _, ids = encode_prompt(text or "", self._tokenizer, self._about.info.vocab_size)
            return self.warm_result(ids, **whose)
        held: dict[str, Any] = {**options, "handles": handles, "documents": documents}
        found: WarmResult = self._compute("warm", (text, position_offset), held, everywhere=True)
        return found

    def warm_result(
        self,
        token_ids: Sequence[int],
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> WarmResult:
        """Return the result of the replica that holds the largest part of the prompt."""
        whose = {"tenant": tenant, "cache_salt": cache_salt, "prefill": prefill}
        found: list[WarmResult] = self._ask("warm_result", encode_tokens(token_ids), whose)
        return max(found, key=int)

    def unpin(
        self,
        prompt: Prompt,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
        holder: str | None = None,
    ) -> int:
        whose = {"tenant": tenant, "cache_salt": cache_salt, "prefill": prefill}
        find = functools.partial(self._answers.find, self._root(tenant, cache_salt, prefill))
        _, ids = encode_prompt(prompt, self._tokenizer, self._about.info.vocab_size, find)
        return sum(self._ask("unpin", encode_tokens(ids), whose, holder))

    def kept_answers(
        self,
        *,
        tenant: str | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> KeptAnswers:
        owner = shared_root(self._about.root, tenant, None)
        return KeptAnswers(self._answers, owner, self._root(tenant, cache_salt, prefill))

    def reset_cache(self) -> int:
        return sum(self._ask("reset_cache"))

    # Statistics.

    def replicas(self, *, patient: bool = False) -> dict[str, ReplicaView]:
        """Return statistics of the replicas by name, sorted.

        Replicas that do not answer are left out. Replicas that were silent before are asked only if
        `patient`.
        """
        asked = self._replicas.usable if patient else self._replicas.talking
        found: list[ReplicaFigures] = self._replicas.ask(
            "figures", seconds=_SAYING_SECONDS, among=asked
        )
        if not found:
            raise NoReplica
        return {one.replica: ReplicaView(self, one) for one in found}

    def cache_stats(self) -> dict[str, float]:
        return summed_cache([view.figures for view in self.replicas().values()])

    def paged_stats(self) -> dict[str, Any]:
        return summed_paged([view.figures for view in self.replicas().values()])

    def block_map(self) -> list[int]:
        """Return the block maps of all replicas, concatenated in the order of their names."""
        return [state for states, _ in self._blocks(0, self._replicas.talking) for state in states]

    def block_details(self, limit: int = 4096) -> list[BlockDetail]:
        details = [one for _, found in self._blocks(limit, self._replicas.talking) for one in found]
        return details[: max(0, limit)]

    def blocks_of(self, replica: str, limit: int) -> tuple[list[int], list[BlockDetail]]:
        """Return `block_map` and `block_details` of one replica; both are empty if it is gone."""
        return next(iter(self._blocks(limit, (replica,))), ([], []))

    def _blocks(
        self, limit: int, among: Iterable[str]
    ) -> list[tuple[list[int], list[BlockDetail]]]:
        found = self._replicas.ask("block_states", limit, seconds=_SAYING_SECONDS, among=among)
        return [(states, [BlockDetail(*one) for one in details]) for states, details in found]

    def num_running(self) -> int:
        return sum(view.num_running() for view in self.replicas().values())

    def num_waiting(self) -> int:
        return sum(view.num_waiting() for view in self.replicas().values())

    def waiting_tokens(self) -> int:
        return sum(view.waiting_tokens() for view in self.replicas().values())

    def is_alive(self) -> bool:
        """Return whether at least one replica accepts requests, as far as known."""
        return self._replicas.is_open and bool(self._replicas.usable)

    def read_ahead(self) -> None:
        """Do nothing, because every replica reads ahead when it starts."""

    def close(self) -> None:
        """Cancel requests in flight, and end the pool's thread. A second call has no effect."""
        self._replicas.close()

    def __enter__(self) -> ReplicatedEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _root(self, tenant: str | None, cache_salt: str | None, prefill: str | None) -> bytes:
        """Return the root of the replicas' prefix hashes. May raise RequestError."""
        about = self._about
        return shared_root(about.root, tenant, cache_salt, resolve_prefill(about.prefill, prefill))

    def _check_open(self) -> None:
        if not self._replicas.is_open:
            raise KVBoostError("the pool of replicas is closed; start the server again")

    def _sent(
        self,
        ids: Sequence[int],
        terms: Terms,
        params: SamplingParams,
        entry: RequestArrival,
        text: str | None,
    ) -> Sent:
        left = None if terms.deadline is None else terms.deadline - time.monotonic()
        return Sent(
            request=f"{self._name}-{secrets.token_hex(8)}",
            targets=(),
            tokens=encode_tokens(ids),
            sampling=params,
            terms=dataclasses.replace(terms, deadline=None),
            prompt_text=text if entry.prompt_text is None else entry.prompt_text,
            since=time.perf_counter() - entry.at,
            left=left,
            missing_tokens=len(ids),
        )

    async def _fly(self, number: int, flight: Flight) -> None:
        try:
            await flight.run()
        finally:
            self._flights.pop(number, None)

    def _cancel(self, number: int) -> None:
        flight = self._flights.get(number)
        if flight is not None:
            self._replicas.call_soon(flight.cancel)

    def _look(self, number: int) -> Progress | None:
        flight = self._flights.get(number)
        return None if flight is None else flight.progress

    def _keep(self, sent: Sent, text: str, ids: list[int]) -> None:
        terms = sent.terms
        answers = self.kept_answers(
            tenant=terms.tenant, cache_salt=terms.cache_salt, prefill=terms.prefill
        )
        answers.keep(text, ids)

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica, and return the answers.

        Raises NoReplica if no replica answers.
        """
        found = self._replicas.ask(method, *arguments, seconds=_ASKING_SECONDS)
        if not found:
            raise NoReplica
        return found

    def _compute(
        self,
        call: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        *,
        size: int = 1,
        everywhere: bool = False,
    ) -> Any:
        """Call a method of the engine in one replica, or in all.

        `handles` receives a handle that cancels the call. After the call, the handles of its
        requests replace it.

        Args:
            call: Name of the method.
            arguments: Positional arguments.
            options: Keyword arguments.
            size: Length of all texts, from which the router estimates the duration of the call.
            everywhere: Whether to call the method in all replicas.
        """
        self._check_open()
        given = options.pop("handles", None)
        handles: list[RequestHandle] = [] if given is None else given
        deadline = options.pop("deadline", None)
        terms = Terms(deadline=deadline)
        sent = self._sent(
            (), terms, SamplingParams(), RequestArrival(time.perf_counter(), ""), ""
        )._replace(missing_tokens=size)
        future = self._replicas.start(
            self._replicas.compute(sent, call, arguments, options, everywhere)
        )

        def stop() -> None:
            future.cancel()

        whole = RequestHandle(next(self._numbers), lambda _: stop())
        handles.append(whole)
        try:
            computed = future.result()
        except CancelledError as error:
            raise CancelledBeforeStart(f"{call} was cancelled") from error
        finally:
            handles.remove(whole)
        for result in computed.results:
            handle = RequestHandle(next(self._numbers), lambda _: None)
            handle._finish(result, None)
            handles.append(handle)
        if computed.failure is not None:
            raise computed.failure.as_error()
        return computed.value
