"""Reasoning budgets: a thought is cut after exactly its number of tokens, and the answer follows."""

import itertools
import json
import random

import numpy as np
import pytest

from helpers.engine import fake_runner
from helpers.engine.fake_runner import Bench, assert_clean, fake_tokenizer, token_logits
from helpers.engine.thinking_model import ANSWER, ASK, KINDS, OPENED, THOUGHT, thinking
from helpers.pairwise import each_once
from helpers.server.scripted_model import FORMATS, scripted
from kvboost_edge.engine.request.requested_grammar import MadeGrammar
from kvboost_edge.engine.thinking import ReasoningFields
from kvboost_edge.errors import RequestError
from kvboost_edge.text.turns.call_grammar import answer_grammar
from kvboost_edge.text.turns.thinking import ReasoningLimit, reasoning_end

EVERY = pytest.mark.parametrize("name", KINDS)
REPEATED = THOUGHT * 20
MANY = 400


def parts_of(engine, thinker, name, result):
    """Split an output into thought and answer, and check its markers."""
    kind = KINDS[name]
    text = engine.tokenizer.decode(result.output_token_ids, False)
    opener = "" if name == "opened" else kind.opener
    assert text.startswith(opener)
    thought, closed, answer = text.removeprefix(opener).partition(kind.closer)
    assert closed
    for end in thinker._ends:
        answer = answer.removesuffix(engine.tokenizer.decode([end], False))
    return thought.removesuffix("\n"), answer.lstrip("\n")


@pytest.mark.parametrize(("name", "budget"), each_once(KINDS, [0, 1, 2, 17, 40]))
def test_reasoning_is_cut_at_exactly_the_budget(monkeypatch, name, budget):
    with thinking(monkeypatch, name) as (engine, thinker):
        result = engine.generate(ASK, MANY, reasoning_budget=budget)
        assert parts_of(engine, thinker, name, result) == (
            REPEATED[:budget],
            KINDS[name].answer.format(ANSWER),
        )
        assert (result.finish_reason, result.reasoning_tokens) == ("stop", budget)


@EVERY
def test_the_budget_message_precedes_the_closing_marker(monkeypatch, name):
    """Special tokens in the message are plain text, so it ends no turn."""
    message = " <|special 259|>Enough."
    with thinking(monkeypatch, name) as (engine, thinker):
        result = engine.generate(ASK, MANY, reasoning_budget=9, reasoning_budget_message=message)
        thought, answer = parts_of(engine, thinker, name, result)
        assert (thought, answer) == (THOUGHT[:9] + message, KINDS[name].answer.format(ANSWER))
        assert (result.finish_reason, result.reasoning_tokens) == ("stop", 9)


@pytest.mark.parametrize(("name", "budget"), each_once(KINDS, [None, -1, 25, 300]))
def test_reasoning_within_the_budget_is_unchanged(monkeypatch, name, budget):
    with thinking(monkeypatch, name) as (engine, thinker):
        thinker.thinks = 12
        own = engine.generate(ASK, MANY)
        found = engine.generate(ASK, MANY, reasoning_budget=budget)
        assert found.output_token_ids == own.output_token_ids
        assert found.reasoning_tokens == (12 if (budget or 0) > 0 else None)


def test_a_partial_closing_marker_is_completed(monkeypatch):
    """Each budget ends inside another part of the closing marker."""
    with thinking(monkeypatch, "letters") as (engine, thinker):
        thinker.thinks = 5
        for budget in range(5, 14):
            result = engine.generate(
                ASK, MANY, reasoning_budget=budget, reasoning_budget_message="Enough."
            )
            thought, answer = parts_of(engine, thinker, "letters", result)
            assert (thought, answer) == (THOUGHT[:5] + "Enough." * (budget == 5), ANSWER)


