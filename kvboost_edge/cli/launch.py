"""The `kvboost-edge launch` command, which prints or applies the settings of a client program."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvboost_edge.cli.servers.remote import ServerClient
from kvboost_edge.errors import BackendUnavailable, ConfigError

__all__ = ["CLIENTS", "Launch", "RunningServer", "run_launch"]


_ANY_KEY = "none"  # clients require a key even if the server needs none
_TIMEOUT_MS = 3_600_000  # a long prompt takes minutes on a CPU
_CODEX_KEY = "KVBOOST_API_KEY"


class RunningServer(NamedTuple):
    """A running server.

    Attributes:
        url: URL without a trailing /v1.
        key: API key; "" if none is needed.
        model: Name of the served model.
        context: Context length in tokens; 0 if unknown.
    """

    url: str
    key: str
    model: str
    context: int


class Launch(NamedTuple):
    """A command and the environment variables that it needs."""

    command: tuple[str, ...]
    environment: dict[str, str]


def _claude(server: RunningServer) -> Launch:
    """Return the settings of Claude Code."""
    # Claude Code's attribution header comes before the system prompt and changes with each request,
    # which would prevent cache hits.
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


def _codex(server: RunningServer) -> Launch:
    """Return the settings of Codex, which uses /v1/responses."""
    # Codex reads TOML, whose strings and numbers can be written as in JSON.
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


def _opencode(server: RunningServer) -> Launch:
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


def _openwebui(server: RunningServer) -> Launch:
    environment = {
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": server.key or _ANY_KEY,
        "DEFAULT_MODELS": server.model,
        "ENABLE_OLLAMA_API": "False",
    }
    return Launch(("open-webui", "serve"), environment)


CLIENTS: dict[str, Callable[[RunningServer], Launch]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "openwebui": _openwebui,
}


def run_launch(
    client: str, url: str, api_key: str, model: str, arguments: Sequence[str], *, execute: bool
) -> None:
    """Print a client's environment and command as shell lines, or run the client if `execute`.

    Raises:
        ConfigError: The server does not have the model.
        BackendUnavailable: No server responds, or the client is not installed.
    """
    launch = CLIENTS[client](_served(url, api_key, model))
    command = [*launch.command, *arguments]
    if not execute:
        print(_lines(launch, command))
        return
    program = shutil.which(command[0])
    if program is None:
        raise BackendUnavailable(
            f"{command[0]!r} is not installed or not on PATH; leave out --exec to print its "
            "settings instead"
        )
    os.execve(program, command, {**os.environ, **launch.environment})


def _served(url: str, api_key: str, model: str) -> RunningServer:
    """Return the server, with the named model or its first model."""
    with ServerClient(url, api_key=api_key) as server:
        served = server.models()
    name = model or next(iter(served))
    if name not in served:
        known = ", ".join(map(repr, served))
        raise ConfigError(
            f"--model {model!r} is not served at {url}, which serves {known}; choose one of "
            "these, or start the server with --model-name"
        )
    context = served[name].get("max_model_len")
    return RunningServer(
        server.url, server.api_key, name, context if isinstance(context, int) else 0
    )


def _lines(launch: Launch, command: Sequence[str]) -> str:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return "\n".join([*exports, f"# {shlex.join(command)}"])
