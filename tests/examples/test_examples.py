"""Tests of the programs and the notebook in examples/, run as by a new user: offline, with the
bundled model.
"""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from helpers.models.embedding_models import make_embedding_model
from helpers.models.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
END_OF_CELL = "=== end of the cell ==="
ALL_NAMES = {
    "batch.py",
    "chat.py",
    "persistent_cache.py",
    "rag.py",
    "structured_output.py",
    "tools.py",
    "tour.ipynb",
}


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Function that runs a program with arguments and returns its standard output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the server that tools.py starts
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")  # argparse wraps names at hyphens

    def main(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return main


def test_the_page_lists_every_example():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert names == set(re.findall(r"^\| \[([\w.]+)\]", page, flags=re.MULTILINE)) == ALL_NAMES


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_help_names_the_model_and_its_default(path, run, capsys):
    with pytest.raises(SystemExit) as ended:
        run(path.name, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "directory, GGUF file or hub id (default: kvboost-edge/demo)" in text
    assert path.read_text(encoding="utf-8").split('"""')[1].split(".")[0] in text


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_given_model_is_used(path, run, tmp_path):
    missing = tmp_path / "missing.gguf"
    with pytest.raises((Exception, SystemExit), match=r"missing\.gguf"):
        run(path.name, "--model", missing)


def test_chat_finds_earlier_turns_in_the_cache(run):
    questions = ("What is the colour of Teamar boat?", "What is the pet of Dibel Korr?")
    first, first_cached, second, second_cached = run("chat.py", *questions).splitlines()
    assert (first.strip(), second.strip()) == (
        "The colour of Teamar boat is blue.",
        "The pet of Dibel Korr is owl.",
    )
    before, prompt = _figures(first_cached)
    cached, _ = _figures(second_cached)
    assert before == 0
    assert cached >= prompt


def test_chat_reads_questions_from_the_keyboard(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the colour of Teamar boat?\n"))
    assert "The colour of Teamar boat is blue." in run("chat.py")


def test_a_batch_computes_the_document_once(run):
    without, cached, *answers = run("batch.py").splitlines()
    assert _figures(without)[0] > 3.5 * _figures(cached)[0]
    assert [answer.rpartition(" ")[2] for answer in answers] == [
        "bronze.",
        "August.",
        "running.",
        "lead.",
    ]


def test_the_persistent_cache_answers_after_a_restart(run, tmp_path):
    for on_disk in (False, True):
        first, again, answer = run(
            "persistent_cache.py", "--cache-dir", tmp_path / "b"
        ).splitlines()
        found = _figures(first)
        assert (found[0] > 0.9 * found[1]) is on_disk
        assert _figures(again)[0] > 0.9 * found[1]
        assert answer == "The mine of Lake Brilo is lead."


def test_structured_output_matches(run):
    choice, regex, schema = run("structured_output.py").splitlines()
    assert choice == "choice: The colour of Teamar boat is blue."
    assert regex == "regex: The owner of Teamar boat is Dibel."
    assert re.fullmatch(
        r"JSON schema: \{'colour': '(red|green|blue)', 'owner': '[A-Z][a-z]{1,9}'\}", schema
    )


def test_a_tool_is_called_and_its_result_used(run):
    call, result, answer = run("tools.py").splitlines()
    [thing] = re.findall(r"call: colour_of\('(.*)'\)", call)
    fact = {"Teamar boat": "blue", "Zorgo lamp": "red"}[thing]
    assert result == f"result: The colour of {thing} is {fact}."
    assert fact in answer


def test_rag_answers_from_the_facts_that_it_finds(run):
    *facts, answer = run("rag.py").splitlines()
    assert len(facts) == 3
    assert any(fact.endswith("The metal of Worr camera is bronze.") for fact in facts)
    assert answer.startswith("The metal of Worr camera is bronze. [")
    assert int(re.findall(r"\[(\d+) prompt tokens\]", answer)[0]) < 100


def test_rag_takes_an_embedding_model(run, tmp_path):
    model = make_embedding_model(save_tiny_model("qwen3", tmp_path / "model"))
    document = tmp_path / "facts.txt"
    document.write_text("The pet of Mira is owl. The job of Mira is baker. The code is 2818.")
    question = "The job of Mira is baker."
    arguments = ("--embedding-model", model, "--document", document, "--top", 2)
    first, second, answer = run("rag.py", question, *arguments, "--query-prefix", "").splitlines()
    assert first == f"1.000 {question}"
    assert float(second.split()[0]) < 1
    assert answer.endswith(" prompt tokens]")
    prefixed = run("rag.py", question, *arguments).splitlines()[:2]
    assert max(float(line.split()[0]) for line in prefixed) < 1


def _figures(line):
    """Return the integers of a line."""
    return [int(number) for number in re.findall(r"(?<![\d.])\d+(?![\d.])", line)]


def test_the_notebook_runs_cell_by_cell(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    sources = ["".join(cell["source"]) + "\nprint(END_OF_CELL)\n" for cell in cells]
    program = tmp_path / "tour.py"
    program.write_text("\n".join(sources), encoding="utf-8")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(program), {"END_OF_CELL": END_OF_CELL})
    text = output.getvalue()
    shown = text.split(END_OF_CELL)[:-1]
    assert len(shown) == len(cells)
    assert all(one.strip() for one in shown), "a cell printed nothing"
    for expected in (
        "The metal of Worr camera is bronze.",
        "cached tokens: 0\nthe same tokens: True",
        "The hobby of Brot Gorbel is running.",
        "after a restart {'pool': 0, 'disk': ",
    ):
        assert expected in text
