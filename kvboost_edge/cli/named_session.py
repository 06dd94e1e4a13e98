"""Named sessions of `kvboost-edge chat --session`, in the cache directory or on a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvboost_edge.cli.render import tokens_words
from kvboost_edge.cli.servers.remote import ServerClient
from kvboost_edge.config import disk_cache_root
from kvboost_edge.errors import ConfigError
from kvboost_edge.server.serve_options import served_name
from kvboost_edge.shareable import shareable_end
from kvboost_edge.tiers.disk.session_records import Session, SessionStore

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["ChatSession", "LocalSession", "RemoteSession"]

Messages = list[dict[str, str]]

_MOST_CHARACTERS = 128
_FORBIDDEN = "/\\"


class ChatSession(Protocol):
    """A named session of a conversation.

    Attributes:
        name: Name of the session.
    """

    name: str

    def messages(self) -> Messages:
        """Return the saved messages; none for a new session."""
        ...

    def keep(self, messages: Messages) -> str:
        """Save the conversation, and return its size in words. Raises KVBoostError."""
        ...


class LocalSession:
    """A session in the cache directory of a local engine.

    The server of this user finds it too, if the server needs no API key and serves the model under
    its default name.

    Attributes:
        name: Name of the session.
        engine: The engine, once it is loaded.
    """

    def __init__(self, name: str, model: str, options: Mapping[str, Any]) -> None:
        """Open a session.

        Args:
            name: Name of the session.
            model: Path or id of the model.
            options: Engine options.

        Raises:
            ConfigError: the name is invalid, or the disk cache is off.
        """
        self.name = _checked(name)
        self.engine: CPUPagedEngine | None = None
        self._model = served_name(model)
        directory = options.get("disk_cache_dir")
        if directory in (None, "off"):
            raise ConfigError(
                "--session needs the disk cache, which is off; set -o disk_cache_dir=DIRECTORY, or "
                "leave out --no-pack-cache and -o disk_cache_dir=off"
            )
        self._store = SessionStore(disk_cache_root(directory))

    def messages(self) -> Messages:
        """Return the saved messages; none for a new session.

        Raises:
            ConfigError: the session has no messages that a chat can continue.
        """
        found = self._store.find(None, None, self.name)
        return [] if found is None else _plain(self.name, found.content.get("messages"))

    def keep(self, messages: Messages) -> str:
        """Save the conversation, and return its size in words. Raises KVBoostError."""
        engine = self.engine
        assert engine is not None
        find = engine.kept_answers().find
        # No generation prompt: the next turn begins with these tokens.
        ids = engine.tokenizer.encode_chat(messages, False, find_answer=find)
        spec = engine.runner_info.kv_spec
        session = Session.of(
            self.name,
            self._model,
            ids,
            {"messages": messages},
            num_shareable=shareable_end(engine.config, len(ids)),
            block_size=engine.config.block_size,
            block_bytes=spec.bytes_per_block,
            state_bytes=spec.bytes_per_state,
        )
        info, _ = self._store.put(None, None, session)
        return _size(info.num_tokens, info.num_bytes)


class RemoteSession:
    """A session on a server.

    Attributes:
        name: Name of the session.
    """

    def __init__(self, name: str, remote: ServerClient) -> None:
        """Open a session. Raises ConfigError for an invalid name."""
        self.name = _checked(name)
        self._remote = remote

    def messages(self) -> Messages:
        """Return the saved messages, and bring their prefix into the server's pool.

        Raises:
            KVBoostError: the server has no sessions, or cannot continue this one.
        """
        listed = self._remote.sessions()["data"]
        if all(one["name"] != self.name for one in listed):
            return []
        messages = _plain(self.name, self._remote.session(self.name)["messages"])
        self._remote.restore_session(self.name)
        return messages

    def keep(self, messages: Messages) -> str:
        """Save the conversation, and return its size in words. Raises KVBoostError."""
        saved = self._remote.save_session(self.name, messages)
        return _size(saved["tokens"], saved["bytes"])


def _size(num_tokens: int, num_bytes: int) -> str:
    return f"saved, {tokens_words(num_tokens)}, {num_bytes / 1e6:.1f} MB"


def _checked(name: str) -> str:
    """Return a valid name of a session. The server has the same rule."""
    is_valid = (
        0 < len(name) <= _MOST_CHARACTERS
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set(_FORBIDDEN)
    )
    if not is_valid:
        raise ConfigError(
            f"--session {name[:_MOST_CHARACTERS]!r} must be 1 to {_MOST_CHARACTERS} printable "
            "characters without slashes, and not begin with a dot"
        )
    return name


def _plain(name: str, messages: Any) -> Messages:
    """Return messages that consist of texts. Raises ConfigError for all others."""
    for one in messages or [{}]:
        if not {"role", "content"} <= set(one) or not isinstance(one["content"], str):
            raise ConfigError(
                f"--session {name!r} holds no plain messages, so a chat cannot continue it; choose "
                "another name, or delete the session"
            )
    return [dict(one) for one in messages]
