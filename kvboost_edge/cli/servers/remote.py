"""Client for a running server with OpenAI-compatible endpoints."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from kvboost_edge.cli.render import draft_words, finish_words, reuse_words, tokens_words
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.errors import (
    BackendUnavailable,
    ConfigError,
    KVBoostError,
    RequestError,
    install_extra,
)

if TYPE_CHECKING:
    import httpx

__all__ = ["RemoteAnswer", "RemoteToolCall", "ServerClient", "Thought"]

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 300.0
# Servers that support return_progress, by the `owned_by` field of their models.
_TELLING = ("kvboost-edge", "llamacpp")
_KEY_VARIABLE = "KVBOOST_API_KEY"


class Thought(NamedTuple):
    """A piece of the reasoning that precedes the model's answer."""

    text: str


class RemoteToolCall(NamedTuple):
    """A tool call of the model. `arguments` is JSON text, which may be truncated."""

    name: str
    arguments: str


class RemoteAnswer(NamedTuple):
    """A complete answer and its statistics.

    If the server does not report them, token counts are None and figures of the KV cache are 0 or
    empty.

    Attributes:
        text: The answer.
        finish_reason: The server's finish reason.
        prompt_tokens: Number of prompt tokens.
        cached_tokens: Number of prompt tokens found in the cache.
        generated_tokens: Number of tokens in the answer.
        ttft_ms: Time to the first token in milliseconds.
        total_ms: Time to the last token in milliseconds.
        hit_tokens: Number of cached tokens by tier.
        reused_span_tokens: Number of tokens reused at other positions.
        recomputed_tokens: Number of tokens found at other positions and recomputed.
        reasoning: The model's reasoning.
        tool_calls: The model's tool calls.
        approximations: Labels of the server's options that make its answers approximate.
        drafted_tokens: Number of draft tokens verified.
        accepted_tokens: Number of draft tokens accepted.
    """

    text: str
    finish_reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    ttft_ms: float
    total_ms: float
    hit_tokens: Mapping[str, int]
    reused_span_tokens: int
    recomputed_tokens: int
    reasoning: str = ""
    tool_calls: tuple[RemoteToolCall, ...] = ()
    approximations: tuple[str, ...] = ()
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def timing_line(self) -> str:
        """Cache use, speed and drafts in one line."""
        parts = []
        if self.prompt_tokens is not None:
            found = (
                self.cached_tokens or 0,
                self.hit_tokens,
                self.reused_span_tokens,
                self.recomputed_tokens,
                self.approximations,
            )
            parts.append(reuse_words(self.prompt_tokens, *found))
        parts.append(f"first token {self.ttft_ms:.0f} ms")
        if self.generated_tokens is not None:
            rate = self.generated_tokens / self.total_ms * 1e3
            parts.append(f"{tokens_words(self.generated_tokens)}, {rate:.1f} per second")
        parts += draft_words(self.drafted_tokens, self.accepted_tokens)
        return " · ".join([*parts, finish_words(self.finish_reason)])


