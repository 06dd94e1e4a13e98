"""The compiler for structured output from JSON schemas, regular expressions, grammars and choices.

llguidance parses the grammars (extra [structured]). Limits bound the time and memory of
compilation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvboost_edge.engine.grammar.gbnf import is_gbnf
from kvboost_edge.engine.grammar.gbnf_lexemes import lark_of_gbnf
from kvboost_edge.engine.grammar.masks import GrammarConstraint, first_line, prepare_masks
from kvboost_edge.engine.request.request import RequestFeature, RequestInputs
from kvboost_edge.engine.request.requested_grammar import (
    KINDS,
    Grammar,
    MadeGrammar,
    read_grammar,
    schemas_in,
)
from kvboost_edge.errors import BackendUnavailable, RequestError, install_extra
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.lark import JSON_OPTIONS
from kvboost_edge.text.turns.schema_queries import in_order
from kvboost_edge.text.turns.schema_rewrite import with_short_integers

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

__all__ = ["GrammarCompiler", "GrammarFields", "check_grammar", "fits_schema"]

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,  # limits compilation to 20 ms
    "step_lexer_fuel": 200_000,  # limits a step to 14 ms
    # The default of 50,000 lets a step of an ambiguous grammar take 3 s. 5,000 items take at most
    # 10 ms.
    "step_max_items": 5_000,
    "max_lexer_states": 20_000,  # 10 to 40 MB per sequence
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # verbose errors would reveal generated text
}
# Grammar size in bytes for each unit of lexer fuel. The longest step of a 700 KB grammar for 512
# tools takes 16 ms.
_FUELLED_BYTES = 1 << 17
# Limits for GBNF grammars. With a vocabulary of 150,000 tokens, a JSON grammar takes 10,000 items.
_GBNF_LIMITS = {"step_max_items": 20_000}
# Limits for those whose lexemes are single characters. They take 15 ms per 300,000 items, and a
# second if they are ambiguous, so all their masks are computed in another thread.
_SLOW_LIMITS = {"step_max_items": 1_000_000, "max_items_in_row": 500}
# Limits for schemas that have an object with more optional properties than this. White space may
# follow each of them, in many tokens of a vocabulary of 150,000: 18 properties take more than 5,000
# items, and 200 take 200,000 in 3 ms. An ambiguous schema could take a second, so all masks are
# computed in another thread.
_MANY_OPTIONAL = 6
_OPTIONAL_LIMITS = {"step_max_items": 500_000}
_STACK_BYTES = 128 << 20  # reserved address space; untouched pages use no memory
# Niceness of the threads that compute slow masks. At 0, a mask takes a third of two cores from a
# forward pass with two threads. A high value would let other programs starve a thread that holds
# the GIL.
_MASK_NICE = 5
_IN_GRAMMAR = "failed to compile JSON schema: "  # llguidance's prefix for a schema inside a grammar
_REGEX_REASON = re.compile(r"^error: (.{1,200})", re.MULTILINE)  # below a copy of the regex
_LARGE_BOUND = "Failed to generate regex for "  # llguidance's message about bounds of a number
# llguidance's messages about schemas that violate the JSON Schema standard.
_MALFORMED = re.compile(r"Invalid type: |Expected |Pointer |\S+ must be ")
_NOT_INSTALLED = f"needs the package llguidance: {install_extra('structured')}"


class GrammarCompiler:
    """A thread-safe compiler for an engine's grammars.

    The vocabulary is read once, either by `read_ahead` or on first use.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None
        self._problem = ""  # with the vocabulary, cached because reading it again takes a second
        self._room: Floats = np.empty(0, np.float32)
        self._reader: threading.Thread | None = None
        # The threads start with the first slow mask. Two threads keep one slow grammar from
        # blocking another.
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
        return _on_deep_stack(lambda: self._compile(_limited(grammar), tokenizer))

    def read_ahead(self) -> None:
        """Start reading the vocabulary and compiling the mask kernel in the background.

        Without llguidance, this does nothing.
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

        text, limits, is_slow = _prepared(grammar)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        try:
            return GrammarConstraint(
                matcher, self._room, self._mask_threads.submit, is_slow=is_slow
            )
        except RequestError as error:
            raise RequestError(f"{grammar.kind} is not supported: {error}") from None

    def _prepare(self) -> None:
        # Errors are ignored here. Requests that need a grammar will raise them.
        with contextlib.suppress(RequestError, BackendUnavailable):
            prepare_masks()
            self._vocabulary()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._problem:
                raise RequestError(self._problem)
            if self._known is None:
                try:
                    self._known = self._read()
                except RequestError as error:
                    self._problem = str(error)
                    raise
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
                "structured output needs an end-of-sequence token, but the tokenizer has none of "
                "those that the model's config names; use another model"
            )
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(codec.to_json(), n_vocab=self._vocab_size, eos_token=known)
        except ValueError as error:
            raise RequestError(
                "structured output needs the bytes of all tokens, which llguidance cannot read "
                f"from this model's tokenizer.json ({first_line(str(error))}); use a model with "
                "another tokenizer"
            ) from None


class GrammarFields(RequestFeature):
    """The request field for structured output."""

    def prepare(self, inputs: RequestInputs) -> dict[str, Any]:
        """Return the request's grammar, if any.

        Raises:
            RequestError: the grammar is invalid, or the request generates no text.
        """
        grammar = read_grammar({kind: getattr(inputs.params, kind) for kind in KINDS})
        if grammar is not None and not inputs.generates:
            raise RequestError(
                f"{grammar.kind} needs generated text, but this request generates none; remove it"
            )
        return {"grammar": grammar}


def check_grammar(grammar: Grammar) -> None:
    """Validate a grammar without a model.

    Raises:
        RequestError: The grammar is invalid, unsupported or too large.
        BackendUnavailable: The package llguidance is not installed.
    """
    _check_installed(grammar)
    _on_deep_stack(lambda: _check_text(_limited(grammar)))


def fits_schema(schema: Mapping[str, Any], value: Any) -> bool:
    """Return whether a JSON value matches the schema, whatever the order of its members.

    Integers may have any length, in contrast to those of constrained answers.

    Raises:
        RequestError: The schema is invalid, unsupported or too large.
        BackendUnavailable: The package llguidance is not installed.
    """
    grammar = read_grammar({"json_schema": schema})
    assert grammar is not None
    _check_installed(grammar)
    made = json.loads(grammar.text)
    try:
        text = _json_text(in_order(value, made, made)).encode()
    except UnicodeEncodeError:  # a lone surrogate cannot be encoded
        return False
    return _on_deep_stack(lambda: _takes(grammar, text))


def _limited(grammar: Grammar) -> Grammar:
    """Return a grammar that limits the integers in its schema."""
    if grammar.kind != "json_schema":
        return grammar
    return grammar._replace(text=json.dumps(with_short_integers(json.loads(grammar.text))))


def _json_text(value: Any) -> str:
    """Write a JSON value as the compiler writes constants.

    Numbers have no exponent, and no fraction if it is zero.
    """
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(int(value) if value.is_integer() else repr(value)), "f")
    if isinstance(value, list):
        return f"[{', '.join(map(_json_text, value))}]"
    if isinstance(value, dict):
        members = (
            f"{json.dumps(name, ensure_ascii=False)}: {_json_text(one)}"
            for name, one in value.items()
        )
        return f"{{{', '.join(members)}}}"
    return json.dumps(value, ensure_ascii=False)


def _takes(grammar: Grammar, text: bytes) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    made, limits, _ = _prepared(grammar)
    matcher = LLMatcher(LLTokenizer("byte"), made, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher.try_consume_tokens([*text]) == len(text) and matcher.is_accepting()


def _check_text(grammar: Grammar) -> None:
    from llguidance import LLMatcher

    text, limits, _ = _prepared(grammar)
    # A Lark grammar may name tokens of the vocabulary.
    if grammar.kind != "grammar" or _is_gbnf(grammar):
        refusal = LLMatcher.validate_grammar(text, None, limits=limits)
        if refusal:
            raise _refusal(grammar, refusal)


def _refusal(grammar: Grammar, problem: str) -> RequestError:
    """Return the RequestError for an llguidance error message about a grammar."""
    line = first_line(problem)
    of_schema = line if grammar.kind == "json_schema" else line.partition(_IN_GRAMMAR)[2]
    if _MALFORMED.match(of_schema):
        return RequestError(f"{grammar.kind}: the schema is invalid: {of_schema}")
    if reasons := _REGEX_REASON.findall(problem):
        line += f" {reasons[-1]}"
    if _LARGE_BOUND in line:
        line += "; use bounds of less than 1e18 in magnitude"
    return RequestError(f"{grammar.kind} is not supported: {line}")


def _prepared(grammar: Grammar) -> tuple[str, LLParserLimits, bool]:
    """Prepare a grammar for llguidance.

    Returns:
        The grammar in llguidance's format, the limits of the compiler and the parser, and whether
        masks may be too slow for the engine thread.

    Raises:
        RequestError: The grammar is invalid.
    """
    from llguidance import LLParserLimits

    if _is_gbnf(grammar):
        lark = lark_of_gbnf(grammar.text)
        grammar = grammar._replace(text=lark.text)
        is_slow = lark.is_slow
        items = _SLOW_LIMITS if is_slow else _GBNF_LIMITS
    else:
        is_slow = _has_many_optional(grammar)
        items = _OPTIONAL_LIMITS if is_slow else {}
    # Large grammars for many tools need more fuel for their first steps.
    more = 1 + len(grammar.text) // _FUELLED_BYTES if isinstance(grammar.text, MadeGrammar) else 1
    fuel = {name: more * _LIMITS[name] for name in ("initial_lexer_fuel", "step_lexer_fuel")}
    return _compiler_text(grammar), LLParserLimits(**{**_LIMITS, **fuel, **items}), is_slow


def _is_gbnf(grammar: Grammar) -> bool:
    is_made = isinstance(grammar.text, MadeGrammar)
    return grammar.kind == "grammar" and not is_made and is_gbnf(grammar.text)


def _compiler_text(grammar: Grammar) -> str:
    """Convert a schema, a regex, choices or a Lark grammar to llguidance's format.

    Raises:
        RequestError: The grammar is invalid.
    """
    from llguidance import LLMatcher

    try:
        if grammar.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides=cast("JsonCompileOptions", JSON_OPTIONS)
            )
        if grammar.kind == "choice":
            return LLMatcher.grammar_from_lark(_choice_rules(grammar.text))
        if grammar.kind == "grammar":
            return LLMatcher.grammar_from_lark(grammar.text)
        return LLMatcher.grammar_from_regex(grammar.text)
    except ValueError as error:
        raise RequestError(f"{grammar.kind} is not valid: {first_line(str(error))}") from None


def _has_many_optional(grammar: Grammar) -> bool:
    """Return whether a schema in the grammar has an object with many optional properties."""
    left: list[Any] = []
    if grammar.kind == "json_schema":
        left = [json.loads(grammar.text)]
    elif grammar.kind == "grammar":
        left = list(schemas_in(grammar.text))
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
            properties, required = value.get("properties"), value.get("required")
            if isinstance(properties, dict):
                num_required = len(required) if isinstance(required, list) else 0
                if len(properties) - num_required > _MANY_OPTIONAL:
                    return True
    return False


def _lower_priority() -> None:
    """Lower this thread's priority so that forward passes run first when cores are scarce."""
    # Only Linux has a priority per thread. Elsewhere it applies to the whole process.
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # sandboxes may forbid this; masks work anyway
        priority = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, priority + _MASK_NICE)


def _choice_rules(text: str) -> str:
    """Return a Lark grammar for choices, which are given as JSON."""
    # Use a single terminal. Alternatives of a rule would become parser items, and a row is limited
    # to few of them.
    choices = " | ".join(map(json.dumps, json.loads(text)))
    return f"start: CHOICE\nCHOICE: {choices}"


def _check_installed(grammar: Grammar) -> None:
    if not _is_installed():
        raise BackendUnavailable(f"{grammar.kind}= {_NOT_INSTALLED}")


def _is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def _on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a large stack and return its result."""
    # The compiler follows references and rules recursively. A stack overflow would kill the
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


_STACK_SIZE = threading.Lock()  # threading.stack_size applies to every thread started
