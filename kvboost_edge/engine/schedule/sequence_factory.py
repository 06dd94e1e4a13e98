"""From requests to running sequences, with all that goes along."""

from __future__ import annotations

from kvboost_edge.engine.grammar.constraint import Structures
from kvboost_edge.engine.handle import RequestHandle
from kvboost_edge.engine.request.request import Request
from kvboost_edge.engine.schedule.feature import Constraint, SharedSpans
from kvboost_edge.engine.schedule.sequence import Sequence
from kvboost_edge.engine.schedule.spans import SequenceSpans
from kvboost_edge.engine.spec_decode.speculation import Speculation
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["Sequences"]


class Sequences:
    """Makes the sequences of an engine. Safe to use from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        speculation: Speculation,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._speculation = speculation
        self._structures = Structures(tokenizer, vocab_size, eos_token_ids)

    def make(self, request: Request, handle: RequestHandle) -> Sequence:
        """RequestError, or BackendUnavailable, where what its answer has to fit cannot be had."""
        grammar = request.grammar
        return Sequence(
            request,
            handle,
            self._tokenizer,
            drafting=self._speculation.drafting(request),
            grammar=Constraint() if grammar is None else self._structures.make(grammar),
            spans=SharedSpans() if request.repair is None else SequenceSpans(request),
        )

    def read_ahead(self) -> None:
        """Begin what the first answer that has to fit something would wait for."""
        self._structures.read_ahead()

    def close(self) -> None:
        """Wait for what was begun in the background."""
        self._structures.close()
