"""Request bodies of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import Field

from kvboost_edge.server.api.schemas.chat import (
    ContinueFinal,
    GenerationPrompt,
    Messages,
    TemplateVariables,
)
from kvboost_edge.server.api.schemas.shared import BoundedText, FewTokenIds, ModelName
from kvboost_edge.server.api.schemas.strict import Strict, bad_field
from kvboost_edge.server.api.schemas.tools import Tools

__all__ = ["DetokenizeRequest", "TokenizeRequest"]

# Fields of /tokenize, and the kinds of text to which they apply.
_BELONGS_TO = {
    "add_special": ("content",),
    "parse_special": ("content",),
    "add_special_tokens": ("prompt",),
    "add_generation_prompt": ("messages",),
    "continue_final_message": ("messages",),
    "chat_template_kwargs": ("messages",),
    "tools": ("messages",),
}


class TokenizeRequest(Strict):
    """Body of /tokenize: a text or messages.

    `content` is llama.cpp's field; special tokens are not added by default. `prompt` and `messages`
    are vLLM's fields; special tokens are added by default. Messages yield the prompt of a chat.
    """

    content: BoundedText | None = None
    add_special: bool = Field(False, description="Add special tokens to content.")
    parse_special: bool = Field(
        True, description="If false, special tokens written in content are plain text."
    )
    with_pieces: bool = Field(
        False,
        description=(
            "Return objects with the id and the text of each token, or its bytes if it has only "
            "part of a character."
        ),
    )
    prompt: BoundedText | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="Add special tokens to prompt; true by default."
    )
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    return_token_strs: bool = Field(
        False, description="Return the text of each token too, as a list."
    )
    model: ModelName | None = None

    def check_together(self) -> None:
        """Raise ApiError unless exactly one kind of text is given."""
        given = [
            name for name in ("content", "prompt", "messages") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise bad_field(
                given[1] if given else "content", "give exactly one of content, prompt and messages"
            )
        if self.add_special and not self.parse_special:
            raise bad_field(
                "parse_special",
                "parse_special=false cannot be combined with add_special=true; leave out one of "
                "them",
            )
        for name, kinds in _BELONGS_TO.items():
            if (
                name in self.model_fields_set
                and getattr(self, name) is not None
                and given[0] not in kinds
            ):
                raise bad_field(
                    name,
                    f"{name} only applies to {' or '.join(kinds)}, not to {given[0]}; leave it out",
                )

    @property
    def with_special_tokens(self) -> bool:
        return (
            self.add_special if self.content is not None else self.add_special_tokens is not False
        )


class DetokenizeRequest(Strict):
    """Body of /detokenize: token ids to convert to text."""

    tokens: FewTokenIds
    model: ModelName | None = None
