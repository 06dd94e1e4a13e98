"""Commands that query a running server, and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvboost_edge.cli.option_parsing import JsonOption
from kvboost_edge.cli.servers.remote import ServerClient
from kvboost_edge.errors import ConfigError

__all__ = ["add_commands", "run_warm"]

UrlOption = Annotated[str, typer.Option("--url", metavar="URL", help="URL of the running server.")]
KeyOption = Annotated[
    str,
    typer.Option(
        "--api-key", metavar="KEY", help="API key for the server. Default: $KVBOOST_API_KEY."
    ),
]


def run_warm(
    file: str, url: str, api_key: str, *, pin: bool, ttl: float | None, as_json: bool
) -> None:
    """Warm the whole prompt of a chat request in a file, including the template and tools."""
    body = {"add_generation_prompt": True, **_recorded(Path(file))}
    body |= {"pin": True} if pin else {}
    body |= {} if ttl is None else {"ttl": ttl}
    with ServerClient(url, api_key=api_key) as server:
        found = server.warm(body)
    if as_json:
        print(json.dumps(found))
        return
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    seconds = found["kvboost"]["total_ms"] / 1e3
    pinned = f"; {found['pinned_tokens']} tokens are pinned" if pin else ""
    pinned += "" if ttl is None else f" for {ttl:g} s"
    print(
        f"{found['token_count']} prompt tokens are cached, {cached} of them already before "
        f"({seconds:.2f} s){pinned}"
    )


def _recorded(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--from-request {str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--from-request {str(path)!r} is not JSON: {error}") from error
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ConfigError(
            f"--from-request {str(path)!r} is not a body of /v1/chat/completions: it must be an "
            "object with messages"
        )
    return body


def why(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="Request id or its beginning, from the x-request-id response header. "
            "'last' selects the latest request.",
        ),
    ] = "last",
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = "",
    lists: Annotated[
        bool, typer.Option("--list", help="List the recent requests of this API key.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Explain why a server recomputed a prompt.

    Shows where the prompt first differs from an earlier request, the text of both requests there,
    the cost and a remedy.
    """
    from kvboost_edge.cli.servers.why import run_why

    run_why(request_id, url, api_key, lists=lists, as_json=as_json)


def warm(
    from_request: Annotated[
        str,
        typer.Option(
            "--from-request",
            metavar="FILE",
            help="File with the JSON body of a /v1/chat/completions request. Required.",
        ),
    ],
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = "",
    pin: Annotated[
        bool, typer.Option("--pin", help="Pin the blocks so that they are not evicted.")
    ] = False,
    ttl: Annotated[
        float | None,
        typer.Option(
            "--ttl",
            metavar="SECONDS",
            help="Duration of the pin in seconds. Requires --pin. Default: no limit.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the prompt of a recorded request on a server and cache it for later requests."""
    run_warm(from_request, url, api_key, pin=pin, ttl=ttl, as_json=as_json)


def ps(
    url: UrlOption = "http://127.0.0.1:8000",
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the loaded models of a server and when each will be unloaded."""
    from kvboost_edge.cli.servers.ps import run_ps

    run_ps(url, api_key, as_json=as_json)


def add_commands(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(
        epilog=(
            "[b]Examples[/b]\n\nkvboost-edge why\n\nkvboost-edge why --list\n\n"
            "kvboost-edge why req-0123456789abcdef01234567 --url http://127.0.0.1:8000 --api-key "
            "sk-mine --json"
        )
    )(why)
    app.command(
        epilog=(
            "[b]Examples[/b]\n\nkvboost-edge warm --from-request agent.json\n\n"
            "kvboost-edge warm --from-request agent.json --url http://127.0.0.1:8000 --api-key "
            "sk-mine --pin --ttl 3600"
        )
    )(warm)
    app.command(
        epilog="[b]Examples[/b]\n\nkvboost-edge ps\n\n"
        "kvboost-edge ps --url http://127.0.0.1:8000 --api-key sk-mine --json"
    )(ps)
