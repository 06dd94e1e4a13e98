"""Bounds of every number, length and count in a request.

The schemas and their tests share this table. Limits that depend on the loaded model, such as its
context and vocabulary, are checked elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import Field

from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import option_of
from kvboost_edge.server.settings import MAX_KEEP_ALIVE

__all__ = ["BOUNDS", "COUNTS", "Bound", "bounded", "counted"]


class Bound(NamedTuple):
    """A range of allowed numbers.

    Attributes:
        low: lower end.
        high: upper end, included.
        integer: whether only integers are allowed.
        open_low: whether `low` itself is excluded.
    """

    low: float
    high: float
    integer: bool = True
    open_low: bool = False

    def describe(self) -> str:
        """Return the range as text, such as "(0, 1]" or "0..20"."""
        if self.integer:
            return f"{self.low:g}..{int(self.high)}"
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


def _declared(options: type, name: str) -> Bound:
    """Return the range from the declaration of an engine option."""
    declared = option_of(options, name)
    assert declared.low is not None
    assert declared.high is not None
    return Bound(declared.low, declared.high, declared.kind is int, declared.open_low)


BOUNDS: dict[str, Bound] = {
    "temperature": Bound(0, 2, integer=False),
    "top_p": _declared(SamplingParams, "top_p"),
    "top_k": Bound(-1, 1_000_000),  # -1 and 0 disable it
    "min_p": _declared(SamplingParams, "min_p"),
    "typical_p": _declared(SamplingParams, "typical_p"),
    "top_n_sigma": _declared(SamplingParams, "top_n_sigma"),
    "dynatemp_range": Bound(0, 2, integer=False),
    "dynatemp_exponent": _declared(SamplingParams, "dynatemp_exponent"),
    "xtc_probability": _declared(SamplingParams, "xtc_probability"),
    "xtc_threshold": _declared(SamplingParams, "xtc_threshold"),
    "mirostat": _declared(SamplingParams, "mirostat"),
    "mirostat_tau": _declared(SamplingParams, "mirostat_tau"),
    "mirostat_eta": _declared(SamplingParams, "mirostat_eta"),
    "min_keep": _declared(SamplingParams, "min_keep"),
    "repeat_last_n": _declared(SamplingParams, "repeat_last_n"),
    "dry_multiplier": _declared(SamplingParams, "dry_multiplier"),
    "dry_base": _declared(SamplingParams, "dry_base"),
    "dry_allowed_length": _declared(SamplingParams, "dry_allowed_length"),
    "dry_penalty_last_n": _declared(SamplingParams, "dry_penalty_last_n"),
    "min_tokens": _declared(SamplingParams, "min_tokens"),
    "n_indent": _declared(SamplingParams, "min_indent"),
    "time_limit_ms": Bound(-1, 2**31),  # llama.cpp; -1 and 0 set no limit
    "repetition_penalty": Bound(0.01, 100, integer=False),
    "presence_penalty": _declared(SamplingParams, "presence_penalty"),
    "frequency_penalty": _declared(SamplingParams, "frequency_penalty"),
    "logit_bias": Bound(-100, 100, integer=False),
    "seed": Bound(-(2**63), 2**63 - 1),  # -1 chooses a random seed
    "n": Bound(1, 128),
    "best_of": Bound(1, 128),
    "max_tokens": Bound(0, 2**24),
    "max_completion_tokens": Bound(1, 2**24),
    "num_predict": Bound(-2, 2**24),  # Ollama; 0, -1 and -2: fill the context
    "num_ctx": Bound(1, 2**24),
    "keep_alive": Bound(-(2**63), MAX_KEEP_ALIVE, integer=False),  # seconds; negative: no limit
    "call_index": Bound(0, 2**16),  # index of a tool call, sent by Ollama's clients
    "listed": Bound(1, 100),  # page size of a list
    "listed_files": Bound(1, 10_000),  # the same for files
    "expires_seconds": Bound(3600, 3650 * 86_400),  # lifetime of a file
    "logprobs": Bound(0, 20),
    "top_logprobs": Bound(0, 20),
    "priority": Bound(-1_000_000, 1_000_000),
    "recompute_overlap": _declared(Terms, "recompute_overlap"),
    "recompute_ratio": _declared(Terms, "recompute_ratio"),
    "max_draft_tokens": _declared(Terms, "max_draft_tokens"),
    "draft_n_max": Bound(0, 2**16),  # llama.cpp; the engine's own maximum is lower
    "draft_n_min": Bound(0, 2**16),  # llama.cpp; the engine's own maximum is lower
    "draft_p_min": _declared(Terms, "draft_p_min"),
    "position_offset": Bound(0, 2**24),
    "dimensions": Bound(1, 2**16),
    "ollama_dimensions": Bound(0, 2**16),  # 0 returns all
    "top_n": Bound(1, 2**16),
    "anthropic_temperature": Bound(0, 1, integer=False),
    "budget_tokens": Bound(1, 2**24),
    "reasoning_budget": _declared(SamplingParams, "reasoning_budget"),
    "ttl": _declared(Terms, "ttl"),
    "slot": Bound(-1, 4095),  # llama.cpp; -1 lets the server choose
    "token_id": Bound(0, 2**31 - 1),
    "template_number": Bound(-(2**53), 2**53, integer=False),
}
"""Range of each numeric field.

