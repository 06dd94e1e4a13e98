"""Tokenizer: text to token ids and back, special tokens and the chat template.

It is loaded from a model directory or wraps a transformers tokenizer.
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
from kvboost_edge.text.turns.replay import find_thought, lifted, with_arguments, with_marks

__all__ = ["Tokenizer"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# Added tokens may also be white space, words and code, which stay one token in any message.
_MARKER = re.compile(r"[<\[\]].*\w.*[>\]\[]", re.DOTALL)
_SPECIAL_LENGTH = 256  # characters; no special token's text is as long


class _Rendered(NamedTuple):
    """A rendered prompt: parts with stored ids between them.

    In each part, `mark` splits the text of every control token that comes from a message.
    """

    parts: list[str]
    kept: list[list[int]]
    mark: str

    @property
    def text(self) -> str:
        return "".join(self.parts).replace(self.mark, "")


class _MarkedText:
    """Encoder of text with marks; no token spans a mark."""

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
    """A model's tokenizer. It is immutable and safe to use from several threads.

    Attributes:
        codec: the tokenizer that encodes and decodes.
        special_tokens: texts of special tokens by name, such as 'bos_token'.
        name: name of the model in messages.
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
        """Load `tokenizer.json`, `tokenizer_config.json` and the chat template of a model
        directory.

        Raises ModelFormatError that names a missing or damaged file.
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
            # The library raises plain Exception for every fault of the file, and some normalizers
            # make it panic.
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
        """Wrap a loaded transformers tokenizer; return a `Tokenizer` unchanged.

        A fast tokenizer is copied. Any other object must decode its tokens one by one, else
        ConfigError is raised.
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
        """Return the token ids of a text, by default with the tokenizer's own special tokens
        (BOS).
        """
        if not isinstance(text, str):
            raise RequestError(f"text to encode must be a string, got {type(text).__name__}")
        return self.codec.encode(text, add_special_tokens)

    def encode_framed(self, before: str, content: str, after: str) -> list[int]:
        """Return the token ids of three consecutive texts, without BOS.

        The text of a special token in `content` stays text.
        """
        mark = free_marks([before, content, after])[0]
        text = before + self._specials.marked(content, mark) + after
        return self.codec.encode_apart(text.split(mark))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; an id without a token adds nothing."""
        return self.codec.decode(ids, skip_special_tokens)

    @functools.cached_property
    def turn_format(self) -> TurnFormat:
        """Format of reasoning and tool calls in the chat template.

        A model without a template raises RequestError.
        """
        return turn_format(
            self._template.render, lambda text: self.codec.token_id(text) is not None
        )

    def special_ids_in(self, text: str) -> frozenset[int]:
        """Return the ids of all special tokens whose texts occur in this text."""
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
    ) -> str:
        """Return the prompt text of chat messages.

        Args:
            messages: dicts with 'role' and 'content'.
            variables: variables of the template, such as enable_thinking; reserved names are
                refused.
            tools: tools in the format of OpenAI's API.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        return self._rendered(messages, add_generation_prompt, variables, tools).text

    def marker_id(self, text: str) -> int | None:
        """Return the token of exactly this text that grammars treat as a marker, never as text.

        None: no such token exists, or the tokenizer cannot tell.
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

        The template writes BOS if the model wants one; none is added. Only the template writes
        special tokens, and other added tokens that it uses as markers, such as <tool_call>. Their
        text in a message or a tool stays text, except in an assistant's message.

        Args:
            tools: as for `apply_chat_template`.
            continue_final: end after the content of the last message, so that the model continues
                it.
            find_answer: finds the ids that an assistant's message was generated with; see
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
        """Return text and ids of chat messages, see `apply_chat_template` and `encode_chat`."""
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
        """Return the assistant texts with stored ids, and the function that finds these ids.

        Few messages of many have stored ids, and each is then searched for. A message with thinking
        counts as a whole, and also as the text after the thinking.
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
        """Return the prompt text. Where the template allows it, placeholders replace messages with
        stored ids.
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
            shown = [self._marked(message, mark) for message in shown]
            if (
                has_calls
                and self.turn_format.calls is not None
                and not self.turn_format.shows_calls
            ):
                shown = with_calls_written(
                    shown, self.turn_format.calls
                )  # after the marks: its own markers are intended
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
                    "the model's chat template does not show the last message, so it cannot be "
                    "continued"
                )
        check_marks(text, mark)
        return _Rendered(text.split(place) if kept else [text], kept, mark)

    def _marked(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """Put marks into a message.

        The assistant's own words may hold control tokens that a model writes, such as those around
        a call. The arguments of a call may not.
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
        """Return the text with `count` placeholders for the stored ids of answers, or None.

        None: the template does not show each of them where the model wrote, or the text after one
        would be split into other tokens than within the whole.
        """
        if not count or not self.turn_format.replays:
            return None
        format = self.turn_format
        try:
            text = render(placed)
        except RequestError:  # some templates use calls to find the next role
            return None
        if format.results_need_calls and format.calls is not None:
            text = lifted(text, place, format.calls)
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
        """The compiled chat template, or the reason why it cannot be used; compiled once even
        if invalid.
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
        """Special tokens, and other added tokens that the chat template uses as markers."""
        source = self.chat_template or ""
        exact, folded = self.codec.special_texts()
        added, added_folded = self.codec.added_texts()
        used = {text for text in added if text in source and _MARKER.fullmatch(text)}
        return SpecialTexts(exact | used, folded | (used & added_folded))

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.codec.token_id(text)


def _end_with(message: dict[str, Any], mark: str) -> None:
    """Put a mark after the text of a message."""
    content = message.get("content")
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        message = content[-1]
        content = content[-1].get("text")
        message["text"] = f"{content or ''}{mark}"
    elif isinstance(content, str):
        message["content"] = content + mark
    else:
        raise RequestError("the last message has no text to continue")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist."""
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields named '..._token' as text; each is a string or an object with 'content'."""
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
    """Add the tokens that only tokenizer_config.json knows at their ids, and the named special
    tokens.
    """
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
        backend.add_tokens(
            missing
        )  # in one call, because each call takes time for all existing tokens
        for token_id, token in wanted:
            if backend.token_to_id(token["content"]) != token_id:
                raise ModelFormatError(
                    f"token {token['content']!r} has id {backend.token_to_id(token['content'])} in "
                    f"{path} but {token_id} in tokenizer_config.json"
                )
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelFormatError(
            f"added_tokens_decoder of the tokenizer_config.json next to {path} is damaged"
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
    """Return the default template of a string, a {name: template} map, or a list of {'name',
    'template'}.
    """
    if isinstance(template, (list, tuple)):
        template = {
            item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)
        }
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else None
