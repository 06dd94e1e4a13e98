"""`kvboost-edge warm`: what a recorded request begins with is computed by a running server, before
it is asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvboost_edge.cli.servers.remote import RemoteChat
from kvboost_edge.errors import ConfigError

__all__ = ["run_warm"]


def run_warm(
    file: str, url: str, api_key: str, *, pin: bool, ttl: float | None, as_json: bool
) -> None:
    """Warm the whole prompt of the chat request in a file: its template, tools and all."""
    body = {"add_generation_prompt": True, **_recorded(Path(file))}
    body |= {"pin": True} if pin else {}
    body |= {} if ttl is None else {"ttl": ttl}
    with RemoteChat(url, api_key=api_key, model="any") as server:
        found = server.warm(body)
    if as_json:
        print(json.dumps(found))
        return
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    seconds = found["kvboost"]["total_ms"] / 1e3
    print(
        f"{found['token_count']} prompt tokens are in the cache, {cached} of them were already "
        f"({seconds:.2f} s)"
    )


def _recorded(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--from-request {str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--from-request {str(path)!r} is no JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ConfigError(
            f"--from-request {str(path)!r} is no body of /v1/chat/completions: it must be an "
            "object with messages"
        )
    return body
