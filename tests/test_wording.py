"""Tests of the script that finds awkward wording in messages, headings, lists and the web page."""

import pytest

import wording


@pytest.fixture(scope="module")
def avoided():
    return wording.avoided_terms(wording.TERMS.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def texts():
    return [*wording.all_texts()]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("messages", "the state behind them was not stored", [("phrases", "behind")]),
        ("messages", "num_blocks=0 is no positive integer", [("phrases", "is no")]),
        ("messages", "keys and values were cached", [("avoided terms", "keys and values")]),
        ("messages", " ".join(["word"] * 31), [("long sentences", "31 words")]),
        ("headings", "A prompt is computed once.", [("long sentences", "a heading of a sentence")]),
        ("headings", "Prefix caching", []),
        ("messages", "there is no model here; give one by --model", []),
        ("messages", "`behind` is a name of code", []),
    ],
)
def test_findings(avoided, kind, text, expected):
    assert wording.findings(kind, text, avoided) == expected


def test_messages_are_strings_of_words_that_are_not_docstrings(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""A docstring of several words here."""\n'
        "NAMES = ['block_size', 'num blocks']\n"
        "def f(value):\n"
        '    raise ValueError(f"num_blocks={value} must be at least one; give more blocks")\n'
    )
    assert [tuple(one) for one in wording.message_texts(path)] == [
        (path, 4, "num_blocks=X must be at least one; give more blocks")
    ]


def test_markdown_gives_headings_items_and_cells(tmp_path):
    path = tmp_path / "a.md"
    path.write_text(
        "# One heading\n\nA paragraph.\n\n- an item that\n  goes on\n- another one\n\n"
        "| a | b |\n|---|---|\n| a cell of five words | x |\n\n```\n# no heading\n```\n"
    )
    assert [(kind, text.line, text.text) for kind, text in wording.markdown_texts(path)] == [
        ("headings", 1, "One heading"),
        ("lists and tables", 5, "an item that goes on"),
        ("lists and tables", 7, "another one"),
        ("lists and tables", 11, "a cell of five words"),
    ]


def test_the_page_gives_its_visible_texts(tmp_path):
    html = tmp_path / "a.html"
    html.write_text(
        '<button title="Stop this answer now">Stop</button>\n<p>Ask your own question.</p>'
    )
    script = tmp_path / "a.js"
    script.write_text('// "a comment of words"\nshow("no answer came yet", "class-name");\n')
    assert [one.text for one in wording.page_texts(html)] == [
        "Stop this answer now",
        "Ask your own question.",
    ]
    assert [(one.line, one.text) for one in wording.page_texts(script)] == [
        (2, "no answer came yet")
    ]


def test_every_kind_of_text_is_covered(texts):
    kinds = {kind for kind, _ in texts}
    assert kinds == {"messages", "page", "headings", "lists and tables"}


def test_docs_use_the_terms_of_the_glossary(avoided, texts):
    found = [
        f"{path.name}:{line}: {match}"
        for kind, (path, line, text) in texts
        if kind in ("headings", "page")
        for what, match in wording.findings(kind, text, avoided)
        if what == "avoided terms"
    ]
    assert found == []
