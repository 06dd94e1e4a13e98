"""Request bodies of /v1/sessions and of llama.cpp's slot actions."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from kvboost_edge.server.api.bounds import bounded, counted
from kvboost_edge.server.api.schemas.cache import PromptPrefix
from kvboost_edge.server.api.schemas.shared import CacheSalt, FewTokenIds, ModelName, check_text
from kvboost_edge.server.api.schemas.strict import Strict, bad_field

__all__ = ["RestoreRequest", "SessionName", "SessionRequest", "SlotAction"]

# A name is one part of a URL's path. It cannot begin with a dot, because clients resolve "..".
_PATTERN = r"^[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*$"

SessionName = Annotated[
    str, AfterValidator(check_text), Field(pattern=_PATTERN), counted("session_name")
]
"""Name of a session: no slash, no backslash, no control character, and no dot at the beginning."""

Ttl = Annotated[float, bounded("ttl")]
_TTL = "Seconds until the session ends; by default, a day."


class SessionRequest(PromptPrefix):
    """Body of /v1/sessions: a name, and the conversation as messages, text or token ids."""

    name: SessionName = Field(
        description="Name of the session. A session of the same name is replaced."
    )
    tokens: FewTokenIds | None = Field(
        None, description="Token ids of the conversation, instead of messages or text."
    )
    ttl: Ttl | None = Field(None, description=_TTL)
    pin: bool = Field(
        True,
        description="Keep the blocks in the pool until the session ends. Without a disk cache it "
        "must be true.",
    )
    priority: Annotated[int, bounded("priority")] | None = None

    def check_together(self) -> None:
        """Raise ApiError unless exactly one of messages, text and tokens is given."""
        given = [name for name in ("messages", "text", "tokens") if getattr(self, name) is not None]
        if len(given) != 1:
            raise bad_field(
                given[1] if given else "messages", "give exactly one of messages, text and tokens"
            )
        self._check_of_messages("text", self.text)
        self._check_of_messages("tokens", self.tokens)


class RestoreRequest(Strict):
    """Body of /v1/sessions/{name}/restore, which may be empty."""

    ttl: Ttl | None = Field(
        None, description="Seconds until the session ends; by default, as when it was saved."
    )
    pin: bool = Field(
        True, description="Keep the blocks in the pool until the session ends, if there is room."
    )
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, bounded("priority")] | None = None


class SlotAction(Strict):
    """Body of /slots/{id_slot}, in llama.cpp's format."""

    filename: SessionName | None = Field(
        None, description="Name of the session to save or restore."
    )
    cache_salt: CacheSalt | None = None
    model: ModelName | None = None