@pytest.mark.parametrize("name", ["markers", "opened", "gemma", "harmony"])
@pytest.mark.parametrize("again", ["opener", "closer"])
@pytest.mark.some(3)
def test_no_second_reasoning_block_follows_a_cut(monkeypatch, name, again):
    """A model that would think on, or write the closing marker once more, answers."""
    with thinking(monkeypatch, name) as (engine, thinker):
        kind = KINDS[name]
        if name == "harmony":
            thinker.answers = [f"{kind.opener}Still{kind.closer}", *thinker.answers]
        else:
            marker = getattr(kind, again).strip()
            thinker.answers = [f"{marker}\n\nFine.", *thinker.answers]
        result = engine.generate(ASK, MANY, reasoning_budget=4)
        thought, answer = parts_of(engine, thinker, name, result)
        assert (thought, answer) == (THOUGHT[:4], kind.answer.format(ANSWER))


def test_the_answer_may_name_the_markers(monkeypatch):
    with thinking(monkeypatch, "markers") as (engine, thinker):
        thinker.answers = ["It is <think> and </think>."]
        result = engine.generate(ASK, MANY, reasoning_budget=4)
        assert parts_of(engine, thinker, "markers", result) == (THOUGHT[:4], thinker.answers[0])


@pytest.mark.parametrize("name", ["opened", "harmony"])
@pytest.mark.parametrize("message", ["", "Enough."])
@pytest.mark.some(3)
def test_reasoning_leaves_room_for_an_answer(monkeypatch, name, message):
    """A budget above the limit of the output never fills the output with reasoning."""
    with thinking(monkeypatch, name, max_context=400) as (engine, thinker):
        kind = KINDS[name]
        before = 0 if name == "opened" else len(thinker.ids(kind.opener))
        behind = len(reasoning_end(engine.tokenizer, message).with_message)
        for most in (45, 60):
            result = engine.generate(
                ASK, most, reasoning_budget=500, reasoning_budget_message=message
            )
            lead = len(thinker.ids(kind.answer.format("")))
            room = most - before - behind - lead - 1
            assert result.reasoning_tokens == room
            assert parts_of(engine, thinker, name, result)[0] == REPEATED[:room] + message
            assert result.generated_tokens == most
        context = engine.generate(ASK, None, reasoning_budget=10**6)
        assert parts_of(engine, thinker, name, context)[1]


@pytest.mark.parametrize("name", ["opened", "harmony"])
def test_the_next_turn_hits_all_tokens(monkeypatch, name):
    with thinking(monkeypatch, name) as (engine, _):
        prompt = engine.tokenizer.encode_chat(ASK)
        first = engine.generate(
            prompt, MANY, reasoning_budget=30, reasoning_budget_message="Enough."
        )
        whole = [*prompt, *first.output_token_ids]
        second = engine.generate([*whole, *range(40, 60)], 1)
        assert second.cached_tokens == (len(whole) - 1) // 16 * 16


@pytest.mark.parametrize("name", ["letters", "gemma"])
def test_a_tool_call_within_reasoning_is_not_cut(monkeypatch, name):
    """The tokens of the call do not count towards the budget."""
    call = FORMATS["hermes" if name == "letters" else name].calls([("clock", {})])
    with thinking(monkeypatch, name) as (engine, thinker):
        thinker.thought = f"abcd{call}" + "e" * 1000
        # The call begins with the last token of its marker and ends before its own last token.
        marker = len("<tool_call>" if name == "letters" else "<|tool_call>")
        for budget, thought in (
            (3, "abc"),
            (4 + marker, f"abcd{call}"),
            (7 + marker, f"abcd{call}eee"),
        ):
            result = engine.generate(ASK, 900, reasoning_budget=budget)
            assert parts_of(engine, thinker, name, result) == (thought, ANSWER)
            assert result.reasoning_tokens == budget


@pytest.mark.parametrize("name", ["markers", "gemma", "harmony"])
def test_each_turn_after_a_tools_result_has_its_own_budget(monkeypatch, name):
    call = {"name": "clock", "arguments": {}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "123456789", "type": "function", "function": call}],
    }
    result = {"role": "tool", "tool_call_id": "123456789", "name": "clock", "content": "Ten."}
    with thinking(monkeypatch, name) as (engine, thinker):
        found = engine.generate([*ASK, called, result], MANY, reasoning_budget=6)
        thought, answer = parts_of(engine, thinker, name, found)
        assert (thought, answer) == (THOUGHT[:6], KINDS[name].answer.format(ANSWER))


