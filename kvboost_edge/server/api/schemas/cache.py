"""Request bodies of /v1/warm, /v1/unpin and /cache/reset."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from kvboost_edge.server.api.bounds import bounded, counted
from kvboost_edge.server.api.schemas.cache_use import PrefillChoice
from kvboost_edge.server.api.schemas.chat import ChatRequest, Messages, TemplateVariables
from kvboost_edge.server.api.schemas.shared import BoundedText, CacheSalt, FewTokenIds, ModelName
from kvboost_edge.server.api.schemas.strict import Strict, bad_field
from kvboost_edge.server.api.schemas.tools import Tools

__all__ = ["PromptPrefix", "ResetRequest", "UnpinRequest", "WarmRequest"]


class PromptPrefix(Strict):
    """Beginning of prompts, as a text or as messages."""

    text: Annotated[BoundedText, Field(min_length=1)] | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = Field(
        None,
        description=(
            "If true, the messages are a whole prompt, including the template's generation prompt."
        ),
    )
    cache_salt: CacheSalt | None = None
    prefill: PrefillChoice = Field(
        None, description="Prefill of the requests that the blocks are for, as kvboost.prefill."
    )
    model: ModelName | None = None

    def check_together(self) -> None:
        """Raise ApiError unless exactly one of text and messages is given."""
        if (self.text is None) == (self.messages is None):
            raise bad_field("text", "give exactly one of text and messages")
        self._check_of_messages("text", self.text)

    def _check_of_messages(self, other: str, given: object) -> None:
        for name in ("chat_template_kwargs", "tools", "add_generation_prompt"):
            if given is not None and getattr(self, name) is not None:
                raise bad_field(
                    name, f"{name} only applies to messages, not to {other}; leave it out"
                )


class UnpinRequest(PromptPrefix):
    """Body of /v1/unpin: a text or messages that were warmed with `pin`."""


Document = Annotated[BoundedText, Field(min_length=1)] | FewTokenIds


_OF_PROMPTS = frozenset(
    {"continue_final_message", "function_call", "functions", "kvboost", "reasoning_effort"}
)
"""Fields of a chat request that affect its prompt and that /v1/warm does not have."""


class WarmRequest(PromptPrefix):
    """Body of /v1/warm: a text, messages or documents whose KV is computed and cached.

    A recorded chat request is also accepted. Its fields about the answer are ignored.
    """

    documents: Annotated[list[Document], counted("documents")] | None = Field(
        None, description="Documents to cache for chunk_kv_reuse mode. Each is computed separately."
    )
    position_offset: Annotated[int, bounded("position_offset")] = Field(
        0, description="Position of the first token of the text, for chunk_kv_reuse mode."
    )
    priority: Annotated[int, bounded("priority")] | None = None
    pin: bool = Field(
        False, description="Keep the blocks in the pool, for ttl seconds or until /v1/unpin."
    )
    ttl: Annotated[float, bounded("ttl")] | None = Field(
        None, description="Seconds that the pin lasts; by default, until /v1/unpin."
    )

    @model_validator(mode="before")
    @classmethod
    def _prompt_alone(cls, value: Any) -> Any:
        """Remove the fields about the answer from a chat request."""
        if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
            return value
        of_answers = {*ChatRequest.wire_names()} - {*cls.wire_names()} - _OF_PROMPTS
        return {name: item for name, item in value.items() if name not in of_answers}

    @property
    def alone(self) -> str | None:
        """Name of the field that requests KV for non-prefix reuse, or None."""
        return (
            "documents"
            if self.documents is not None
            else "position_offset"
            if self.position_offset
            else None
        )

    def check_together(self) -> None:
        if self.documents is None:
            super().check_together()
        elif (self.text, self.messages) != (None, None):
            raise bad_field("documents", "give exactly one of text, messages and documents")
        if self.position_offset and self.text is None:
            raise bad_field("position_offset", "position_offset needs text")
        if self.alone is not None and self.pin:
            raise bad_field("pin", f"pin only applies to prompts, not to {self.alone}")
        self._check_of_messages("documents", self.documents)
        if self.ttl is not None and not self.pin:
            raise bad_field("ttl", "ttl needs pin: true")


class ResetRequest(Strict):
    """Body of /cache/reset: an empty object, because a reset has no options."""
