"""Tests of the reasons why two prompts diverge, with a simulated tokenizer of one token per
character.
"""

import dataclasses

import numpy as np
import pytest

from kvboost_edge.config import GenerationMode
from kvboost_edge.engine.request.results import GenerationResult
from kvboost_edge.server.cache_report.diagnosis import (
    CAUSES,
    add_diverging_texts,
    diagnose,
    tool_field,
)
from kvboost_edge.server.cache_report.recent_requests import (
    PromptField,
    PromptInputs,
    RequestRecord,
)

BLOCK = 4
_PHASES = dict.fromkeys(
    ("tokenize", "queue", "lookup", "load", "probe", "repair", "prefill", "decode"), 0.0
)


def decode(ids):
    return "".join(chr(token) if token < 1000 else chr(token - 1000) * 2 for token in ids)


def record(text, asked=None, *, answer="", reasoning=0):
    ids = [ord(letter) for letter in text] if isinstance(text, str) else text
    made = RequestRecord(
        f"of {len(ids)}",
        asked or PromptInputs(),
        np.array([*ids, *map(ord, answer)], np.int32),
        len(ids),
    )
    made.num_reasoning = reasoning
    return made


def result(mine, cached, reason="first_seen", dropped=()):
    return GenerationResult(
        mode=GenerationMode.PREFIX_CACHE,
        prompt="",
        output_text="",
        output_token_ids=(),
        generated_tokens=0,
        finish_reason="stop",
        prompt_tokens=mine.num_prompt,
        cached_tokens=cached,
        kv_reuse_ratio=0.0,
        hit_tokens={"pool": cached},
        miss_reason=reason,
        ttft_ms=0.0,
        total_ms=0.0,
        tokens_per_sec=0.0,
        token_times_ms=(),
        phases={**_PHASES, "prefill": 1500.0},
        logprobs=None,
        seed=0,
        preemptions=0,
        evicted_from=dropped,
    )


def found(mine, other, cached=None, reason="first_seen", *dropped, block=BLOCK):
    return found_among(
        mine, [] if other is None else [other], cached, reason, *dropped, block=block
    )


def found_among(mine, others, cached=None, reason="first_seen", *dropped, block=BLOCK):
    """Return the diagnosis against several earlier requests, the longest common prefix first."""
    earlier = [(other, other.common(mine)) for other in others]
    common = max((common for _, common in earlier), default=0)
    cached = common // block * block if cached is None else cached
    options = {"block_size": block, "decode": decode, "thinks": "<think>"}
    made = diagnose(mine, earlier, result(mine, cached, reason, dropped), **options)
    assert made.cause in CAUSES
    named = [other for other in others if other.request_id == made.compared_with]
    return add_diverging_texts(made, mine, named[0] if named else None, decode)


TOOLS = PromptInputs(
    tuple(tool_field(n, name) for n, name in enumerate(("clock", "maps"))), ("clock", "maps")
)
CHAT = PromptInputs(
    (
        PromptField("message 0 (system)", "It is Tuesday."),
        PromptField("message 1 (user)", "Hello there"),
    )
)


def test_a_changed_system_message_is_named_with_both_texts():
    before = record("[s]It is Tuesday.[u]Hello there", CHAT)
    asked = PromptInputs(
        (
            PromptField("message 0 (system)", "It is Wednesday."),
            PromptField("message 1 (user)", "Hello there"),
        )
    )
    mine = record("[s]It is Wednesday.[u]Hello there", asked)
    made = found(mine, before)
    assert (made.cause, made.position, made.field) == ("changed_text", 9, "message 0 (system)")
    assert made.text.startswith("It is Wednesday")
    assert made.text_before.startswith("It is Tuesday")
    assert (made.compared_with, made.seconds, made.computed_tokens) == (
        before.request_id,
        1.5,
        mine.num_prompt - 8,
    )


SYSTEM = PromptField("message 0 (system)", "It is Tuesday. You are a clerk of the post office.")