@pytest.mark.parametrize("name", ["opened", "markers", "letters", "harmony"])
def test_a_budget_and_a_grammar_combine(monkeypatch, name):
    schema = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"]}
    kind = KINDS[name]
    with thinking(monkeypatch, name) as (engine, thinker):
        thinker.answers = [kind.answer.format('{"n": 7}')]
        tokenizer = engine.tokenizer
        state = "opened" if name == "opened" else "possible"
        grammar = MadeGrammar(
            answer_grammar(
                tokenizer.turn_format, schema, reasoning=state, special_id=tokenizer.marker_id
            )
        )
        for speculation, message in itertools.product(("off", "on"), ("", "Enough.")):
            result = engine.generate(
                ASK,
                MANY,
                grammar=grammar,
                reasoning_budget=11,
                reasoning_budget_message=message,
                speculation=speculation,
            )
            thought, answer = parts_of(engine, thinker, name, result)
            assert thought == THOUGHT[:11] + message
            assert json.loads(answer.rpartition(">")[2]) == {"n": 7}


# -- a model with prescribed outputs --

CLOSER = "</think>"


def limit(budget, message=""):
    """Return the limit for prompts that end in "<think>"."""
    tokenizer = fake_tokenizer()
    tokenizer.chat_template = OPENED
    end = reasoning_end(tokenizer, message)
    return ReasoningLimit(budget, tokenizer.turn_format, "opened", end)


def expected(prompt, count, found):
    """Compute the greedy output with a limit, without an engine. With these seeds no closing marker
    occurs by chance.
    """
    ids = list(prompt)
    forced = list(found.end.with_message)
    for number in range(count):
        behind = number - found.budget
        ids.append(
            forced[behind] if 0 <= behind < len(forced) else int(np.argmax(token_logits(ids)))
        )
    return ids[len(prompt) :]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.some(2)
def test_budgets_are_exact_with_batches_and_drafts(seed):
    """Small pools cause preemptions. Drafts that cross the cut are rejected there."""
    rng = random.Random(seed)
    bench = Bench(rng.choice((10, 12, 64)), max_batch_tokens=rng.choice((3, 17, 64)))
    asked = []
    for number in range(8):
        prompt = [*range(20 + number, 20 + rng.randrange(number + 1, 40)), 7, 8]
        found = limit(rng.randrange(0, 30), rng.choice(("", "So.")))
        count = rng.randrange(found.budget + len(found.end.with_message) + 1, 70)
        terms = {"reasoning": found}
        if rng.random() < 0.7:
            terms |= {"max_draft_tokens": rng.choice((1, 5, 31)), "always_drafts": True}
        handle = bench.submit(prompt, count, terms=terms, tenant="ab"[number % 2])
        asked.append((handle, prompt, count, found))
        for _ in range(rng.randrange(5)):
            bench.step()
    bench.run()
    for handle, prompt, count, found in asked:
        result = handle.result(0)
        assert list(result.output_token_ids) == expected(prompt, count, found)
        assert result.reasoning_tokens == found.budget
    assert bench.manager.free_block_count == bench.manager.num_blocks


def test_forced_tokens_are_drafted():
    bench = Bench()
    found = limit(5, "I have thought about it for long enough.")
    terms = {"reasoning": found, "max_draft_tokens": 31, "always_drafts": True}
    result = bench.submit(list(range(30)), 60, terms=terms)
    bench.run()
    answer = result.result(0)
    assert answer.accepted_tokens >= len(found.end.with_message) - 1
    assert len(bench.runner.batches) < 60 - 20


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5, "seed": 3},
        {"temperature": 1.0, "top_p": 0.3, "top_k": 3, "min_p": 0.5, "seed": 1},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logprobs": 2},
    ],
    ids=["sampled", "filtered", "penalties", "logprobs"],
)
def test_sampling_does_not_change_forced_tokens(options):
    bench = Bench()
    found = limit(5, "So.")
    banned = dict.fromkeys(found.end.with_message, -100.0)
    handle = bench.submit(
        list(range(30)), 40, terms={"reasoning": found}, logit_bias=banned, **options
    )
    bench.run()
    result = handle.result(0)
    size = len(found.end.with_message)
    assert result.output_token_ids[5 : 5 + size] == found.end.with_message
    if result.logprobs is not None:
        ids = [*range(30), *result.output_token_ids[:5]]
        logits = token_logits(ids).astype(float)
        assert result.logprobs[5].logprob == pytest.approx(
            logits[result.output_token_ids[5]] - np.log(np.exp(logits).sum())
        )


