"""Tests of commands in the documentation: the command line accepts their names, flags and values."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer.main

from kvboost_edge import shareable
from kvboost_edge.cli.app import app, run
from kvboost_edge.server.flags import parse_flags

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^( *)```(?:sh|bash)\n(.*?)^\1```", flags=re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\bkvboost-(edge|server)(?!\[)((?: +(?:\"[^\"]*\"|'[^']*'|[^\s\"'|&;)]+))*)")
# Other programs, whose arguments contain our names.
OF_OTHERS = (
    "docker ",
    "docs/deploy/try-image.sh ",
    "helm ",
    "journalctl ",
    "kubectl ",
    "rm ",
    "sudo ",
)
FILES = ("my-model.gguf", "another", "embedding-model.gguf", "keys", "admin-keys")
COMMANDS = typer.main.get_command(app).commands


def commands_of(page):
    """Return the program ("edge", "server") and the arguments of each command in a page."""
    found = []
    for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = textwrap.dedent(block).replace("\\\n", " ").splitlines()
        for line in (line for line in lines if not line.startswith(OF_OTHERS)):
            found += [
                (program, shlex.split(arguments, comments=True))
                for program, arguments in COMMAND.findall(line)
            ]
    return found


SHOWN = {page.relative_to(ROOT).as_posix(): commands_of(page) for page in PAGES}


def test_the_guides_have_commands():
    guides = [name for name in SHOWN if name.startswith(("docs/how-to/", "docs/tutorial/"))]
    assert len(guides) >= 17
    assert sum(len(SHOWN[name]) for name in guides) >= 50


@pytest.mark.parametrize("page", SHOWN)
def test_blocks_in_lists_are_indented_by_four(page):
    """Python-Markdown, which builds the site, ends a list at a block with less indentation."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"^ {1,3}(?:```|\|).*", text, flags=re.MULTILINE) == []


@pytest.mark.parametrize("page", [name for name in SHOWN if SHOWN[name]])
def test_commands_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        (tmp_path / name).write_text(name.ljust(48, "."))
    (tmp_path / "defaults.toml").write_text('[chat]\nsystem = "Answer briefly."\n')
    for program, arguments in SHOWN[page]:
        if program == "server" or arguments[:1] == ["serve"]:
            parse_flags(arguments[program == "edge" :], "test")
        elif arguments != ["--version"]:
            name, *rest = arguments
            rest = rest[: rest.index("--")] if "--" in rest else rest  # arguments of a client
            COMMANDS[name].make_context(name, rest)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/how-to").glob("[!R]*.md")), ids=lambda one: one.stem
)
def test_a_guide_has_every_part(path):
    text = path.read_text(encoding="utf-8")
    assert "**You need** " in text
    assert re.search(r"^1\. ", text, flags=re.MULTILINE)
    assert "\n## Check that it works\n" in text
    assert "\n## If it does not\n" in text
    assert "\nSee also " in text


def test_the_tutorial_finds_the_source_that_it_asks_about():
    text = (ROOT / "docs/tutorial/coding-assistant.md").read_text(encoding="utf-8")
    [(pattern, size)] = re.findall(
        r'^cat "\$package"/(\S+) \| head -c (\d+) > context\.txt$', text, re.M
    )
    package = ROOT / "kvboost_edge"
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(package.glob(pattern)))
    assert len(source) >= int(size)
    for name in set(re.findall(r"What does the class (\w+) do\?", text)):
        assert f"\nclass {name}" in source[: int(size)]


LOCAL = ("cache", "doctor", "eval", "inspect", "models")
RUN = sorted(
    {
        tuple(arguments)
        for name, commands in SHOWN.items()
        if name.startswith(("docs/how-to/", "docs/tutorial/"))
        for program, arguments in commands
        if program == "edge" and arguments[0] in LOCAL and "ollama:" not in " ".join(arguments)
    }
)


@pytest.mark.parametrize("arguments", RUN, ids=" ".join)
def test_commands_without_a_server_run(arguments, isolated_cache, tmp_path, monkeypatch, capsys):
    """The guides' commands run with the bundled model instead of the reader's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("The colour of Teamar boat is blue. " * 100)
    words = {"./my-model.gguf": "kvboost-edge/demo", "./my-model": "kvboost-edge/demo"}
    words["16384"] = "2048"  # the bundled model's context
    words["20"] = "1"  # questions per task of --retrieval
    monkeypatch.setattr(shareable, "FIRST_POSITION", 512)  # sparse prefill needs a longer context
    assert run([words.get(word, word) for word in arguments]) == 0
    assert capsys.readouterr().out
