"""Tests of thinking that clients drop from earlier turns: it is reported as a cause of cache
misses, and restored if allowed.
"""

from itertools import chain

import pytest

from helpers.engine.fake_runner import fake_engine
from helpers.server.cache_miss_cases import SYSTEM, app_of, ask
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.replay import thought_key

STRIPS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor "
    "%}<|assistant|><think>"
)
"""A template that opens the reasoning itself, and shows none of earlier turns."""


PRESERVES = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.reasoning_content and (loop.last or preserve_thinking) %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|special 259|>{% endfor %}<|assistant|>"""
"""A template that shows it if a variable says so; a turn ends as the model ends it."""


async def test_the_diagnosis_names_thinking_that_the_template_strips(speaker):
    with fake_engine(num_blocks=512, max_context=4000) as other:
        other.tokenizer.chat_template = STRIPS
        speaker.openings = ["<|assistant|><think>"]
        speaker.text = "I have to be polite to everybody.</think>Good day."
        async with app_of(other) as app:
            first = await ask(app, SYSTEM, "Hello!")
            second = await ask(app, SYSTEM, "Hello!", "Good day.", "And now?")
    assert (second["cause"], second["field"], second["field_before"]) == (
        "thinking",
        "message 2 (assistant)",
        "answer",
    )
    assert second["position"] == first["prompt_tokens"] - len("<think>")
    assert "I have to" in second["text_before"]
    assert "Good day.<|end|>" in second["text"]


THOUGHT = "<think>\nI have to be polite to everybody.\n</think>\n\nGood day."


@pytest.mark.parametrize("normalise", [("thinking",), ()])
@pytest.mark.parametrize("variable", [None, True, False])
async def test_stored_thinking_is_restored_if_the_template_preserves_it(
    spoken_engine, speaker, normalise, variable
):
    """Thinking that a client drops from the model's turns is a cache hit, unless the client or the
    server turns this off.
    """
    spoken_engine.tokenizer.chat_template = PRESERVES
    speaker.text = THOUGHT
    more = {} if variable is None else {"chat_template_kwargs": {"preserve_thinking": variable}}
    async with app_of(spoken_engine, normalise=normalise) as app:
        first = await ask(app, SYSTEM, "Hello!", **more)
        computed = first["prompt_tokens"] + len(THOUGHT)
        second = await ask(app, SYSTEM, "Hello!", "Good day.", "And now?", **more)
        edited = await ask(app, SYSTEM, "Hello!", "Good day!", "And now?", **more)
        third = await ask(
            app, SYSTEM, "Hello!", "Good day.", "And now?", "Good day.", "Well?", **more
        )
    preserved = bool(normalise) and variable is not False
    assert second["normalised"] == (["thinking"] if preserved else [])
    assert (second["cause"] == "new_text") == preserved
    assert (second["hit_tokens"]["pool"] >= computed - 16) == preserved
    if preserved:
        assert (edited["cause"], edited["normalised"]) == ("thinking", [])
        assert third["hit_tokens"]["pool"] >= second["prompt_tokens"] + len(THOUGHT) - 16
    else:
        assert second["cause"] == "thinking"


async def test_another_key_never_receives_stored_thinking(spoken_engine, speaker):
    spoken_engine.tokenizer.chat_template = PRESERVES
    speaker.text = THOUGHT
    async with app_of(spoken_engine, api_keys=("one", "two")) as app:
        app.headers["x-api-key"] = "one"
        await ask(app, SYSTEM, "Hello!")
        app.headers["x-api-key"] = "two"
        found = await ask(app, SYSTEM, "Hello!", "Good day.", "And now?")
    assert (found["normalised"], found["cause"]) == ([], "first_seen")


async def test_restored_thinking_uses_the_generated_token_ids(demo_engine):
    """The model may generate other ids than the tokenizer would. The next prompt contains the kept
    ids.
    """
    tokenizer = Tokenizer(
        demo_engine.tokenizer.codec, name="made", special_tokens={}, chat_template=PRESERVES
    )
    ids = list(chain.from_iterable(tokenizer.encode(letter, False) for letter in THOUGHT))
    assert ids != tokenizer.encode(THOUGHT, False)
    said = {
        "role": "assistant",
        "content": "Good day.",
        "reasoning_content": "I have to be polite to everybody.",
    }
    kept = {thought_key(said): ids}
    messages = [{"role": "user", "content": "Hello!"}, said, {"role": "user", "content": "And?"}]
    found = tokenizer.encode_chat(messages, True, {"preserve_thinking": True}, find_answer=kept.get)
    assert str(ids)[1:-1] in str(found)
