"""Fields of other servers' APIs that this server does not have.

Each is accepted under the name of an equivalent field, ignored, or rejected with advice. A field
that is null counts as missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

from kvboost_edge.options import nearest

__all__ = [
    "GENERATING",
    "NO_IMAGES",
    "SAME_AS",
    "UnsupportedField",
    "known_fields",
    "refused_field",
]

_SHOWN = 5  # unknown names in one error message
_SHOWN_LENGTH = 64


class UnsupportedField(NamedTuple):
    """A field of another server.

    Attributes:
        instead: advice for the error message.
        harmless: accepted values, which have no effect.
        ignored: whether all values are accepted and ignored.
    """

    instead: str
    harmless: tuple[Any, ...] = ()
    ignored: bool = False


SAME_AS = {
    "n_predict": "max_tokens",  # llama.cpp
    "num_predict": "max_tokens",  # Ollama
    "max_new_tokens": "max_tokens",  # transformers
    "repeat_penalty": "repetition_penalty",  # llama.cpp, Ollama
    "return_tokens": "return_token_ids",  # llama.cpp
    "reasoning_budget_tokens": "reasoning_budget",  # llama.cpp
    "thinking_budget_tokens": "reasoning_budget",  # llama.cpp
    "thinking_token_budget": "reasoning_budget",  # vLLM
}
"""Other servers' field names, with the equivalent field of this server."""

NO_IMAGES = "images are not supported; this server takes text only"
"""Error message for an image in a request."""

_IGNORED = UnsupportedField("", ignored=True)
_TEMPLATE = "the model's own chat template is used; its variables go in chat_template_kwargs"

GENERATING: dict[str, UnsupportedField] = {
    # llama.cpp
    "tfs_z": UnsupportedField("this sampler is not supported; use min_p or top_n_sigma", (1,)),
    "penalize_nl": UnsupportedField("use logit_bias", (True,)),
    "n_probs": UnsupportedField("use logprobs (in chat logprobs and top_logprobs)", (0,)),
    "post_sampling_probs": UnsupportedField("log probabilities are the model's own", (False,)),
    "n_keep": UnsupportedField("the context is never shifted", (0, -1)),
    "n_discard": UnsupportedField("the context is never shifted", (0,)),
    "n_indent": UnsupportedField("only /infill and /completion have it", (0,)),
    "n_cache_reuse": UnsupportedField(
        "only kvboost.mode 'chunk_kv_reuse' reuses tokens at other positions", (0,)
    ),
    "t_max_prompt_ms": _IGNORED,  # llama.cpp ignores it, too
    "t_max_predict_ms": UnsupportedField("only /infill and /completion have it", (0, -1)),
    "id_slot": _IGNORED,
    "timings_per_token": _IGNORED,
    # llama.vim asks for the field "" to get a short answer.
    "response_fields": UnsupportedField("answers always have all fields", ([], [""])),
    "lora": UnsupportedField("LoRA adapters are not supported", ([],)),
    "image_data": UnsupportedField(NO_IMAGES, ([],)),
    "reasoning_format": UnsupportedField(
        "reasoning is always in reasoning_content", ("auto", "deepseek")
    ),
    # vLLM
    "use_beam_search": UnsupportedField("use n or best_of with a temperature", (False,)),
    "length_penalty": UnsupportedField("beam search is not supported", (1,)),
    "early_stopping": UnsupportedField("beam search is not supported", (False,)),
    "skip_special_tokens": UnsupportedField("use return_token_ids and /detokenize", (True,)),
    "spaces_between_special_tokens": _IGNORED,
    "truncate_prompt_tokens": UnsupportedField("shorten the prompt before sending it", (-1,)),
    "prompt_logprobs": UnsupportedField("use echo with logprobs in /v1/completions"),
    "allowed_token_ids": UnsupportedField("use logit_bias", ([],)),
    "logits_processors": UnsupportedField("use logit_bias", ([],)),
    "return_tokens_as_token_ids": UnsupportedField("use return_token_ids", (False,)),
    "chat_template": UnsupportedField(_TEMPLATE),
    "documents": UnsupportedField("put them into a message", ([],)),
    "mm_processor_kwargs": UnsupportedField(NO_IMAGES, ({},)),
    "prompt_embeds": UnsupportedField("send text or token ids"),
    "request_id": _IGNORED,
    # Ollama
    "options": UnsupportedField("put its fields at the top level of the body"),
    "num_ctx": UnsupportedField("the context is the model's, see max_model_len of /v1/models"),
    "keep_alive": _IGNORED,
    "format": UnsupportedField("use response_format", ("",)),
    "raw": UnsupportedField("use /v1/completions", (False,)),
    "system": UnsupportedField("send a message with role 'system' to /v1/chat/completions", ("",)),
    "template": UnsupportedField(_TEMPLATE, ("",)),
    "context": UnsupportedField("send the whole prompt; cached tokens are not recomputed", ([],)),
    "think": UnsupportedField("use reasoning_effort or reasoning_budget"),
    "images": UnsupportedField(NO_IMAGES, ([],)),
    # OpenAI's other API
    "input": UnsupportedField("send messages to /v1/chat/completions"),
    "max_output_tokens": UnsupportedField("use max_tokens", ()),
}
"""Other servers' fields for completions and chat. Fields that an endpoint has come first."""


def known_fields(
    value: Any, fields: Collection[str], unsupported: Mapping[str, UnsupportedField]
) -> Any:
    """Return the object with known fields only, renaming equivalent fields.

    Args:
        value: an object. Any other value is returned unchanged.
        fields: names of the known fields.
        unsupported: fields of other servers.

    Raises:
        PydanticCustomError: a field is unknown or not accepted.
    """
    if not isinstance(value, dict) or all(name in fields for name in value):
        return value
    kept = {name: item for name, item in value.items() if name in fields}
    others = [name for name in value if name not in fields]
    unknown = [
        name for name in others if name not in unsupported and SAME_AS.get(name) not in fields
    ]
    if unknown or (others and not unsupported):
        raise _unknown(unknown or others, fields)
    for name in others:
        item = value[name]
        if item is None:
            continue
        if name not in unsupported:
            ours = SAME_AS[name]
            if kept.get(ours) is not None:
                raise refused_field(
                    name, f"is another name of {ours}, which is also given; give only one of them"
                )
            kept[ours] = item
            continue
        about = unsupported[name]
        if not about.ignored and not any(
            type(item) is type(ok) and item == ok for ok in _spellings(about.harmless)
        ):
            raise refused_field(name, f"is not supported: {about.instead}")
    return kept


def _spellings(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values, and each integer also as a float, because JSON's 1 and 1.0 are equal."""
    return (*values, *(float(value) for value in values if type(value) is int))


def _unknown(names: list[str], fields: Iterable[str]) -> PydanticCustomError:
    shown = ", ".join(repr(name[:_SHOWN_LENGTH]) for name in itertools.islice(names, _SHOWN))
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    first = names[0][:_SHOWN_LENGTH]
    what = "is not a field of this request"
    if meant := nearest(first, fields) if first else "":
        what += f"; did you mean {meant!r}?"
    if len(names) > 1:
        what += f"; unknown fields: {shown}{rest}"
    return refused_field(first, what)


def refused_field(name: str, message: str) -> PydanticCustomError:
    """Return an error about field `name`, to raise while its object is validated."""
    return PydanticCustomError(
        "unsupported_field", "{message}", {"message": message, "field": name}
    )