@pytest.mark.parametrize(
    "question", ["Where is my letter?", "Hello", "Hello there, where is it?", "Hi", "x" * 100]
)
def test_another_question_after_the_same_prefix_is_other_message(question):
    before, mine = (
        record(
            f"[s]{SYSTEM.text}[u]{text}[a]",
            PromptInputs((SYSTEM, PromptField("message 1 (user)", text))),
        )
        for text in ("Hello there", question)
    )
    assert found(mine, before).cause == "other_message"
    told = f"[s]{SYSTEM.text}[u]Hello there[a]Good day.[u]"
    fields = (
        SYSTEM,
        PromptField("message 1 (user)", "Hello there"),
        PromptField("message 2 (assistant)", "Good day."),
    )
    before, mine = (
        record(f"{told}{text}[a]", PromptInputs((*fields, PromptField("message 3 (user)", text))))
        for text in ("And", question)
    )
    assert found(mine, before).cause == "other_message"


@pytest.mark.parametrize("question", ["Hello there", "clerk"])
def test_a_change_before_the_last_message_is_changed_text(question):
    """This holds also if the last message repeats earlier text or differs as well."""
    before = record(
        f"[s]{SYSTEM.text}[u]Hello there[a]",
        PromptInputs((SYSTEM, PromptField("message 1 (user)", "Hello there"))),
    )
    changed = SYSTEM.text.replace("Tuesday", "Wednesday")
    fields = (SYSTEM._replace(text=changed), PromptField("message 1 (user)", question))
    assert (
        found(record(f"[s]{changed}[u]{question}[a]", PromptInputs(fields)), before).cause
        == "changed_text"
    )
    assert found(record(f"[s]{changed}[u]{question}[a]"), before).cause == "changed_text", (
        "tokens alone must be enough for this cause"
    )


def test_a_prompt_without_a_common_prefix_is_first_seen():
    assert found(record("abcdefgh"), None).cause == "first_seen"
    assert found(record("abcdefgh"), record("xbcdefgh")).cause == "first_seen"


LONG = "It is long and stays as it was, to the last word of it."


def chat(system, question):
    """Return the record of a chat with one question, without a system message if that is empty."""
    fields = (
        PromptField("message 0 (system)", system),
        PromptField("message 1 (user)", question),
    )
    text = f"[s]{system}[u]{question}[a]" if system else f"[u]{question}[a]"
    return record(text, PromptInputs(fields if system else fields[1:]))


@pytest.mark.parametrize(
    ("before", "mine", "position"),
    [
        ("Today is Monday.", "Today is Friday.", 9),
        (f"Today is Monday. {LONG}", f"Today is Friday. {LONG}", 9),
        (f"2026-11-25. {LONG}", f"2026-12-01. {LONG}", 6),
        (f"At 11:05 it rains. {LONG}", f"At 11:20 it rains. {LONG}", 6),
    ],
)
@pytest.mark.parametrize("block", [4, 16, 64])
def test_a_change_within_the_first_block_is_found(block, before, mine, position):
    for made, start in (
        (found(record(mine), record(before), block=block), 0),
        (found(chat(mine, "Hi"), chat(before, "Hi"), block=block), 3),
        (found(chat(mine, "Hi"), chat(before, "And where?"), block=block), 3),
    ):
        assert (made.cause, made.position) == ("changed_text", position + start)
        assert made.text_before


@pytest.mark.parametrize(
    ("before", "mine"),
    [
        ("Name three rivers.", "Where is my letter?"),
        ("What is the capital of France?", "What did he write to his brother in 1889?"),
    ],
)
def test_unrelated_prompts_that_share_an_opening_are_first_seen(before, mine):
    assert found(chat("", mine), chat("", before), block=64).cause == "first_seen"
    made = found(record(mine), record(before), block=64)
    assert (made.cause, made.position, made.compared_with) == ("first_seen", 0, "")


@pytest.mark.parametrize("questions", [1, 100])
def test_a_longer_prefix_of_another_prompt_does_not_hide_a_change(questions):
    """The number of requests with that other prompt makes no difference."""
    long = f"Today is Friday. You are a clerk of the post office. {LONG}"
    others = [chat(long, f"Question {number}") for number in range(questions)]
    monday = chat("Today is Monday.", "Hello?")
    made = found_among(chat("Today is Friday.", "Hello?"), [*others, monday], block=64)
    assert (made.cause, made.position) == ("changed_text", len("[s]Today is "))
    assert made.compared_with == monday.request_id
    assert "Monday" in made.text_before


