"""Tests that the commands print names, reasons and answers with brackets unchanged, without markup."""

import ast
import io
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.progress import Progress
from rich.table import Table

from helpers.tiers.disk_cases import SPACE, chain, opened, write
from kvboost_edge.cli.console import open_console, spinner, text_column
from kvboost_edge.cli.demo import _add_row

COMMANDS = Path(__file__).parents[2] / "kvboost_edge" / "cli"
NAMES = ("em[b]x", "a[/b]", "[red]c :smile: \\[dim]")
SMALL = ("-o", "num_blocks=32", "-o", "dtype=float32")
MARKUP = re.compile(r"\[/?(b|i|u|bold|dim|italic|red|green|blue|cyan|yellow|magenta)( [a-z]+)*\]")
# Names of rich that parse strings as markup. Only console.py creates them, with markup disabled.
READERS = {"Console", "TextColumn", "from_markup", "render_markup", "status", "Status", "Spinner"}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def model(tiny_model_dir, tmp_path):
    """Model in directories with hostile names."""
    return str(shutil.copytree(tiny_model_dir, tmp_path.joinpath(*NAMES)))


def test_commands_show_paths_without_markup(model, tmp_path, printed, typed):
    text = tmp_path / "text"
    text.write_text("Hello there, how are you today?")
    for argv in (
        ["inspect", model],
        ["doctor", model],
        ["generate", "Hello", "-m", model, "-n", "2", *SMALL],
        ["chat", "-m", model, "-n", "2", *SMALL],
        ["eval", text, "-m", model, "--window", "8", "--against", "kv_cache_bits=8", *SMALL],
        ["warmup", "-m", model, "-o", "weights=f32", "--kv-cache-bits", "16"],
    ):
        typed("Hello\n")
        assert model in "".join(printed(*argv)), argv
    assert f"{model}/none" in printed("doctor", f"{model}/none", code=1).out


def test_consoles_add_no_styles(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = open_console()
    with console.capture() as capture:
        console.print("16 tokens of /a/b", style="dim")
    assert capture.get() == "\x1b[2m16 tokens of /a/b\x1b[0m\n"


@pytest.mark.parametrize("name", NAMES)
def test_lists_show_names_without_markup(name, tmp_path, printed, monkeypatch):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path / name))
    with opened(tmp_path / name / "blocks", SPACE, description={"model": name}) as tier:
        write(tier, chain(2))
    for action in ("list", "status", "verify"):
        assert name in printed("cache", action).out
    row = {
        "name": name,
        "store": "",
        "format": "",
        "bytes": 0,
        "runs": "refused",
        "reason": f"no {name}",
    }
    monkeypatch.setattr("kvboost_edge.cli.models.model_rows", lambda word, config: [row])
    out = printed("models").out
    assert name in out
    assert f"refused: no {name}" in out


@pytest.mark.parametrize("name", NAMES)
def test_progress_bars_and_answers_show_text_without_markup(name):
    console = open_console()
    console.file = io.StringIO()
    with Progress(text_column("{task.description}"), console=console) as bar:
        bar.add_task(name, total=1)
    status = spinner(console, name)
    console.print(status.renderable)
    table = Table(*"abcdef")
    _add_row(
        table,
        "cold",
        "?",
        "x",
        SimpleNamespace(output_text=name, prompt_tokens=1, cached_tokens=0, ttft_ms=1.0),
    )
    console.print(table)
    assert console.file.getvalue().count(name) == 3


@pytest.mark.parametrize("argv", [["[/b]"], ["generate", "x", "--no[/b]"]])
def test_usage_errors_show_text_without_markup(argv, printed):
    assert "[/b]" in printed(*argv, code=2).err


def test_json_output_keeps_names(model, answered):
    assert answered("inspect", model)["path"] == model


def found_markup(source):
    """Return the lines that create an object that parses markup, or that contain a markup tag."""
    found = []
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", None))
        tags = (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and MARKUP.search(node.value)
        )
        asks = isinstance(node, ast.keyword) and node.arg == "markup"
        if name in READERS or asks or (tags and not node.value.startswith("[b]Examples[/b]\n\n")):
            found.append(
                f"{node.lineno if hasattr(node, 'lineno') else 0}: {ast.unparse(node)[:80]}"
            )
    return found


def test_no_command_creates_its_own_console():
    """All consoles and progress columns come from console.py, and only help texts contain markup
    tags.
    """
    found = {
        str(path.relative_to(COMMANDS)): lines
        for path in sorted(COMMANDS.rglob("*.py"))
        if path.name != "console.py" and (lines := found_markup(path.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "c = Console(stderr=True)",
        'TextColumn("{x}")',
        'c.status(f"{x}")',
        'c.print(f"[dim]{x}[/dim]")',
        "Text.from_markup(x)",
        "c.print(x, markup=True)",
    ],
)
def test_the_check_finds_consoles_with_markup(source):
    assert found_markup(source)