Three entries bound the members of fields: "logit_bias" the values of logit_bias, "token_id" the ids
in prompts, stop_token_ids and tokens, and "template_number" the numbers in chat_template_kwargs.
"""

COUNTS: dict[str, Bound] = {
    "prompts": Bound(1, 256),
    "prompt_tokens": Bound(1, 2**18),
    "sequences": Bound(1, 256),  # prompts x best_of, computed in one batch
    # Answer tokens x (log probabilities per token + 1). An entry takes about 40 bytes.
    "logprob_entries": Bound(0, 2**19),
    "messages": Bound(1, 10_000),
    "continued": Bound(0, 20_000),  # items of all stored responses that a request continues
    "documents": Bound(1, 256),
    "inputs": Bound(1, 2048),  # OpenAI's limit
    "reranked": Bound(1, 1024),
    "text": Bound(0, 2**20),  # characters of one text; tokenizing 2^20 takes about a second
    "tokens": Bound(0, 2**18),  # token ids in /detokenize
    "pieces": Bound(0, 2**16),  # tokens listed one by one by /tokenize
    "json_values": Bound(0, 5 * 2**16),  # per body; parsing blocks all threads for about 30 ms
    "json_containers": Bound(0, 2**18),  # lists and objects, slower to parse
    "json_strings": Bound(0, 2**16),  # strings and field names, slowest to parse
    "parts": Bound(1, 10_000),
    "role": Bound(1, 64),
    "tools": Bound(0, 512),
    "tool_name": Bound(1, 128),
    "tools_text": Bound(0, 2**20),  # characters of all tools together
    "tool_calls": Bound(0, 512),  # in one message
    "tool_call_id": Bound(0, 256),
    "name": Bound(1, 256),
    "stop": Bound(0, 64),
    "stop_length": Bound(1, 1024),
    "stop_token_ids": Bound(0, 1024),
    "logit_bias": Bound(0, 1024),
    "reasoning_budget_message": Bound(0, 1024),
    "bad_words": Bound(0, 256),
    "bad_word": Bound(1, 256),  # characters
    "dry_sequence_breakers": Bound(0, 32),
    "breaker": Bound(1, 40),  # characters
    "samplers": Bound(0, 32),
    "input_extra": Bound(0, 1024),
    "filename": Bound(0, 4096),
    "response_fields": Bound(0, 64),
    "response_field": Bound(0, 256),  # characters
    "cache_salt": Bound(1, 256),
    "session_name": Bound(1, 128),
    "template_variables": Bound(0, 64),
    "template_name": Bound(1, 64),
    "template_text": Bound(0, 4096),
    "model": Bound(1, 1024),
    "cache_marks": Bound(0, 4),  # cache_control entries in one Anthropic body
    "label": Bound(0, 1024),  # `user` and other ignored texts
    "metadata": Bound(0, 16),
    "metadata_name": Bound(1, 64),
    "metadata_value": Bound(0, 512),
}
"""Ranges of lengths: entries of a list, characters of a string."""


def bounded(name: str) -> Any:
    """Return the pydantic constraints of the number `name`."""
    bound = BOUNDS[name]
    cast = int if bound.integer else float
    low = cast(bound.low)
    high = cast(bound.high)
    if bound.open_low:
        return Field(gt=low, le=high, allow_inf_nan=False)
    return Field(ge=low, le=high) if bound.integer else Field(ge=low, le=high, allow_inf_nan=False)


def counted(name: str) -> Any:
    """Return the pydantic constraints of the length or count `name`."""
    bound = COUNTS[name]
    return Field(min_length=int(bound.low), max_length=int(bound.high))
