"""Tests of /infill with the requests of llama.vim and llama.vscode, taken from their 2026 sources."""

import json
import re
from pathlib import Path

import pytest

from helpers.engine.fake_runner import EOS_ID
from kvboost_edge.server.api.compat.llama_cpp import translate

VIM_FIELDS = [
    "content",
    *(
        f"timings/{phase}_{unit}"
        for phase in ("prompt", "predicted")
        for unit in ("n", "ms", "per_token_ms", "per_second")
    ),
    "truncated",
    "tokens_cached",
]
EXTRA = [
    {"text": "def f():\n", "time": [12, 345], "filename": "a.py"},
    {"text": "def g():\n", "time": 1764376000000, "filename": "b.py"},
]
VIM = {
    "id_slot": 0,
    "input_prefix": "x = 1\n",
    "input_suffix": "z = 3\n",
    "input_extra": EXTRA,
    "prompt": "y ",
    "n_predict": 1200,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
    "response_fields": VIM_FIELDS,
}
VIM_AHEAD = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE = {
    "id_slot": 0,
    "input_prefix": "x = 1\n",
    "input_suffix": "z = 3\n",
    "input_extra": EXTRA,
    "prompt": "y ",
    "n_predict": 128,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
}
VSCODE_AHEAD = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
LAYOUT = "Rmyproject\nFa.py\ndef f():\nFb.py\ndef g():\nFfilename\nPx = 1\ny Sz = 3\nM"


@pytest.fixture
def names(monkeypatch):
    """Infill tokens of the test model, which are single letters."""
    monkeypatch.setattr(translate, "_INFILL", (("missing", "b", "c"), ("P", "S", "M")))
    monkeypatch.setattr(translate, "_REPOSITORY", ("missing", "R"))
    monkeypatch.setattr(translate, "_FILE", ("F",))
    monkeypatch.setattr(translate, "_PADDING", ("Q",))


@pytest.fixture
def writer(speaker, names):
    """Scripted model that completes infill prompts with "= 2"."""
    speaker.openings = ("M",)
    speaker.text = "= 2"
    return speaker


