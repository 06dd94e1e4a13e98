"""Diagnosis of cache misses, which finds the first diverging token of a prompt and the cause."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import cast, get_args

from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.cache_report.recent_requests import (
    Diagnosis,
    Ids,
    PromptField,
    RequestRecord,
)
from kvboost_edge.server.response_types import Cause

__all__ = ["CAUSES", "add_diverging_texts", "diagnose", "tool_field"]

# Tokens shown before and after the first diverging token.
_BEFORE = 6
_AFTER = 24
_SPACE = 2  # characters before a message that may be merged into its first token
# Number of first characters used to find a field in a prompt; also the maximum in tokens.
_PROBE = 48
_WORTH = 64  # minimum number of unchanged tokens after a change that make a report useful
_MAX_COMPARED = 32  # maximum number of earlier requests to compare a prompt with
_ALIKE = 0.5  # minimum fraction of equal tokens after the change, if the common prefix is short

CAUSES: tuple[Cause, ...] = get_args(Cause)
"""Causes of a cache miss, the reasons why prompt tokens were computed:

none            no miss: every token was cached
bypassed        the mode does not read the cache, or prompt_logprobs prevents it
not_started     the request ended while it was waiting
not_compared    no earlier requests are kept (--request-history 0)
first_seen      no recent request of the tenant with the same prefill has this prefix; at most the
                opening of the chat template is shared
new_text        the prompt continues an earlier one and its answer; only the new text was computed
tail            the last block is not full and was recomputed
private_tail    with arithmetic='wide' or sparse prefill, the end of each prompt and its answer
                are not shared. The tokens there were computed again
evicted         the blocks were evicted, reset, or unloaded with the model
state           the KV is cached, but not the recurrent state at this position. Tokens up to
                hit_tokens were reused, those up to `position` recomputed; a snapshot is now kept
                there
not_kept        an earlier request has this prefix, but its blocks are not cached: it still runs, or
                its mode does not write the cache
tool_order      the same tools in another order
tools           different tools
template        different variables of the chat template
thinking        the earlier prompt or answer contains reasoning here, this one does not
retokenized     the same text as different tokens
other_message   a different last message after the same prefix, such as a new conversation with the
                same system prompt. All tokens before it were reused
