"""The compiler for structured output: JSON schemas, regular expressions, grammars and choices.

The parser is llguidance (extra [structured]). Limits bound the time and memory of compilation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.grammar.masks import GrammarConstraint, first_line, prepare_masks
from kvboost_edge.engine.request.grammar import KINDS, Grammar, MadeGrammar, read_grammar
from kvboost_edge.engine.request.request import RequestFeature, RequestInputs
from kvboost_edge.errors import BackendUnavailable, RequestError, install_extra
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.lark import JSON_OPTIONS
from kvboost_edge.text.turns.schemas import in_order

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

__all__ = ["GrammarCompiler", "GrammarFields", "check_grammar", "fits_schema"]

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,  # 20 ms of compilation
    "step_lexer_fuel": 200_000,  # 14 ms per step
    # The default of 50,000 allows an ambiguous grammar 3 s per step. 5,000 items take 10 ms and
    # hold 200 optional properties.
    "step_max_items": 5_000,
    "max_lexer_states": 20_000,  # 10 to 40 MB per sequence
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # verbose errors would contain generated text
}
# Bytes of a grammar per unit of fuel. 512 tools make 700 KB, whose longest step takes 16 ms.
_FUELLED_BYTES = 1 << 17
_STACK_BYTES = 128 << 20  # address space; untouched pages take no memory
# Niceness of the threads that compute slow masks. At 0 a mask takes a third of two cores from a
# forward pass of two threads. A high value would let other programs stop a thread that holds the
# GIL.
_MASK_NICE = 5
_IN_GRAMMAR = "failed to compile JSON schema: "  # prefix for a schema inside a grammar
# llguidance's messages about schemas that break the standard.
_MALFORMED = re.compile(r"Invalid type: |Expected |Pointer |\S+ must be ")
_NOT_INSTALLED = f"needs the package llguidance: {install_extra('structured')}"


class GrammarCompiler:
    """The compiler of an engine's grammars. Thread-safe.

    The vocabulary is read once, by `read_ahead` or when it is first needed.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None
        self._room: Floats = np.empty(0, np.float32)
        self._reader: threading.Thread | None = None
        # Threads start with the first slow mask. With two, one slow grammar does not block another.
        self._mask_threads = ThreadPoolExecutor(
            2, thread_name_prefix="kvboost-masks", initializer=_lower_priority
        )

    def make(self, grammar: Grammar) -> GrammarConstraint:
        """Return a parser in its initial state, with its first mask computed.

        Raises:
            RequestError: The grammar is invalid, unsupported or too large.
            BackendUnavailable: The package llguidance is not installed.
        """
        _check_installed(grammar)
        prepare_masks()
        tokenizer = self._vocabulary()
        return _on_deep_stack(lambda: self._compile(grammar, tokenizer))

    def read_ahead(self) -> None:
        """Start reading the vocabulary and compiling the mask kernel in the background.

        Does nothing without llguidance.
        """
        if _is_installed() and self._reader is None:
            self._reader = threading.Thread(
                target=self._prepare, name="kvboost-vocabulary", daemon=True
            )
            self._reader.start()

    def close(self) -> None:
        """Wait for background work and stop the mask threads."""
        if self._reader is not None:
            self._reader.join()
        self._mask_threads.shutdown(cancel_futures=True)

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> GrammarConstraint:
        from llguidance import LLMatcher

        matcher = LLMatcher(
            tokenizer, _compiler_text(grammar), log_level=0, limits=_limits_of(grammar)
        )
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        try:
            return GrammarConstraint(matcher, self._room, self._mask_threads.submit)
        except RequestError as error:
            raise RequestError(f"{grammar.kind} is not supported: {error}") from None

    def _prepare(self) -> None:
        # Requests that need a grammar report the error.
        with contextlib.suppress(RequestError, BackendUnavailable):
            prepare_masks()
            self._vocabulary()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._known is None:
                self._known = self._read()
                self._room = np.empty(self._vocab_size, np.float32)
            return self._known

    def _read(self) -> LLTokenizer:
        codec = self._tokenizer.codec
        if not isinstance(codec, FastCodec):
            raise RequestError(
                "structured output needs the bytes of all tokens, which this tokenizer does not "
                "provide; use a model with a tokenizer.json"
            )
        known = [token_id for token_id in self._eos if token_id < codec.vocab_size]
        if not known:
            raise RequestError(
                "structured output needs an end-of-sequence token, and the model names none that "
                "its tokenizer knows; use a model with one"
            )
        from llguidance import LLTokenizer

        return LLTokenizer(codec.to_json(), n_vocab=self._vocab_size, eos_token=known)