@pytest.mark.parametrize(
    ("before", "mine", "cause"),
    [
        ("Name three rivers.", "Where is my letter?", "other_message"),
        ("What is 2 + 2?", "What is the time?", "other_message"),
        (f"Today is Monday. {LONG}", f"Today is Friday. {LONG}", "other_message"),
        (f"Today is Monday. {2 * LONG}", f"Today is Friday. {2 * LONG}", "changed_text"),
    ],
)
def test_a_single_message_after_the_templates_own_text(before, mine, cause):
    made = [
        record(
            f"[s]You are a helpful assistant.[u]{text}[a]",
            PromptInputs((PromptField("message 0 (user)", text),)),
        )
        for text in (mine, before)
    ]
    assert found(*made, block=16).cause == cause


def test_an_evicted_first_block_is_reported_as_evicted():
    made = found(record("Today is Friday."), record("Today is Monday."), 0, "evicted", block=64)
    assert made.cause == "evicted"


def test_a_continued_conversation_is_new_text():
    before = record("[u]Hello there[a]", CHAT, answer="Good day[e]")
    made = found(record("[u]Hello there[a]Good day[e][u]And now?", CHAT), before)
    assert (made.cause, made.position) == ("new_text", len(before.ids))


def test_a_repeated_prompt_is_tail():
    before = record("[u]Hello there[a]", CHAT)
    assert found(record("[u]Hello there[a]", CHAT), before).cause == "tail"


def test_a_repeated_prompt_of_full_blocks_is_tail():
    # Quantized blocks cannot be rewritten, so the last block is computed again.
    before, mine = (record("[u]Hi there[a]!!", CHAT) for _ in range(2))
    assert found(mine, before, mine.num_prompt - BLOCK, "tail").cause == "tail"


TURN = "[u]Hello there[a]"  # 17 tokens


@pytest.mark.parametrize(
    ("text", "ends", "cached", "reason", "cause", "position"),
    [
        (f"{TURN}Good day[e][u]And?", (12, 24), 12, "first_seen", "private_tail", 12),
        (f"{TURN}Bye", (12, 16), 12, "first_seen", "private_tail", 12),
        (TURN, (12, 12), 12, "private_tail", "private_tail", 12),
        (TURN, (16, 16), 16, "tail", "tail", 17),
        (f"{TURN}Good day[e][u]And?", (16, 24), 4, "first_seen", "not_kept", 4),
        (f"[u]Hello Jane[a]{TURN}", (12, 24), 8, "first_seen", "changed_text", 9),
    ],
)
def test_tokens_that_are_not_shared_are_a_cause_of_their_own(
    text, ends, cached, reason, cause, position
):
    before, mine = record(TURN, CHAT, answer="Good day[e]"), record(text, CHAT)
    before.num_shareable, mine.num_shareable = ends
    made = found(mine, before, cached, reason)
    assert (made.cause, made.position) == (cause, position)


@pytest.mark.parametrize(
    ("reason", "cause", "tiers"),
    [
        ("evicted", "evicted", ("pool",)),
        ("evicted", "evicted", ("pool", "disk")),
        ("first_seen", "not_kept", ()),
    ],
)
def test_missing_blocks_have_the_engines_cause(reason, cause, tiers):
    before = record("[u]Hello there and everywhere", CHAT)
    made = found(record("[u]Hello there and everywhere!", CHAT), before, 4, reason, *tiers)
    assert (made.cause, made.position, made.evicted_from) == (cause, 4, tiers)
    assert found(record("abcdefgh"), None, 0, reason, *tiers).evicted_from == tiers, (
        "the tiers must be reported without an earlier request"
    )


