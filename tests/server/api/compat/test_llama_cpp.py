"""Tests of features specific to llama.cpp's routes: prompts of ids, settings, infill, templates and
slots.
"""

import dataclasses

import pytest

from helpers.engine.fake_hybrid import hybrid_parts
from helpers.engine.fake_runner import fake_parts
from helpers.server.compat_apis import APIS
from helpers.server.live_servers import app_client
from helpers.server.scripted_model import ASK, TOOLS
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.server.api.compat.llama_cpp import translate
from kvboost_edge.server.app import create_app
from kvboost_edge.server.settings import ServerSettings

API = APIS["/completion"]
TURN = "<|assistant|>"


async def ask(app, **more):
    return await API.ask(app, {**API.body(), **more})


async def test_return_tokens_returns_token_ids(app, speaker):
    whole = await ask(app)
    assert (whole["prompt"], whole["truncated"], len(whole["tokens"])) == (
        TURN,
        False,
        len("Good day.") + 1,
    )
    assert (await ask(app, return_tokens=None))["tokens"] == []
    assert (await ask(app, n_predict=-1))["content"] == "Good day."


async def test_stop_type_and_stopping_word_name_the_end(app, speaker):
    word = ({"stop": ["day"]}, ("word", "day"))
    for more, ended in (({}, ("eos", "")), ({"n_predict": 3}, ("limit", "")), word):
        answer = await ask(app, **more)
        assert (answer["stop_type"], answer["stopping_word"]) == ended


@pytest.mark.parametrize("path", ["/completion", "/infill"])
async def test_an_answer_whose_n_predict_exceeds_the_context_fills_it(
    app, speaker, spoken_engine, monkeypatch, path
):
    monkeypatch.setattr(translate, "_INFILL", (("P", "S", "M"),))
    speaker.openings = ("M",)
    speaker.text = "x" * 9000
    context = spoken_engine.runner_info.max_context

    async def answer(size):
        prompts = {
            "/completion": {"prompt": "y" * (size - 1) + "M"},
            "/infill": {"input_prefix": "y" * (size - 3), "input_suffix": ""},
        }
        return await app.post(path, json={**prompts[path], "n_predict": 4096, "temperature": 0})

    full = (await answer(context - 10)).json()
    counted = (full["tokens_evaluated"], full["tokens_predicted"], full["stop_type"])
    assert counted == (context - 10, 10, "limit")
    assert full["content"] == "x" * 10
    refused = await answer(context)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, 400)
    assert f"has {context} tokens" in refused.json()["error"]["message"]


async def test_a_prompt_may_mix_token_ids_and_texts(app, speaker):
    ids = (await app.post("/tokenize", json={"content": TURN})).json()["tokens"]
    assert len(ids) == len(TURN)
    for prompt in (ids, [*ids[:3], TURN[3:]], [TURN]):
        answer = await ask(app, prompt=prompt)
        assert (answer["content"], answer["prompt"]) == ("Good day.", TURN)
    hot = await ask(app, prompt=["x" * 64, *ids])
    assert hot["tokens_evaluated"] > hot["tokens_cached"]
    again = await ask(app, prompt=["x" * 64, *ids])
    assert again["tokens_cached"] >= 64 - 16
    assert (await ask(app, prompt=["x" * 64, *ids], cache_prompt=False))["tokens_cached"] == 0


async def test_several_prompts_are_answered_by_a_list(app, speaker):
    """As in llama.cpp, only a list that contains token ids is one prompt."""
    speaker.openings = ("A", "B")
    speaker.text = "Good day."
    ids = (await app.post("/tokenize", json={"content": "xB"})).json()["tokens"]
    prompts = ["hello A", ids, ["y", *ids], "A"]
    answers = await ask(app, prompt=prompts, n_cmpl=2, n_predict=4)
    texts = ["hello A", "xB", "yxB", "A"]
    assert [one["prompt"] for one in answers] == [text for text in texts for _ in range(2)]
    assert [one["index"] for one in answers] == list(range(8))
    assert {one["content"] for one in answers} == {"Good"}
    assert [one["tokens_evaluated"] for one in answers[::2]] == [len(text) for text in texts]
    assert (await ask(app, prompt=["hello A"]))["prompt"] == "hello A"


async def test_generation_settings_are_those_used(app, speaker):
    settings = (await ask(app, temperature=0.5, top_k=12, seed=7))["generation_settings"]
    assert (settings["seed"], settings["temperature"], settings["top_k"]) == (7, 0.5, 12)


async def test_a_grammar_constrains_the_answer(app, speaker):
    assert (await ask(app, grammar='root ::= "yes"', n_predict=60))["content"] == "yes"


async def test_infill_uses_the_models_prefix_suffix_and_middle_tokens(app, speaker, monkeypatch):
    fields = {"input_prefix": "def f(", "input_suffix": "): pass", "prompt": "a", "n_predict": 2}
    answer = await app.post("/infill", json=fields)
    assert (answer.status_code, "no tokens for infill" in answer.json()["error"]["message"]) == (
        400,
        True,
    )
    # These are letters because all tokens of this model's vocabulary are letters.
    monkeypatch.setattr(translate, "_INFILL", (("missing", "b", "c"), ("P", "S", "M")))
    answer = await app.post("/infill", json=fields)
    assert (answer.status_code, answer.json()["prompt"]) == (200, "Pdef f(aS): passM")


async def test_apply_template_equals_the_chat_prompt(app):
    for more in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}):
        text = (await app.post("/apply-template", json={"messages": ASK, **more})).json()["prompt"]
        ids = (await app.post("/tokenize", json={"messages": ASK, **more})).json()["tokens"]
        assert (await app.post("/detokenize", json={"tokens": ids})).json()["content"] == text
        assert ("weather" in text.split("And the")[0]) == ("tools" in more)


async def test_slots_require_the_admin_key_if_there_are_several_keys(app, keyed_app):
    slots = (await app.get("/slots")).json()
    assert len(slots) == (await app.get("/props")).json()["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    refused = await keyed_app.get("/slots", headers={"Authorization": "Bearer first-key"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, 403)


@pytest.mark.parametrize(
    ("runner", "speculation", "num_draft_rows", "speculates"),
    [
        ("native", "auto", None, True),
        ("native", "off", None, False),
        ("torch", "auto", None, False),
        ("torch", "on", None, True),
        ("native", "auto", 0, False),
        ("native", "auto", 4, True),
    ],
)
async def test_props_and_slots_state_whether_requests_use_draft_tokens(
    runner, speculation, num_draft_rows, speculates
):
    """A hybrid has draft rows, whose number is 0 if memory does not suffice."""

    def build(config):
        parts = (
            fake_parts() if num_draft_rows is None else hybrid_parts(num_draft_rows=num_draft_rows)
        )
        parts.runner.info = dataclasses.replace(parts.runner.info, name=runner)
        return parts

    config = EngineConfig(speculation=speculation, reuse_gate="off")
    with CPUPagedEngine._built_by(build, config) as engine:
        async with app_client(create_app(engine, ServerSettings(model_name="fake"))) as app:
            props = (await app.get("/props")).json()["default_generation_settings"]
            slots = (await app.get("/slots")).json()
    assert {props["speculative"], *(one["speculative"] for one in slots)} == {speculates}