class GrammarFields(RequestFeature):
    """The grammar of a request."""

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the grammar; RequestError if it is invalid or nothing is generated."""
        grammar = read_grammar({kind: getattr(inputs.params, kind) for kind in KINDS})
        if grammar is not None and not inputs.generates:
            raise RequestError(
                f"{grammar.kind} needs generated text, and this request generates none"
            )
        return {"grammar": grammar}


def check_grammar(grammar: Grammar) -> None:
    """Validate a grammar, as far as that is possible without a model.

    Raises:
        RequestError: The grammar is invalid, unsupported or too large.
        BackendUnavailable: The package llguidance is not installed.
    """
    _check_installed(grammar)
    _on_deep_stack(lambda: _check_text(grammar))


def fits_schema(schema: Mapping[str, Any], value: Any) -> bool:
    """Return whether a JSON value matches the schema, with its members in any order.

    Raises RequestError and BackendUnavailable like `GrammarCompiler.make`.
    """
    grammar = read_grammar({"json_schema": schema})
    assert grammar is not None
    _check_installed(grammar)
    made = json.loads(grammar.text)
    ordered = in_order(value, made, made)
    try:
        text = json.dumps(ordered, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return _on_deep_stack(lambda: _takes(grammar, text))


def _takes(grammar: Grammar, text: bytes) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(
        LLTokenizer("byte"), _compiler_text(grammar), log_level=0, limits=_limits_of(grammar)
    )
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()


def _check_text(grammar: Grammar) -> None:
    from llguidance import LLMatcher

    text = _compiler_text(grammar)
    if grammar.kind != "grammar":  # a grammar may name tokens of the vocabulary
        refusal = LLMatcher.validate_grammar(text, None, limits=_limits_of(grammar))
        if refusal:
            raise _refusal(grammar, refusal)


def _refusal(grammar: Grammar, problem: str) -> RequestError:
    """Return the error for a grammar that the compiler refused with the message `problem`."""
    line = first_line(problem)
    of_schema = line if grammar.kind == "json_schema" else line.partition(_IN_GRAMMAR)[2]
    if _MALFORMED.match(of_schema):
        return RequestError(f"{grammar.kind}: the schema is invalid: {of_schema}")
    return RequestError(f"{grammar.kind} is not supported: {line}")


def _compiler_text(grammar: Grammar) -> str:
    """Return llguidance's form of a grammar; raises RequestError if it is invalid."""
    from llguidance import LLMatcher, grammar_from

    try:
        if grammar.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides=cast("JsonCompileOptions", JSON_OPTIONS)
            )
        if grammar.kind == "choice":
            return LLMatcher.grammar_from_lark(_choice_rules(grammar.text))
        return grammar_from(grammar.kind, grammar.text)  # type: ignore[arg-type]
    except ValueError as error:
        raise RequestError(f"{grammar.kind} is not understood: {first_line(str(error))}") from None


def _lower_priority() -> None:
    """Lower this thread's priority, so that forward passes come first if cores are scarce."""
    # Other systems have only one priority for the whole process.
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox may forbid it; masks are computed anyway
        priority = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, priority + _MASK_NICE)


def _choice_rules(text: str) -> str:
    """Return the Lark grammar of choices, given as JSON."""
    # One terminal: alternatives of a rule would become parser items, and a row holds few of them.
    choices = " | ".join(map(json.dumps, json.loads(text)))
    return f"start: CHOICE\nCHOICE: {choices}"


def _check_installed(grammar: Grammar) -> None:
    if not _is_installed():
        raise BackendUnavailable(f"{grammar.kind}= {_NOT_INSTALLED}")


def _is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a large stack and return its result."""
    # The compiler follows references and rules by recursion, and a stack overflow kills the
    # process.
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="kvboost-grammar", daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return outcome.result()


_STACK_SIZE = threading.Lock()  # stack_size applies to all threads that start


def _limits_of(grammar: Grammar) -> LLParserLimits:
    """Return the compiler's limits."""
    # Large grammars made from many tools need more fuel for their first steps.
    from llguidance import LLParserLimits

    more = 1 + len(grammar.text) // _FUELLED_BYTES if isinstance(grammar.text, MadeGrammar) else 1
    fuel = {name: more * _LIMITS[name] for name in ("initial_lexer_fuel", "step_lexer_fuel")}
    return LLParserLimits(**{**_LIMITS, **fuel})
