"""The `kvboost-edge generate` command, for one answer to one prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvboost_edge.cli.console import open_console, piped_text
from kvboost_edge.cli.session import answer, check_settings, loaded_engine, timing_line
from kvboost_edge.engine.request.prompts import check_text
from kvboost_edge.errors import ConfigError

if TYPE_CHECKING:
    from kvboost_edge.engine.request.results import GenerationResult, TokenLogprobs
    from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["run_generate"]


def run_generate(
    prompt: str,
    model: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    *,
    chat: bool | None = None,
    system: str = "",
    as_json: bool = False,
) -> None:
    """Stream the text to standard output and a summary to standard error, or print JSON.

    Args:
        prompt: Text of the prompt; "-" reads standard input.
        model: Path or id of the model.
        options: Engine options.
        settings: Sampling parameters and other request options.
        chat: True to send the prompt as a user message, False to send it unchanged. With None, it
            is a message if the model has a chat template.
        system: System message, which needs a chat template.
        as_json: True to print the result as JSON.
    """
    if system and chat is False:
        raise ConfigError(
            "--system needs the chat template, which --raw turns off; give only one of them"
        )
    check_settings(settings)  # before reading standard input
    text = piped_text() if prompt == "-" else prompt
    check_text("the prompt", text)
    notes = open_console(stderr=True, quiet=as_json)
    with loaded_engine(model, options, notes, settings) as engine:
        is_chat = bool(engine.tokenizer.chat_template or system) if chat is None else chat
        request: Any = _messages(system, text) if is_chat else text
        result = answer(engine, request, settings, _ignore if as_json else _write, notes)
        tokenizer = engine.tokenizer
    if as_json:
        print(json.dumps(_plain(result, tokenizer), ensure_ascii=False, default=str))
    else:
        _write("\n")
        notes.print(timing_line(result), style="dim")


def _messages(system: str, text: str) -> list[dict[str, str]]:
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def _plain(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the result for JSON output, with the texts of the tokens of log probabilities."""
    return {
        **dataclasses.asdict(result),
        "approximate": result.approximate,
        "drafts": {source: counts._asdict() for source, counts in result.drafts.items()},
        "logprobs": _logprobs(result.logprobs, tokenizer),
        "prompt_logprobs": _logprobs(result.prompt_logprobs, tokenizer),
    }


def _logprobs(
    tokens: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    if tokens is None:
        return None
    from kvboost_edge.text.token_texts import TokenTexts, finite_logprob

    texts = TokenTexts(tokenizer)

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts.text(token_id)
        return {"token": text, "token_id": token_id, "logprob": finite_logprob(logprob)}

    return [
        None
        if token is None
        else {
            **named(token.token_id, token.logprob),
            "top": [named(*pair) for pair in token.top],
        }
        for token in tokens
    ]


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _ignore(piece: str) -> None:
    """Discard a piece of text, because JSON output prints the whole text at the end."""