async def ask(app, body, **more):
    answer = await app.post("/infill", json={**body, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_recorded_llama_vim_requests_are_answered(app, writer):
    ahead = await ask(app, VIM_AHEAD)
    assert ahead == {}
    answer = await ask(app, VIM)
    assert list(answer) == VIM_FIELDS
    assert (answer["content"], answer["truncated"]) == ("= 2", False)
    assert answer["timings/predicted_n"] == len("= 2") + 1
    shared = LAYOUT.index("P")
    assert answer["tokens_cached"] == shared // 16 * 16, (
        "the shared prefix must have been computed ahead"
    )


async def test_the_curl_command_in_the_editor_guide_works(app, writer):
    guide = (Path(__file__).parents[4] / "docs" / "how-to" / "editors.md").read_text("utf-8")
    (body,) = re.findall(r"8000/infill -H [^\n]*\n  -d '(.*?)'\n", guide, flags=re.DOTALL)
    answer = await ask(app, json.loads(body))
    assert answer["content"] == "= 2"


async def test_recorded_llama_vscode_requests_are_answered(app, writer):
    ahead = await ask(app, VSCODE_AHEAD)
    assert (ahead["content"], ahead["stop_type"], ahead["tokens_predicted"]) == ("", "limit", 0)
    answers = await ask(app, VSCODE, seed=5)
    assert [one["index"] for one in answers] == [0, 1, 2]
    assert {one["content"] for one in answers} == {"= 2"}
    assert [one["generation_settings"]["seed"] for one in answers] == [5, 6, 7]
    assert (await ask(app, VSCODE, n_cmpl=1))["content"] == "= 2"
    refused = await app.post("/infill", json={**VSCODE, "stream": True})
    assert (refused.status_code, "n_cmpl=3" in refused.text) == (400, True)


async def test_the_infill_prompt_has_llama_cpps_layout(app, writer, monkeypatch):
    for extra, expected in (
        (EXTRA, LAYOUT),
        ([], "Rmyproject\nFfilename\nPx = 1\ny Sz = 3\nM"),
        ([{"text": "a"}], "Rmyproject\nFtmp\naFfilename\nPx = 1\ny Sz = 3\nM"),
    ):
        answer = await ask(app, VIM, input_extra=extra, response_fields=["prompt", "none/x"])
        assert answer == {"prompt": expected}
    monkeypatch.setattr(translate, "_FILE", ())
    snippet = "\n\n--- snippet ---\n\n"
    answer = await ask(app, VIM, response_fields=[])
    texts = "".join(f"{snippet}{one['text']}" for one in EXTRA)
    assert answer["prompt"] == f"Rmyproject\n{texts}Px = 1\ny Sz = 3\nM"


async def test_special_tokens_in_files_are_encoded_as_text(app, writer):
    tokenizer = app.engine.tokenizer
    (special,) = (
        text
        for text in tokenizer.codec.special_texts()[0]
        if tokenizer.codec.token_id(text) == EOS_ID
    )
    fields = {
        "input_prefix": special,
        "input_suffix": special,
        "input_extra": [{"text": special, "filename": special}],
    }
    answer = await ask(app, VIM, **fields, response_fields=["prompt", "tokens_evaluated"])
    assert answer["prompt"].count(special) == 4
    assert answer["tokens_evaluated"] == len(answer["prompt"])


async def test_an_infill_token_ends_the_answer(app, writer):
    for letter in "RFQ":
        writer.text = f"= 2{letter} and more"
        answer = await ask(app, VIM, response_fields=[])
        assert (answer["content"], answer["stop_type"]) == ("= 2", "eos")
    answer = await ask(app, VIM, ignore_eos=True, n_predict=9, response_fields=[])
    assert (answer["content"], answer["stop_type"]) == ("= 2Q and ", "limit")


async def test_the_oldest_extra_texts_are_dropped_if_they_do_not_fit(app, writer):
    """The number of dropped texts does not depend on the typed text."""
    extra = [{"text": letter * 3000, "filename": letter} for letter in "abc"]
    for typed in ("", "y", "y " * 100):
        answer = await ask(app, VIM, input_extra=extra, prompt=typed, response_fields=[])
        assert answer["kvboost"]["dropped_messages"] == 2
        assert answer["prompt"].startswith("Rmyproject\nFc\nccc")
        assert "b" * 9 not in answer["prompt"]
    local = {"input_prefix": "x" * 5000, "response_fields": []}
    answer = await ask(app, VIM, input_extra=extra, **local)
    assert answer["kvboost"]["dropped_messages"] == 3
    assert answer["prompt"].startswith("Rmyproject\nFfilename\nPxxx")
    for long in ({"input_prefix": "x" * 9000}, {"input_suffix": "x" * 9000}):
        answer = await app.post("/infill", json={**VIM, **long})
        assert answer.status_code == 400
        assert re.search(
            r"the prompt \(input_prefix, prompt and input_suffix\) has 9\d{3} tokens, .* the "
            "model's context is 8000 tokens",
            answer.json()["error"]["message"],
        )
    extra = [{"text": "x" * 2**20}, {"text": "x"}]
    answer = await app.post("/infill", json={**VIM, "input_extra": extra})
    assert (answer.status_code, "at most 1048576" in answer.text) == (400, True)


async def test_extra_texts_leave_room_for_an_answer_without_n_predict(app, writer):
    body = {"input_prefix": "x" * 3000, "input_suffix": "", "temperature": 0}

    async def answer(size):
        extra = [{"text": "a" * size, "filename": "a"}]
        answer = await app.post("/infill", json={**body, "input_extra": extra})
        assert answer.status_code == 200, answer.text
        return answer.json()

    size = 100 + 8000 - (await answer(100))["tokens_evaluated"]
    assert (await answer(size - 1))["tokens_evaluated"] == 7999
    full = await answer(size)  # the text fills the context and is left out
    assert full["tokens_evaluated"] == 8000 - size - len("Fa\n")
    assert full["kvboost"]["dropped_messages"] == 1


@pytest.mark.parametrize("path", ["/infill", "/completion"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.some(3)
async def test_n_indent_and_time_limits_end_the_answer(app, writer, path, streams):
    body = {"prompt": "x M"} if path == "/completion" else {**VIM, "response_fields": []}

    async def said(**more):
        """Return the text and the reason why it ended."""
        answer = await app.post(path, json={**body, "stream": streams, **more})
        assert answer.status_code == 200, answer.text
        if not streams:
            return answer.json()["content"], answer.json()["stop_type"]
        events = [
            json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-1]
        ]
        return "".join(event["content"] for event in events), events[-1]["stop_type"]

    writer.text = "a\n  b\n c\n  d"
    assert await said(n_indent=0) == await said(n_indent=1) == (writer.text, "eos")
    assert await said(n_indent=2) == ("a\n  b\n ", "limit")
    assert await said(n_indent=2, stop=["b"]) == ("a\n  ", "word")
    writer.text = "word\n" * 40  # 200 steps take more than a millisecond
    for limit in (-1, 0, 60_000):
        assert await said(t_max_predict_ms=limit) == (writer.text, "eos")
    text, ended = await said(t_max_predict_ms=1)
    assert (text.replace("word\n", ""), ended) == ("", "limit")
    assert len(text) < len(writer.text)


async def test_response_fields_select_the_last_stream_event(app, writer):
    answer = await app.post("/infill", json={**VIM, "stream": True})
    *_, last = answer.text.strip().split("\n\n")
    assert list(json.loads(last.removeprefix("data: "))) == VIM_FIELDS