def test_a_cancelled_request_releases_everything(monkeypatch):
    own = fake_runner.token_logits
    with thinking(monkeypatch, "opened") as (engine, _):
        handle = engine.submit(ASK, max_new_tokens=None, reasoning_budget=4000)
        next(iter(handle))
        handle.cancel()
        handle.result(30)
        monkeypatch.setattr(fake_runner, "token_logits", own)
        assert_clean(engine)


# -- refused requests --


def test_a_budget_without_effect_is_refused(monkeypatch):
    with scripted(monkeypatch, FORMATS["words"]) as (engine, _):
        with pytest.raises(RequestError, match=r"reasoning_budget needs the markers .* shows none"):
            engine.generate(ASK, 5, reasoning_budget=5)
        engine.generate(ASK, 5, reasoning_budget=-1)
        engine.tokenizer.chat_template = None
        with pytest.raises(RequestError, match="no chat template"):
            engine.generate([1, 2], 5, reasoning_budget=0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"reasoning_budget": 2.5}, "reasoning_budget"),
        ({"reasoning_budget": True}, "reasoning_budget"),
        ({"reasoning_budget_message": "So."}, "no effect without reasoning_budget"),
        ({"reasoning_budget": 1, "reasoning_budget_message": "x" * 1025}, "message"),
        ({"reasoning_budget": 1, "reasoning_budget_message": "a</think>"}, "contains '</think>'"),
        ({"reasoning_budget": 1, "reasoning_budget_message": "<think>"}, "contains '<think>'"),
        ({"reasoning_budget": 1, "reasoning_budget_message": "\ud800"}, "Unicode"),
        ({"reasoning_budget": 1, "max_new_tokens": 0}, "generates none"),
        *(
            ({"reasoning_budget": 1, **form}, "applies from the first token")
            for form in (
                {"regex": "a+"},
                {"choice": ("a",)},
                {"json_schema": {"type": "object"}},
                {"grammar": 'start: "a"'},
            )
        ),
    ],
)
def test_options_that_contradict_a_budget_are_refused(monkeypatch, options, problem):
    with thinking(monkeypatch, "markers") as (engine, _), pytest.raises(RequestError) as caught:
        engine.generate(ASK, **options)
    assert problem in str(caught.value)


def test_markers_of_channels_are_refused_in_a_message(monkeypatch):
    with thinking(monkeypatch, "harmony") as (engine, _):
        for marker in ("<|end|>", "<|return|>", "<|start|>assistant"):
            with pytest.raises(RequestError, match="a marker of the model's reasoning"):
                engine.generate(ASK, 5, reasoning_budget=1, reasoning_budget_message=f"a{marker}b")


def test_a_suppressed_closing_marker_is_refused(monkeypatch):
    with thinking(monkeypatch, "markers") as (engine, thinker):
        (closer,) = thinker.ids("</think>")
        features = engine._builder._features
        (feature,) = [one for one in features if isinstance(one, ReasoningFields)]
        feature._suppressed = frozenset({closer})
        with pytest.raises(RequestError, match=f"needs token {closer}, which"):
            engine.generate(ASK, 5, reasoning_budget=5)


def test_a_budget_has_no_effect_on_closed_reasoning(monkeypatch):
    """It has no effect even with an output format that applies from the first token."""
    with thinking(monkeypatch, "markers") as (engine, _):
        prompt = engine.tokenizer.encode_chat(ASK, True, {"enable_thinking": False})
        request = engine._builder.read(prompt, {"reasoning_budget": 3, "regex": "a+"})
        assert request.reasoning is None
