"""Comparison of the tokenizers of a model and its draft model.

A draft model reads and proposes the token ids of the model that it drafts for. An id must therefore
stand for the same text in both models. The rules that split a text into tokens must be equal too,
because a draft model that was trained on other splits proposes tokens that are rarely accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.tokenizer import Tokenizer

__all__ = ["vocabulary_difference"]

# Settings of the BPE model that decide how a text is split.
_SPLITTING = (
    "type",
    "ignore_merges",
    "byte_fallback",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)
# Settings of a normalizer or pre-tokenizer that change only the offsets of tokens.
_OFFSETS = ("trim_offsets",)
# Flags of an added token that decide where it matches. `special` is left out: GGUF files of one
# model differ in it by the version of their converter, and it changes only decoding.
_MATCHING = ("lstrip", "rstrip", "single_word", "normalized")
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}
_LONGEST = 60  # characters of a token in a message


def vocabulary_difference(target: Tokenizer, drafter: Tokenizer) -> str:
    """Return the first difference between two tokenizers, or "" if they are equal.

    Ids without a token and padding tokens are ignored. Models of one family often differ in the
    number of these.
    """
    assert isinstance(target.codec, FastCodec), "only loaded transformers models have others"
    assert isinstance(drafter.codec, FastCodec)
    text = target.codec.to_json()
    other_text = drafter.codec.to_json()
    if text == other_text:
        return ""
    one = json.loads(text)
    other = json.loads(other_text)
    names = (target.name, drafter.name)
    return (
        _token_difference(_tokens(one), _tokens(other), names)
        or _added_difference(_added(one), _added(other), names)
        or _sequence_difference("merge", _merges(one), _merges(other), names)
        or _setting_difference(one, other, names)
        or _step_difference("normalizer", one, other, names)
        or _step_difference("pre_tokenizer", one, other, names)
    )


def _tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens by id, without padding tokens."""
    vocabulary = tokenizer["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        found = {token_id: token for token, token_id in vocabulary.items()}
    else:  # a unigram model lists its tokens with their scores
        found = {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
    found |= {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    # llama.cpp's converter fills rows without a token with these names.
    return {token_id: token for token_id, token in found.items() if token != f"[PAD{token_id}]"}


def _token_difference(
    one: Mapping[int, str], other: Mapping[int, str], names: tuple[str, str]
) -> str:
    if one == other:
        return ""
    token_id = min(i for i in one.keys() | other.keys() if one.get(i) != other.get(i))
    said = (
        f"{_token(tokens[token_id])} in {name}" if token_id in tokens else f"missing in {name}"
        for tokens, name in zip((one, other), names, strict=True)
    )
    return f"token {token_id} is {' and '.join(said)}"


def _added(tokenizer: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the flags of the tokens that are matched before a text is split, by id."""
    return {
        added["id"]: {"content": added["content"], **{flag: added[flag] for flag in _MATCHING}}
        for added in tokenizer["added_tokens"]
        if added["content"] != f"[PAD{added['id']}]"
    }


def _added_difference(
    one: Mapping[int, Mapping[str, Any]],
    other: Mapping[int, Mapping[str, Any]],
    names: tuple[str, str],
) -> str:
    for token_id in sorted(one.keys() | other.keys()):
        flags = one.get(token_id)
        other_flags = other.get(token_id)
        if flags is None or other_flags is None:
            content = (flags or other_flags or {})["content"]
            has, lacks = names if other_flags is None else names[::-1]
            return (
                f"token {token_id}, {_token(content)}, is an added token in {has} and an ordinary "
                f"one in {lacks}"
            )
        for flag in _MATCHING:
            if flags[flag] != other_flags[flag]:
                return (
                    f"the added token {token_id}, {_token(flags['content'])}, has {flag}="
                    f"{flags[flag]} in {names[0]} and {other_flags[flag]} in {names[1]}"
                )
    return ""


def _merges(tokenizer: Mapping[str, Any]) -> Sequence[Any]:
    """Return the merges of a BPE model in order, or the scores of a unigram model."""
    model = tokenizer["model"]
    found: Sequence[Any] = (
        model.get("merges", ()) if isinstance(model["vocab"], Mapping) else model["vocab"]
    )
    return found


def _sequence_difference(
    what: str, one: Sequence[Any], other: Sequence[Any], names: tuple[str, str]
) -> str:
    if one == other:
        return ""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return f"{what} {index} is {mine} in {names[0]} and {theirs} in {names[1]}"
    return f"{names[0]} has {len(one)} {what}s and {names[1]} has {len(other)}"


def _setting_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]
) -> str:
    for setting in _SPLITTING:
        # None, "" and False all mean that a setting is not used.
        mine = one["model"].get(setting) or None
        theirs = other["model"].get(setting) or None
        if mine != theirs:
            return f"{setting} is {mine} in {names[0]} and {theirs} in {names[1]}"
    return ""


def _step_difference(
    stage: str, one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]
) -> str:
    mine = _steps(one[stage], _STEPS[stage])
    theirs = _steps(other[stage], _STEPS[stage])
    return _sequence_difference(f"{stage.replace('_', '-')} step", mine, theirs, names)


def _steps(stage: Mapping[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order, without nested sequences."""
    if stage is None:
        return []
    if stage["type"] == "Sequence":
        return [step for part in stage[inner] for step in _steps(part, inner)]
    return [{name: value for name, value in stage.items() if name not in _OFFSETS}]


def _token(text: str) -> str:
    return f"{text!r:.{_LONGEST}}"