changed_text    different text; also in the last message, if most of the text after it is unchanged
other_position  tokens were reused at other positions; the others were computed
"""

_OUTSIDE = ("bypassed", "not_started")
Decode = Callable[[Sequence[int]], str]


def diagnose(
    record: RequestRecord,
    earlier: Sequence[tuple[RequestRecord, int]],
    result: GenerationResult,
    *,
    block_size: int,
    decode: Decode,
    thinks: str,
    compares: bool = True,
) -> Diagnosis:
    """Find the cause of a request's cache miss. `add_diverging_texts` adds the texts to the report.

    Args:
        record: the request.
        earlier: the tenant's earlier requests with a common prefix, each with the length of this
            prefix in tokens; longest prefix first.
        result: the engine's result.
        block_size: number of tokens in a block.
        decode: function that decodes token ids.
        thinks: opening marker of reasoning; "" if the template has no reasoning.
        compares: False if the server keeps no earlier requests. The report then contains only the
            reason that the engine gives.
    """
    found = Diagnosis(
        request_id=record.request_id,
        at=record.at,
        cause=cast("Cause", result.miss_reason or "none"),
        prompt_tokens=result.prompt_tokens,
        hit_tokens=dict(result.hit_tokens),
        reused_span_tokens=result.reused_span_tokens,
        computed_tokens=result.computed_prompt_tokens,
        seconds=result.prompt_ms / 1e3,
        step_share=result.step_share,
        position=result.exact_cached_tokens,
        normalised=record.asked.normalised,
    )
    if found.cause == "none" or found.cause in _OUTSIDE:
        return found
    if found.cause == "state":
        return dataclasses.replace(found, position=result.matched_tokens)
    if not compares:
        told = ("evicted", "tail", "private_tail")
        cause: Cause = found.cause if found.cause in told else "not_compared"
        return dataclasses.replace(found, cause=cause, evicted_from=result.evicted_from)
    if result.reused_span_tokens:
        return dataclasses.replace(found, cause="other_position")
    is_new = found.cause == "first_seen"
    closest, common = next(
        (
            (other, length)
            for other, length in _distinct(earlier)
            if length >= block_size or (is_new and _is_alike(record, other, length, decode))
        ),
        (None, 0),
    )
    if closest is None or result.exact_cached_tokens > common:
        # The cache may contain more than the earlier requests, for example other choices of an
        # answer.
        cause = "new_text" if is_new and result.exact_cached_tokens else found.cause
        longest = earlier[0][1] if earlier and cause != "first_seen" else 0
        position = max(longest, result.exact_cached_tokens)
        return dataclasses.replace(
            found, cause=cause, position=position, evicted_from=result.evicted_from
        )
    found = dataclasses.replace(found, compared_with=closest.request_id)
    # The last token of a prompt is always computed.
    whole = min(common, record.num_prompt - 1)
    shared = min(whole, record.num_shareable, closest.num_shareable)
    if result.exact_cached_tokens + block_size <= shared // block_size * block_size:
        # Unloading a model drops its pool, and the new pool has no record of the blocks.
        pool = ("pool",) if record.loading != closest.loading else ()
        dropped = tuple(dict.fromkeys((*pool, *result.evicted_from)))
        return dataclasses.replace(
            found, cause="evicted" if dropped else "not_kept", evicted_from=dropped
        )
    if result.exact_cached_tokens + block_size <= whole // block_size * block_size:
        return dataclasses.replace(found, cause="private_tail")
    return dataclasses.replace(
        found, cause=_cause(record, closest, common, decode, thinks), position=common
    )


def _distinct(
    earlier: Sequence[tuple[RequestRecord, int]],
) -> Iterator[tuple[RequestRecord, int]]:
    """Yield a limited number of records that differ right after the common prefix."""
    seen: set[tuple[int, bytes]] = set()
    for other, common in earlier:
        key = (common, other.ids[common : common + _AFTER].tobytes())
        if key not in seen:
            seen.add(key)
            yield other, common
        if len(seen) == _MAX_COMPARED:
            return


def _is_alike(record: RequestRecord, other: RequestRecord, common: int, decode: Decode) -> bool:
    """Return whether two prompts that differ in their first block are versions of the same prompt.

    The prompts must share more than the beginning of the template, and most of the text after the
    change.
    """
    begun = len(decode(record.ids[:common].tolist()))
    text = decode(record.ids[: common + _PROBE].tolist())
    probes = [field.text.strip()[:_PROBE] for field in record.asked.fields]
    places = [place for probe in probes if probe and (place := text.find(probe)) >= 0]
    if begun <= min(places, default=0):
        return False
    if common >= len(other.ids):
        return True
    ends = (
        record.ids[common : min(common + _AFTER, record.num_prompt)].tolist(),
        other.ids[common : common + _AFTER].tolist(),
    )
    return difflib.SequenceMatcher(None, *ends, autojunk=False).ratio() >= _ALIKE


def _cause(
    record: RequestRecord, other: RequestRecord, common: int, decode: Decode, thinks: str
) -> Cause:
    """Return the reason why two prompts diverge."""
    if common >= record.num_prompt:
        return "tail"
    if common >= len(other.ids):
        return "new_text"
    mine = record.asked
    before = other.asked
    if mine.tools != before.tools and common < other.num_prompt:
        return "tool_order" if sorted(mine.tools) == sorted(before.tools) else "tools"
    if mine.settings != before.settings and common < other.num_prompt:
        return "template"
    texts = [decode(one.ids[common : common + _AFTER].tolist()) for one in (record, other)]
    reasoned = other.num_prompt <= common < other.num_prompt + other.num_reasoning
    if reasoned or (thinks and thinks in texts[1] and thinks not in texts[0]):
        return "thinking"
    length = min(map(len, texts))
    if length > 1 and texts[0][:length] == texts[1][:length]:
        return "retokenized"
    if not _is_in_last_message(record, common, decode):
        return "changed_text"
    same_end = _common_end(record, other, common)
    stays = same_end >= _WORTH and 2 * same_end >= record.num_prompt - common
    return "changed_text" if stays else "other_message"


def _common_end(record: RequestRecord, other: RequestRecord, common: int) -> int:
    """Return the number of equal tokens at the ends of two prompts, not counting their common
    prefix.
    """
    mine = record.ids[common : record.num_prompt][::-1]
    before = other.ids[common : other.num_prompt][::-1]
    length = min(len(mine), len(before))
    differ = (mine[:length] != before[:length]).nonzero()[0]
    return int(differ[0]) if len(differ) else length


def _is_in_last_message(record: RequestRecord, position: int, decode: Decode) -> bool:
    """Return whether a position is in the last message."""
    fields = record.asked.fields
    # A raw prompt has a single field, and a chat has at least one message.
    has_messages = bool(fields) and fields[-1].name.startswith("message")
    last = fields[-1].text.strip() if has_messages else ""
    if not last:
        return False
    rest = decode(record.ids[position : record.num_prompt].tolist())
    place = rest.rfind(last)
    return (rest.find(last[:_PROBE]) if place < 0 else place) <= _SPACE


def add_diverging_texts(
    found: Diagnosis, record: RequestRecord, other: RequestRecord | None, decode: Decode
) -> Diagnosis:
    """Add the texts around the first diverging token to a report, and return it.

    Takes about 10 ms for 30,000 tokens.

    Args:
        found: the report.
        record: the request of the report.
        other: the request that it was compared with; None if that request was dropped meanwhile.
        decode: function that decodes token ids.
    """
    prompt = record.ids[: record.num_prompt]
    return dataclasses.replace(
        found,
        field=_field_at(record, prompt, found.position, decode),
        field_before="" if other is None else _field_at(other, other.ids, found.position, decode),
        text=_around(prompt, found.position, decode),
        text_before="" if other is None else _around(other.ids, found.position, decode),
    )


def _around(ids: Ids, position: int, decode: Decode) -> str:
    return decode(ids[max(0, position - _BEFORE) : position + _AFTER].tolist())


def _field_at(record: RequestRecord, ids: Ids, position: int, decode: Decode) -> str:
    """Return the name of the request's field that contains a position of the prompt.

    The name is "template" before the first field and "answer" after the last one. For a prompt
    given as token ids, the name is "prompt".
    """
    if position >= record.num_prompt:
        return "answer" if position < len(ids) else ""
    if not record.asked.fields:
        return "prompt"
    begun = len(decode(ids[:position].tolist()))
    text = decode(ids[: position + _PROBE].tolist())
    found = (-1, "template")
    last_end = len(text)
    after = 0  # Messages are in order, but the template decides where to put the tools.
    for field in record.asked.fields:
        probe = field.text.strip()[:_PROBE]
        is_tool = field.name.startswith("tool ")
        place = text.find(probe, 0 if is_tool else after) if probe else -1
        if 0 <= place <= begun:
            found = max(found, (place, field.name))
            after = after if is_tool else place + len(probe)
            last_end = place + len(field.text.strip())
    closed = found[1] == record.asked.fields[-1].name and begun > last_end
    return "answer" if closed and not found[1].startswith("tool ") else found[1]


def tool_field(number: int, name: str) -> PromptField:
    """Return a prompt field for a tool. The tool's name is used to find it in the prompt."""
    return PromptField(f"tool {number} ({name})", f'"{name}"')
