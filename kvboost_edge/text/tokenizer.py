"""Tokenizer of a model: encoding, decoding, special tokens and the chat template.

A tokenizer is loaded from a model directory or wraps a transformers tokenizer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from kvboost_edge.errors import ModelFormatError, RequestError
from kvboost_edge.host.json_file import read_json_object
from kvboost_edge.text.chat_template import ChatTemplate, plain_messages, plain_tools
from kvboost_edge.text.codec import FastCodec, SimpleCodec, StreamKind, TextCodec
from kvboost_edge.text.plain_content import SpecialTexts, check_marks, free_marks
from kvboost_edge.text.rendered_chat import FindAnswer, encode_with_answers
from kvboost_edge.text.tokenizer_bounds import read_tokenizer_file
from kvboost_edge.text.turns.format_detection import turn_format
from kvboost_edge.text.turns.formats import TurnFormat
from kvboost_edge.text.turns.harmony.history import one_call_each
from kvboost_edge.text.turns.keyword_calls import with_calls_written
from kvboost_edge.text.turns.replay import (
    find_thought,
    merge_call_marks,
    with_arguments,
    with_marks,
    with_objects,
)

__all__ = ["Tokenizer"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# Added tokens that look like tags. Others, such as whitespace, words and code, remain tokens in
# messages.
_MARKER = re.compile(r"[<\[\]].*\w.*[>\]\[]", re.DOTALL)
_SPECIAL_LENGTH = 256  # characters; longer than any special token's text


class _Rendered(NamedTuple):
    """A rendered prompt, split into parts where stored token ids are inserted.

    Attributes:
        parts: rendered text. `mark` occurs within the text of each control token from a message.
        kept: stored ids between the parts, one list fewer than parts.
        mark: character that is removed from the text before encoding.
    """

    parts: list[str]
    kept: list[list[int]]
    mark: str

    @property
    def text(self) -> str:
        return "".join(self.parts).replace(self.mark, "")


class _MarkedText:
    """Encoder for text with marks. No token spans a mark."""

    def __init__(self, codec: TextCodec, mark: str) -> None:
        self._codec = codec
        self._mark = mark

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = text.split(self._mark)
        if len(pieces) > 1:
            return self._codec.encode_apart(pieces)
        return self._codec.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._codec.decode(ids, skip_special_tokens)


class Tokenizer:
    """A model's tokenizer. It is immutable and thread-safe.

    Attributes:
        codec: adapter of the wrapped tokenizer.
        special_tokens: texts of special tokens by name, such as 'bos_token'.
        name: model name shown in error messages.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        name: str,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.codec = codec
        self.name = name
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = codec.vocab_size
        self.chat_template = chat_template
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.pad_token_id = self._special_id("pad_token")

    @classmethod
    def from_dir(cls, model_dir: Path | str) -> Tokenizer:
        """Load the tokenizer and the chat template of a model directory.

        Raises:
            ModelFormatError: a file is missing or damaged.
        """
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelFormatError(
                f"{path} is missing; save the tokenizer with transformers' "
                "AutoTokenizer.save_pretrained to get one"
            )
        config = _read_json(directory / "tokenizer_config.json")
        try:
            data = read_tokenizer_file(path, config.get("added_tokens_decoder"))
            backend = tokenizers.Tokenizer.from_buffer(data)
        except ModelFormatError:
            raise
        except BaseException as error:
            # The library raises a plain Exception for any error in the file, and some normalizers
            # cause a panic.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelFormatError(f"{path} is not a readable tokenizer: {error}") from error
        special = _special_tokens({**_read_json(directory / "special_tokens_map.json"), **config})
        _add_missing_tokens(backend, config, special, path)
        return cls(
            FastCodec(backend),
            name=directory.name,
            special_tokens=special,
            chat_template=_read_chat_template(directory, config),
        )

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> Tokenizer:
        """Wrap a loaded transformers tokenizer. A `Tokenizer` is returned unchanged.

        A fast tokenizer is copied.

        Raises:
            ConfigError: a slow tokenizer does not decode token by token.
        """
        if isinstance(tokenizer, cls):
            return tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(tokenizer, tokenizers.Tokenizer):
            backend = tokenizer
        codec: TextCodec
        if isinstance(backend, tokenizers.Tokenizer):
            codec = FastCodec(tokenizers.Tokenizer.from_str(backend.to_str()))
        else:
            codec = SimpleCodec(tokenizer)
        template = getattr(tokenizer, "chat_template", None)
        special = getattr(tokenizer, "special_tokens_map", None)
        return cls(
            codec,
            name=str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__),
            special_tokens=_special_tokens(special if isinstance(special, Mapping) else {}),
            chat_template=_pick_template(template),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the tokenizer's special tokens (BOS)."""
        if not isinstance(text, str):
            raise RequestError(f"text to encode must be a string, got {type(text).__name__}")
        return self.codec.encode(text, add_special_tokens)

    def encode_framed(self, before: str, content: str, after: str) -> list[int]:
        """Return the token ids of three consecutive texts, without BOS.

        Special tokens written in `content` are encoded as plain text.
        """
        mark = free_marks([before, content, after])[0]
        text = before + self._specials.marked(content, mark) + after
        return self.codec.encode_apart(text.split(mark))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Unknown ids are ignored."""
        return self.codec.decode(ids, skip_special_tokens)

    @functools.cached_property
    def leading_ids(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer adds before a text."""
        bare, whole = (self.encode("a", special) for special in (False, True))
        starts = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
        return tuple(whole[: starts[0]]) if starts else ()

    @functools.cached_property
    def turn_format(self) -> TurnFormat:
        """Format of reasoning and tool calls, detected from the chat template.

        Raises:
            RequestError: the model has no chat template.
        """
        return turn_format(
            self._template.render, lambda text: self.codec.token_id(text) is not None
        )

    def replace_template(self, source: str) -> None:
        """Replace the chat template. No other thread may use the tokenizer meanwhile."""
        self.chat_template = source
        for name in ("_compiled", "_controls", "turn_format"):
            self.__dict__.pop(name, None)

    def special_ids_in(self, text: str) -> frozenset[int]:
        """Return the ids of all special tokens whose texts occur in a text."""
        found = [
            self.codec.token_id(special)
            for special in self.codec.special_texts()[0]
            if special in text
        ]
        return frozenset(token_id for token_id in found if token_id is not None)

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        *,
        continue_final: bool = False,
    ) -> str:
        """Render chat messages and return the prompt text.

        Args:
            messages: dicts with 'role' and 'content'.
            add_generation_prompt: end with the header of an assistant's message.
            variables: template variables, such as enable_thinking. Reserved names raise
                RequestError.
            tools: tools in the format of OpenAI's API.
            continue_final: end after the content of the last message, which the model then
                continues.

        Raises:
            RequestError: the model has no chat template, or the template rejects the messages.
        """
        return self._rendered(
            messages, add_generation_prompt, variables, tools, continue_final=continue_final
        ).text

    def marker_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text if grammars treat it as a marker.

        Returns None if there is no such token or the tokenizer cannot tell.
        """
        return self.codec.marker_id(text)

    def encode_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Tools | None = None,
        continue_final: bool = False,
        find_answer: FindAnswer | None = None,
    ) -> list[int]:
        """Return the token ids of chat messages.

        No BOS is added, because the template writes it where the model needs one. Special tokens in
        messages and tools are encoded as plain text, and so are markers of the template such as
        <tool_call>. An assistant's message may contain markers.

        Args:
            tools, continue_final: as for `apply_chat_template`.
            find_answer: returns the generated ids of an assistant's message. See
                `encode_with_answers`, and turns/replay.py for messages with calls.
        """
        rendered = self._rendered(
            messages,
            add_generation_prompt,
            variables,
            tools,
            find_answer,
            continue_final=continue_final,
        )
        return self._encode_rendered(rendered, messages, find_answer)

    def chat_prompt(
        self, messages: Messages, find_answer: FindAnswer | None = None
    ) -> tuple[str, list[int]]:
        """Return the prompt text and the token ids of chat messages.

        See `apply_chat_template` and `encode_chat`.
        """
        rendered = self._rendered(messages, True, None, None, find_answer)
        ids = self._encode_rendered(rendered, messages, find_answer)
        return (self.decode(ids, False) if rendered.kept else rendered.text), ids

    def _encode_rendered(
        self, rendered: _Rendered, messages: Messages, find_answer: FindAnswer | None
    ) -> list[int]:
        answers, find_answer = (
            self._kept_among(messages, find_answer) if find_answer is not None else ([], None)
        )
        encoder = _MarkedText(self.codec, rendered.mark)
        ids: list[int] = []
        for part, kept in zip(rendered.parts, [*rendered.kept, []], strict=True):
            if find_answer is None or not answers:
                ids += encoder.encode(part, False)
            else:
                ids += encode_with_answers(part, answers, encoder, find_answer)
            ids += kept
        return ids

    def _kept_among(
        self, messages: Messages, find_answer: FindAnswer
    ) -> tuple[list[str], FindAnswer]:
        """Return the assistant texts with stored ids, and a function that returns these ids.

        Later steps search the prompt for each text, so texts without stored ids are dropped here. A
        message with thinking has two texts: the whole output, and the text after the thinking.
        """
        texts: list[str] = []
        whole: dict[str, list[int]] = {}
        for message in messages:
            content = message.get("content")
            if (
                message.get("reasoning_content")
                and (ids := find_thought(message, find_answer)) is not None
            ):
                whole[self.decode(ids, False)] = ids
                texts.append(self.decode(ids, False))
            if (
                message.get("role") == "assistant"
                and isinstance(content, str)
                and find_answer(content)
            ):
                texts.append(content)
        return texts, lambda text: whole.get(text) or find_answer(text)

    def _rendered(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        tools: Tools | None,
        find_answer: FindAnswer | None = None,
        *,
        continue_final: bool = False,
    ) -> _Rendered:
        """Render the prompt.

        If `find_answer` is given and the template allows it, messages with calls are replaced by
        their stored ids.
        """
        template = self._template
        plain = plain_messages(messages)
        if has_calls := any(message.get("tool_calls") for message in plain):
            plain = with_arguments(plain, self.turn_format.calls)
            plain = plain if self.turn_format.channels is None else one_call_each(plain)
        given = {
            "variables": dict(variables or {}),
            "tools": None if tools is None else plain_tools(tools),
        }
        mark, cut, place = free_marks([plain, given])
        if continue_final:
            _end_with(plain[-1], cut)

        def render(shown: list[dict[str, Any]]) -> str:
            if has_calls:
                shown = with_objects(shown, self.turn_format.calls)
            shown = [self._marked(message, mark) for message in shown]
            if (
                has_calls
                and self.turn_format.calls is not None
                and not self.turn_format.shows_calls
            ):
                # Called after marking, because the markers that it writes are intended.
                shown = with_calls_written(shown, self.turn_format.calls)
            return template.render(
                shown,
                add_generation_prompt=add_generation_prompt and not continue_final,
                **self._controls.marked(given, mark),
            )

        kept: list[list[int]] = []
        text = None
        if find_answer is not None and has_calls:
            placed, kept = with_marks(
                plain, find_answer, place, in_calls=self.turn_format.results_need_calls
            )
            text = self._replayed(render, placed, place, len(kept))
        if text is None:
            text = render(plain)
            kept = []
        if continue_final:
            text, found, _ = text.rpartition(cut)
            if not found:
                raise RequestError(
                    "the model's chat template does not render the last message, so it cannot be "
                    "continued; send it without continuation"
                )
        check_marks(text, mark)
        return _Rendered(text.split(place) if kept else [text], kept, mark)

    def _marked(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """Insert marks into the control tokens of a message.

        An assistant's text may contain the markers that a model writes, such as those around a
        call. The arguments of a call may not.
        """
        if message.get("role") != "assistant":
            return dict(self._controls.marked(message, mark))
        marked = dict(self._specials.marked(message, mark))
        if "tool_calls" in message:
            marked["tool_calls"] = self._controls.marked(message["tool_calls"], mark)
        return marked

    def _replayed(
        self,
        render: Callable[[list[dict[str, Any]]], str],
        placed: list[dict[str, Any]],
        place: str,
        count: int,
    ) -> str | None:
        """Return the rendered text with `count` placeholders for stored ids.

        Returns None if the template does not render each placeholder in the place of the generated
        text. It also returns None if the text after a placeholder could be tokenized differently
        than in the whole prompt.
        """
        if not count or not self.turn_format.replays:
            return None
        format = self.turn_format
        try:
            text = render(placed)
        except RequestError:  # some templates derive the next role from the calls
            return None
        if format.results_need_calls and format.calls is not None:
            text = merge_call_marks(text, place, format.calls)
        _, *behind = text.split(place)
        if len(behind) != count:
            return None
        if self.codec.stream_kind is StreamKind.BYTES:
            return text
        firsts = [self.encode(part[:_SPECIAL_LENGTH], False)[:1] for part in behind]
        return (
            text
            if all(first and not self.codec.has_text(first[0], True) for first in firsts)
            else None
        )

    @property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                f"model {self.name} has no chat template; give the prompt as a string or as token "
                "ids"
            )
        if isinstance(self._compiled, str):
            raise ModelFormatError(self._compiled)
        return self._compiled

    @functools.cached_property
    def _compiled(self) -> ChatTemplate | str:
        """The compiled chat template, or the error message if it is invalid.

        The result is cached in both cases.
        """
        try:
            return ChatTemplate(
                self.chat_template or "", model_name=self.name, variables=self.special_tokens
            )
        except ModelFormatError as error:
            return str(error)

    @functools.cached_property
    def _specials(self) -> SpecialTexts:
        return SpecialTexts(*self.codec.special_texts())

    @functools.cached_property
    def _controls(self) -> SpecialTexts:
        """Finder for special tokens and for added tokens that the chat template uses as markers."""
        source = self.chat_template or ""
        exact, folded = self.codec.special_texts()
        added, added_folded = self.codec.added_texts()
        used = {text for text in added if text in source and _MARKER.fullmatch(text)}
        return SpecialTexts(exact | used, folded | (used & added_folded))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.codec.token_id(text)


def _end_with(message: dict[str, Any], mark: str) -> None:
    """Append a mark to the text of a message."""
    content = message.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        message = content[-1]
        content = content[-1].get("text")
        message["text"] = f"{content or ''}{mark}"
    elif isinstance(content, str):
        message["content"] = content + mark
    else:
        raise RequestError(
            "the last message has no text to continue; give it a string or a text part as 'content'"
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if the file does not exist."""
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the fields named '..._token'.

    A field is a string or an object with 'content'.
    """
    found: dict[str, str] = {}
    for name, value in fields.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, AddedToken):
            text = str(text)
        if isinstance(text, str):
            found[name] = text
    return found


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], path: Path
) -> None:
    """Add tokens that only tokenizer_config.json lists, and mark the named special tokens."""
    listed = config.get("added_tokens_decoder", {})
    try:
        wanted = sorted((int(token_id), dict(token)) for token_id, token in listed.items())
        missing = [
            AddedToken(
                token["content"],
                special=bool(token.get("special")),
                **{name: bool(token[name]) for name in _TOKEN_FLAGS if name in token},
            )
            for _, token in wanted
            if backend.token_to_id(token["content"]) is None
        ]
        # Added in one call, because each call processes all existing tokens.
        backend.add_tokens(missing)
        for token_id, token in wanted:
            if backend.token_to_id(token["content"]) != token_id:
                raise ModelFormatError(
                    f"token {token['content']!r} has id {backend.token_to_id(token['content'])} in "
                    f"{path} but {token_id} in tokenizer_config.json"
                )
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"added_tokens_decoder of the tokenizer_config.json next to {path} is "
            "damaged; download it again"
        ) from error
    known = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    named = [
        text
        for text in special.values()
        if text not in known and backend.token_to_id(text) is not None
    ]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(named)]
    )


def _read_chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelFormatError(f"{path} is not readable text: {error}") from error
    template = config.get(
        "chat_template", _read_json(directory / "chat_template.json").get("chat_template")
    )
    return _pick_template(template)


def _pick_template(template: Any) -> str | None:
    """Return the default template, or None.

    Args:
        template: a string, a {name: template} dict, or a list of {'name', 'template'}.
    """
    if isinstance(template, (list, tuple)):
        template = {
            item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)
        }
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None
