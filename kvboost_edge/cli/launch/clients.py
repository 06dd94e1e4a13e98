"""What each client has to be told, so that it talks to a server here: environment and arguments, no
file is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CLIENTS", "Launch", "Served"]

_ANY_KEY = "none"  # clients want one where the server asks for none
_TIMEOUT_MS = 3_600_000  # a long prompt takes a CPU minutes
_CODEX_KEY = "KVBOOST_API_KEY"


class Served(NamedTuple):
    """A server. url: without a trailing /v1; key: "" where it asks for none; context: tokens, 0 if
    it does not say.
    """

    url: str
    key: str
    model: str
    context: int


class Launch(NamedTuple):
    """A command, and what its environment has beside what is there already."""

    command: tuple[str, ...]
    environment: dict[str, str]


def _claude(server: Served) -> Launch:
    """Claude Code. Its header that changes with each request is turned off: it stands in front of
    the system prompt.
    """
    models = (
        "ANTHROPIC_MODEL",
        *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")),
    )
    environment = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key or _ANY_KEY,
        **dict.fromkeys(models, server.model),
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context:
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
    return Launch(("claude",), environment)


def _codex(server: Served) -> Launch:
    """Codex, over /v1/responses. Its settings are TOML; JSON's strings and numbers are TOML too."""
    settings: dict[str, Any] = {
        "model": server.model,
        "model_provider": "kvboost",
        "model_providers.kvboost.name": "kvboost-edge",
        "model_providers.kvboost.base_url": f"{server.url}/v1",
        "model_providers.kvboost.wire_api": "responses",
        "model_providers.kvboost.stream_idle_timeout_ms": _TIMEOUT_MS,
    }
    if server.key:
        settings["model_providers.kvboost.env_key"] = _CODEX_KEY
    if server.context:
        settings["model_context_window"] = server.context
    arguments = [
        part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")
    ]
    return Launch(("codex", *arguments), {_CODEX_KEY: server.key} if server.key else {})


def _opencode(server: Served) -> Launch:
    model: dict[str, Any] = {"name": server.model}
    if server.context:
        model["limit"] = {"context": server.context, "output": server.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvboost-edge",
        "options": {
            "baseURL": f"{server.url}/v1",
            "apiKey": server.key or _ANY_KEY,
            "timeout": _TIMEOUT_MS,
        },
        "models": {server.model: model},
    }
    config = {"model": f"kvboost/{server.model}", "provider": {"kvboost": provider}}
    return Launch(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _openwebui(server: Served) -> Launch:
    environment = {
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key or _ANY_KEY,
        "DEFAULT_MODELS": server.model,
        "ENABLE_OLLAMA_API": "False",
    }
    return Launch(("open-webui", "serve"), environment)


CLIENTS: dict[str, Callable[[Served], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "openwebui": _openwebui,
}
