"""The `kvboost-edge why` command, which shows cache-miss reports of a server's requests."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvboost_edge.cli.console import open_console
from kvboost_edge.cli.servers.remote import ServerClient
from kvboost_edge.errors import RequestError

__all__ = ["WORDS", "run_why"]

WORDS = {
    "none": ("nothing was recomputed", ""),
    "bypassed": (
        "the request did not use the cache",
        "leave out mode baseline and prompt_logprobs",
    ),
    "not_started": (
        "the request waited until its time limit",
        "raise --request-timeout, or send fewer requests at a time",
    ),
    "not_compared": (
        "the server keeps no history of requests to compare with",
        "serve with --request-history 3600",
    ),
    "first_seen": (
        "no recent request has the same prefix",
        "warm common prefixes: kvboost-edge warm",
    ),
    "new_text": ("the prompt continues an earlier one; only new text was computed", ""),
    "tail": ("only the last block, which is not full, was recomputed", ""),
    "private_tail": (
        "the end of an earlier prompt and its answer are not shared, because the model computes "
        "with approximate options",
        "to share them, turn off --arithmetic wide and sparse prefill",
    ),
    "evicted": (
        "it was cached, but then evicted for other requests",
        "give the pool more memory (--max-cache-bytes), keep blocks on disk (--disk-cache-dir), "
        "or pin the prompt: /v1/warm with pin",
    ),
    "state": (
        "its KV was cached, but not the recurrent state, which is cached from now on",
        "give recurrent state more memory: --max-state-bytes",
    ),
    "not_kept": ("an earlier request with this prefix is still running or was not cached", ""),
    "tool_order": (
        "the order of the tools changed",
        "send tools in one order, or let the server sort them: --normalise tools",
    ),
    "tools": (
        "the tools changed",
        "send the same tools with every turn; restrict them with tool_choice instead",
    ),
    "template": (
        "the variables of the chat template changed",
        "send the same chat_template_kwargs with every turn",
    ),
    "thinking": (
        "the reasoning of an earlier turn is missing",
        "send reasoning_content back; a template with preserve_thinking shows it (--normalise "
        "thinking)",
    ),
    "retokenized": (
        "the same text as different tokens",
        "send the model's answers back unchanged",
    ),
    "other_message": ("the last message changed; everything before it was reused", ""),
    "changed_text": ("the text changed", "put changing text, such as the date, after stable text"),
    "other_position": ("chunks were reused at other positions, and the rest was computed", ""),
}
"""The meaning of each cause, and the remedy."""


def run_why(request_id: str, url: str, api_key: str, *, lists: bool, as_json: bool) -> None:
    """Print the cache-miss report of a request, or list recent requests."""
    with ServerClient(url, api_key=api_key) as server:
        found = server.last_requests() if lists else server.request_cache(request_id)
    if lists and not found["kept_seconds"]:
        raise RequestError(
            "the server keeps no history of requests (--request-history 0); restart it without "
            "that flag"
        )
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        open_console().print(_listed(found["data"]) if lists else _explained(found))


def _explained(found: Mapping[str, Any]) -> RenderableType:
    meaning, advice = WORDS.get(found["cause"], (found["cause"], ""))
    parts: list[RenderableType] = [
        Text(f"{found['cause']}: {meaning}", "bold"),
        Text(_figures(found)),
    ]
    is_compared = found["cause"] != "first_seen"
    if is_compared and (found["text"] or found["text_before"]):
        where = f"from token {found['position']} on"
        parts.append(Text(f"{where}, in {found['field']}" if found["field"] else where))
        parts += [Text(), _texts(found)]
    if found["evicted_from"]:
        parts.append(Text(f"evicted from: {', '.join(found['evicted_from'])}"))
    if found["normalised"]:
        parts.append(Text(f"normalized by the server: {', '.join(found['normalised'])}"))
    if advice:
        parts += [Text(), Text(f"Remedy: {advice}.", "green")]
    return Group(*parts)


def _figures(found: Mapping[str, Any]) -> str:
    tiers = _tiers(found) or "nothing"
    return (
        f"{found['request_id']} of {found['model']}: {found['prompt_tokens']} prompt tokens, "
        f"{tiers} from the cache, {found['computed_tokens']} computed in {found['seconds']:.3f} s"
    )


def _tiers(found: Mapping[str, Any]) -> str:
    """Format the number of cached tokens by tier, such as "4096 pool, 128 disk"."""
    return ", ".join(f"{tokens} {tier}" for tier, tokens in found["hit_tokens"].items() if tokens)


def _texts(found: Mapping[str, Any]) -> Table:
    """Create a table of both texts. The differences are marked, even without colour."""
    now = found["text"]
    before = found["text_before"]
    same = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(now, before, strict=False)
        )
    )
    table = Table(show_header=True, expand=False)
    table.add_column("this request", ratio=1, overflow="fold")
    cells = [_marked(now, same if before else len(now), "bold green")]
    if before:
        place = ", ".join(filter(None, (found["compared_with"], found["field_before"])))
        table.add_column(f"before ({place})", ratio=1, overflow="fold")
        cells.append(_marked(before, same, "bold red"))
    table.add_row(*cells)
    return table


def _marked(text: str, same: int, style: str) -> Text:
    shown = Text(text[:same])
    if text[same:]:
        shown.append("»" + text[same:] + "«", style)
    return shown


def _listed(requests: list[dict[str, Any]]) -> RenderableType:
    if not requests:
        return Text("no request has finished yet")
    several = len({found["model"] for found in requests}) > 1
    request = Column("request", overflow="fold")  # so that the id can be copied
    table = Table("time", request, *["model"] * several, "cause", "cached", "computed", "seconds")
    for found in requests:
        at = datetime.datetime.fromtimestamp(found["at"]).strftime("%H:%M:%S")
        figures = (_tiers(found) or "0", str(found["computed_tokens"]), f"{found['seconds']:.3f}")
        table.add_row(
            at, found["request_id"], *[found["model"]] * several, found["cause"], *figures
        )
    return table