class ServerClient:
    """Client for one server, usable as a context manager. Every failure raises a KVBoostError.

    Attributes:
        url: URL of the server without a trailing /v1.
        api_key: API key; "" if there is none.
    """

    def __init__(self, url: str, *, api_key: str = "", model: str = "") -> None:
        """Create a client. No request is sent yet.

        Args:
            url: URL of the server, with or without a trailing /v1.
            api_key: API key; by default $KVBOOST_API_KEY.
            model: Name of the model; by default the server's first model.
        """
        try:
            self._httpx: Any = importlib.import_module("httpx")
        except ImportError as error:
            raise BackendUnavailable(
                f"--url needs httpx; install the extra: {install_extra('server')}"
            ) from error
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--url {url!r} must begin with http:// or https://, such as http://127.0.0.1:8000"
            )
        self.api_key = api_key or os.environ.get(_KEY_VARIABLE, "")
        timeout = self._httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        try:
            headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            self._client: httpx.Client = self._httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout
            )
        except (self._httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
            raise ConfigError(f"--url {url!r} or the API key is not valid: {error}") from error
        self._telling: bool | None = None
        self._model = model

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    @property
    def model(self) -> str:
        """Name of the model."""
        self._model = self._model or next(iter(self.models()))
        return self._model

    def stream(
        self, messages: list[dict[str, str]], settings: Mapping[str, Any], *, progress: bool = False
    ) -> Iterator[str | Thought | Progress | RemoteAnswer]:
        """Yield pieces of reasoning and answer as they arrive, then the `RemoteAnswer`.

        Closing the iterator disconnects from the server, which cancels the request. Raises
        RequestError if the server rejects the request.

        Args:
            messages: The conversation.
            settings: Further fields of the request.
            progress: True to also yield the prompt's progress, if the server reports it.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if progress and self._tells_progress():
            body["return_progress"] = True
        heard = _Heard()
        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json={**body, **settings}
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refused(response)
                for chunk in _events(response.iter_lines()):
                    if "error" in chunk:
                        raise RequestError(
                            f"the server ended the answer with an error: {_message(chunk)}"
                        )
                    if (found := _progress(chunk.get("prompt_progress"))) is not None:
                        yield found
                    yield from heard.take(chunk)
        except self._httpx.HTTPError as error:
            raise self._unreachable(error) from error
        yield heard.answer()

    def stats(self) -> Any:
        """Return the server's statistics from /v1/stats."""
        return self._get("/v1/stats")

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the server's models from /v1/models, by name. There is at least one."""
        listed = self._get("/v1/models")
        try:
            found = {str(one["id"]): dict(one) for one in listed["data"]}
        except (LookupError, TypeError, ValueError) as error:
            raise self._incompatible() from error
        if not found:
            raise self._incompatible()
        return found

    def loaded_models(self) -> list[dict[str, Any]]:
        """Return the server's loaded models from /api/ps."""
        return [dict(one) for one in self._get("/api/ps")["models"]]

    def last_requests(self) -> Any:
        """Return the cache-miss reports of this key's latest requests from /v1/requests."""
        return self._get("/v1/requests")

    def request_cache(self, request_id: str) -> Any:
        """Return the cache-miss report of a request. The id "last" selects the latest request."""
        return self._get(f"/v1/requests/{quote(request_id, safe='')}/cache")

    def warm(self, body: Mapping[str, Any]) -> Any:
        """Compute a prompt prefix on the server through /v1/warm."""
        return self._got(lambda: self._client.post("/v1/warm", json=body))

    def sessions(self) -> Any:
        """Return this key's named sessions from /v1/sessions."""
        return self._get("/v1/sessions")

    def session(self, name: str) -> Any:
        """Return a named session with its messages."""
        return self._get(f"/v1/sessions/{quote(name, safe='')}")

    def restore_session(self, name: str) -> Any:
        """Bring the prefix of a named session into the server's pool."""
        path = f"/v1/sessions/{quote(name, safe='')}/restore"
        return self._got(lambda: self._client.post(path))

    def save_session(self, name: str, messages: list[dict[str, str]]) -> Any:
        """Save a conversation as a named session."""
        body = {"name": name, "messages": messages, "model": self.model}
        return self._got(lambda: self._client.post("/v1/sessions", json=body))

    def _tells_progress(self) -> bool:
        """Return whether the server supports `return_progress`. Other servers might reject it."""
        if self._telling is None:
            try:
                owners = [model.get("owned_by") for model in self.models().values()]
                self._telling = any(owner in _TELLING for owner in owners)
            except KVBoostError:
                self._telling = False
        return self._telling

    def _get(self, path: str) -> Any:
        return self._got(lambda: self._client.get(path))

    def _got(self, ask: Callable[[], httpx.Response]) -> Any:
        try:
            response = ask()
        except self._httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self._refused(response)
        try:
            return response.json()
        except ValueError as error:
            raise self._incompatible() from error

    def _incompatible(self) -> RequestError:
        return RequestError(
            f"{self.url} answers, but not as an OpenAI-compatible server; check --url"
        )

    def _refused(self, response: httpx.Response) -> KVBoostError:
        try:
            message = _message(response.json())
        except ValueError:
            message = response.text[:200] or response.reason_phrase
        if response.status_code == 401:
            return ConfigError(
                f"{self.url} does not accept the API key ({message}); give --api-key or "
                f"${_KEY_VARIABLE}"
            )
        if response.status_code == 404 and self._model and "model" in message:
            return ConfigError(
                f"{self.url} does not know the model {self._model!r}: {message}; give another "
                "--model"
            )
        return RequestError(f"{self.url} answered {response.status_code}: {message}")

    def _unreachable(self, error: Exception) -> KVBoostError:
        if isinstance(error, self._httpx.ConnectError | self._httpx.ConnectTimeout):
            hint = "is the server running? start one with: kvboost-edge serve --model …"
            return BackendUnavailable(f"no server answers at {self.url} ({error}); {hint}")
        return BackendUnavailable(
            f"the connection to {self.url} broke: {error or type(error).__name__}"
        )


class _Heard:
    """Parts of an answer that have arrived so far."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first: float | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, RemoteToolCall] = {}
        self._reason = ""
        self._usage: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}

    def take(self, chunk: Mapping[str, Any]) -> Iterator[str | Thought]:
        """Store the contents of a chunk, and yield its pieces of text."""
        self._usage = chunk.get("usage") or self._usage
        self._told = chunk.get("kvboost") or self._told
        self._timings = chunk.get("timings") or self._timings
        for choice in chunk.get("choices", ()):
            self._reason = choice.get("finish_reason") or self._reason
            delta = choice.get("delta") or {}
            thought, text, calls = (
                delta.get(name) for name in ("reasoning_content", "content", "tool_calls")
            )
            if thought or text or calls:
                self._first = self._first or time.perf_counter()
            if thought:
                self._thoughts.append(thought)
                yield Thought(thought)
            if text:
                self._texts.append(text)
                yield text
            for piece in calls or ():
                self._take_call(piece)

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        index = piece.get("index", 0)
        made = piece.get("function") or {}
        known = self._calls.get(index, RemoteToolCall("", ""))
        name = made.get("name") or ""
        arguments = made.get("arguments") or ""
        self._calls[index] = RemoteToolCall(known.name + name, known.arguments + arguments)

    def answer(self) -> RemoteAnswer:
        """Return the part of the answer that has arrived so far."""
        now = time.perf_counter()
        details = self._usage.get("prompt_tokens_details") or {}
        return RemoteAnswer(
            text="".join(self._texts),
            finish_reason=self._reason or "no finish reason",
            prompt_tokens=self._usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            generated_tokens=self._usage.get("completion_tokens"),
            ttft_ms=((self._first or now) - self._started) * 1e3,
            total_ms=(now - self._started) * 1e3,
            hit_tokens=self._told.get("hit_tokens") or {},
            reused_span_tokens=self._told.get("reused_span_tokens") or 0,
            recomputed_tokens=self._told.get("recomputed_tokens") or 0,
            reasoning="".join(self._thoughts),
            tool_calls=tuple(self._calls.values()),
            approximations=tuple(self._told.get("approximations") or ()),
            drafted_tokens=self._timings.get("draft_n") or 0,
            accepted_tokens=self._timings.get("draft_n_accepted") or 0,
        )


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream, up to [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            yield dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"the server sent an event that is not a JSON object: {data[:100]!r}"
            ) from error


def _progress(told: Any) -> Progress | None:
    """Parse a chunk's `prompt_progress`. Returns None if it is missing or incomplete."""
    figures = told if isinstance(told, dict) else {}
    known = {
        name: one
        for name, one in figures.items()
        if isinstance(one, (int, float)) and math.isfinite(one)
    }
    try:
        total, cached, computed, elapsed = (
            known[name] for name in ("total", "cache", "processed", "time_ms")
        )
    except KeyError:
        return None
    left = known["estimated_ms"] / 1e3 if "estimated_ms" in known else None
    return Progress(int(total), int(cached), int(computed), elapsed / 1e3, left)


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return (
        str(error.get("message") or error) if isinstance(error, dict) else str(error or body)[:200]
    )
