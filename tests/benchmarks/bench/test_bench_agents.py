"""Tests of the agent session benchmark: its model generates the scripted text, responses are
parsed, and limits are checked.
"""

from argparse import Namespace

import gguf
import pytest

from benchmarks.bench.bench_agents import (
    LlamaCpp,
    Ours,
    Seen,
    cold_of,
    rows_of,
    summary,
    taken_apart,
)
from benchmarks.bench.bench_server import own_command
from benchmarks.data.agent_model import TEMPLATE, Vocabulary, write_agent_model
from benchmarks.data.agent_sessions import CALL, CONTENT, QUICK, THOUGHT, Answer, Request, texts
from benchmarks.data.shapes import Shape
from kvboost_edge import CPUPagedEngine

SPOKEN = f'<think>{THOUGHT}</think>\n\n{CONTENT}<tool_call>{{"name": "{CALL[0]}", "arguments": {CALL[1]}}}</tool_call>'


@pytest.mark.parametrize("asked", ["Hello.", "the of a to " * 40, "<think>Hm</think>\n\nno:"])
def test_the_model_says_the_written_answer_and_ends(tmp_path, asked):
    path = tmp_path / "model.gguf"
    write_agent_model(path, Shape(256, 4, 4, 2, 512, vocab=4096, context=4096), texts(QUICK))
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    with CPUPagedEngine.from_pretrained(str(path), num_blocks=64) as engine:
        result = engine.generate(prompt, 60, temperature=0)
    assert result.output_text == SPOKEN
    assert result.finish_reason == "stop"


def test_a_file_has_its_template_and_tokens_of_its_texts(tmp_path):
    path = tmp_path / "model.gguf"
    said = texts(QUICK)
    write_agent_model(path, Shape(256, 1, 4, 2, 512, vocab=4096, context=4096), said)
    fields = gguf.GGUFReader(path).fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 4096
    assert tokens[: len(Vocabulary(said).tokens)] == Vocabulary(said).tokens
    assert {"Ġmodule", "Ġfunction", "<|im_end|>", "<tool_call>"} <= set(tokens)


def test_our_server_does_not_speculate_like_the_peers(tmp_path):
    options = Namespace(capacity=1024, threads=2, kv_cache_bits="16")
    agents = Ours(tmp_path / "model.gguf", tmp_path, options).command
    for command in (agents, own_command(tmp_path / "model.gguf", 8000, options)):
        assert command[command.index("--speculation") + 1] == "off"


def test_an_answer_of_one_text_is_taken_apart():
    assert taken_apart(SPOKEN) == (CONTENT, THOUGHT, CALL)
    assert taken_apart("<think>They want") == ("<think>They want", "", ("", ""))


def test_cold_times_between_those_measured():
    assert cold_of({1: 10.0, 3: 14.0}, {1: 100, 2: 150, 3: 300}) == {1: 10.0, 2: 11.0, 3: 14.0}
    assert cold_of({}, {1: 100}) == {}


def run(firsts, computed, colds):
    done = [
        (
            Request("turn", turn, {}, ("billing",) if turn > 1 else (), restart=turn == 3),
            Seen(first, first + 1, THOUGHT, Answer(), prompt_tokens=100 * turn, computed=count),
        )
        for turn, (first, count) in enumerate(zip(firsts, computed, strict=True), 1)
    ]
    return {"done": done, "seconds": sum(firsts), "starts": [1.0, 2.0], "colds": colds}


@pytest.mark.parametrize(
    ("firsts", "computed", "met"),
    [
        ([10.0, 1.0, 2.0], [10, 5, 5], {"computed": True, "turn": True, "restart": True}),
        ([10.0, 2.0, 1.0], [10, 5, 5], {"computed": True, "turn": False, "restart": True}),
        ([10.0, 1.0, 3.0], [10, 5, 6], {"computed": False, "turn": True, "restart": False}),
    ],
)
def test_bars(firsts, computed, met):
    runs = {
        Ours.label: [run(firsts, computed, {1: 10.0, 3: 12.0})],
        LlamaCpp.label: [run([20.0, 20.0, 20.0], [60, 70, 70], {})],
    }
    rows = rows_of(runs)
    assert [row["cold_s"] for row in rows] == [10.0, 11.0, 12.0]
    assert [row["x_cold"] for row in rows] == pytest.approx(
        [a / b for a, b in zip(firsts, (10, 11, 12), strict=True)]
    )
    assert [row["peer_computed"] for row in rows] == [60, 70, 70]
    found = summary(runs, rows)
    assert {name: bar["met"] for name, bar in found["bars"].items()} == met
    assert found["bars"]["computed"]["reached"] == pytest.approx(sum(computed) / 200)
    assert found["servers"][Ours.label]["written_answers"] == "3 of 3"


def test_rounds_give_medians_and_one_server_alone_no_comparison():
    runs = {
        Ours.label: [
            run([10.0, one, 2.0], [10, 5, 5], {1: 10.0, 3: 12.0}) for one in (1.0, 3.0, 2.0)
        ]
    }
    rows = rows_of(runs)
    assert rows[1]["ttft_s"] == 2.0
    assert set(summary(runs, rows)["bars"]) == {"turn", "restart"}