@pytest.mark.parametrize(
    ("reason", "tiers"), [("first_seen", ()), ("evicted", ("disk",)), ("evicted", ("disk", "pool"))]
)
def test_blocks_lost_by_an_unload_are_evicted(reason, tiers):
    before, mine = (record(f"[u]Hello there and everywhere{end}", CHAT) for end in ("", "!"))
    mine.loading = before.loading + 1
    made = found(mine, before, 0, reason, *tiers)
    others = tuple(tier for tier in tiers if tier != "pool")
    assert (made.cause, made.evicted_from) == ("evicted", ("pool", *others))


def test_reordered_and_changed_tools_are_distinguished():
    before = record('{"clock"}{"maps"}[u]Hi', TOOLS)
    swapped = dataclasses.replace(
        record('{"maps"}{"clock"}[u]Hi'), asked=TOOLS._replace(tools=("maps", "clock"))
    )
    assert found(swapped, record('{"clock"}{"maps"}[u]Hi', TOOLS)).cause == "tool_order"
    longer = [
        f'Tools: {{"{one}"}}{{"{two}"}}[u]Hi' for one, two in (("clock", "maps"), ("maps", "clock"))
    ]
    before = record(longer[0], TOOLS)
    made = found(record(longer[1], TOOLS._replace(tools=("maps", "clock"))), before)
    assert (made.cause, made.field_before) == ("tool_order", "tool 0 (clock)")
    fewer = found(record('Tools: {"maps"}[u]Hi', TOOLS._replace(tools=("maps",))), before)
    assert fewer.cause == "tools"


def test_changed_template_variables_are_the_cause():
    before = record("[s]Think: on[u]Hello", CHAT._replace(settings='{"enable_thinking": true}'))
    mine = record("[s]Think: off[u]Hello", CHAT._replace(settings='{"enable_thinking": false}'))
    assert found(mine, before).cause == "template"


def test_stripped_reasoning_is_the_cause():
    before = record("[u]Hello there[a]", CHAT, answer="<think>Hm.</think>Good day", reasoning=18)
    made = found(record("[u]Hello there[a]Good day[u]And now?", CHAT), before)
    assert (made.cause, made.field_before) == ("thinking", "answer")
    begun = record("[u]Hello there[a]", CHAT, answer="Hm.</think>Good day", reasoning=11)
    made = found(record("[u]Hello there[a]Good day[u]And now?", CHAT), begun)
    assert made.cause == "thinking", "reasoning that the template begins must be recognized"
    twice = record("[u]Hello[a]<think>Hm.</think>Good day[u]And now?[a]", CHAT)
    assert (
        found(record("[u]Hello[a]Good day[u]And now?[a]Fine[u]!", CHAT), twice).cause == "thinking"
    )


def test_retokenized_text_is_the_cause():
    ids = [ord(letter) for letter in "[u]ballad"]
    mine = [*ids[:5], 1000 + ord("l"), *ids[7:]]  # "ll" as one token
    assert found(record(mine, CHAT), record(ids, CHAT)).cause == "retokenized"


@pytest.mark.parametrize("reason", ["bypassed", "not_started", ""])
def test_the_engines_own_reason_is_the_cause(reason):
    mine = record("[u]Hello")
    outcome = result(mine, 0, reason)
    made = diagnose(mine, [(mine, 8)], outcome, block_size=4, decode=decode, thinks="")
    assert made.cause == (reason or "none")


def test_the_changed_field_is_found_among_equal_messages():
    asked = PromptInputs(
        tuple(
            PromptField(f"message {number} (user)", text)
            for number, text in enumerate(("yes", "no", "yes"))
        )
    )
    before, mine = (record(f"[u]yes[u]no[u]yes{end}", asked) for end in ("!", "?"))
    assert found(mine, before).field == "message 2 (user)"


@pytest.mark.parametrize("compares", [True, False])
def test_a_missing_state_reports_hit_and_matched_tokens(compares):
    mine = record("It is Tuesday. Hello there")
    outcome = dataclasses.replace(result(mine, 8, "state"), matched_tokens=20)
    options = {"block_size": BLOCK, "decode": decode, "thinks": ""}
    earlier = [(record("It is Tuesday."), 14)]
    made = diagnose(mine, earlier, outcome, compares=compares, **options)
    assert (made.cause, made.hit_tokens, made.position) == ("state", {"pool": 8}, 20)
