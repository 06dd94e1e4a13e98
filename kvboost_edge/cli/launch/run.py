"""Ask the server what it serves, then print what a client needs, or become the client."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from kvboost_edge.cli.launch.clients import CLIENTS, Launch, Served
from kvboost_edge.cli.servers.remote import RemoteChat
from kvboost_edge.errors import BackendUnavailable, ConfigError

__all__ = ["run_launch"]


def run_launch(
    client: str, url: str, api_key: str, model: str, arguments: Sequence[str], *, execute: bool
) -> None:
    """Print the environment as lines for a shell, and the command as a remark; with `execute`
    become the client.

    Raises ConfigError for a model that is not served, BackendUnavailable where no server answers,
    or the client is not installed.
    """
    launch = CLIENTS[client](_served(url, api_key, model))
    command = [*launch.command, *arguments]
    if not execute:
        print(_lines(launch, command))
        return
    program = shutil.which(command[0])
    if program is None:
        raise BackendUnavailable(
            f"{command[0]!r} is not installed here, or not on PATH; leave --exec out to see what "
            "it would get"
        )
    os.execve(program, command, {**os.environ, **launch.environment})


def _served(url: str, api_key: str, model: str) -> Served:
    """The server's first model, or the one that is named."""
    key = api_key or os.environ.get("KVBOOST_API_KEY", "")
    with RemoteChat(url, api_key=key) as server:
        served = {str(one["id"]): one for one in server.models()}
    name = model or next(iter(served))
    if name not in served:
        known = ", ".join(map(repr, served))
        raise ConfigError(
            f"--model {model!r} is not served at {url}; it has {known} (serve --model-name gives "
            "others)"
        )
    context = served[name].get("max_model_len")
    return Served(
        url.rstrip("/").removesuffix("/v1"), key, name, context if isinstance(context, int) else 0
    )


def _lines(launch: Launch, command: Sequence[str]) -> str:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return "\n".join([*exports, f"# {shlex.join(command)}"])
