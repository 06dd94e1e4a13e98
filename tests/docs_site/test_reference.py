"""Tests of the generated reference pages: they are current and complete."""

import re

import pytest

import kvboost_edge
from docs_site.reference import __main__ as script
from docs_site.reference.commands import command_page, commands
from docs_site.reference.families import families_table, with_table
from docs_site.reference.http_api import (
    _as_sentence,
    _kind,
    api_document,
    http_page,
    undescribed,
)
from docs_site.reference.metrics import families, metrics_page
from docs_site.reference.options import option_page
from docs_site.reference.pages import generated_pages
from docs_site.reference.python import python_page
from docs_site.reference.stats import described_keys, stats_page
from docs_site.reference.tables import paragraph, table
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine import stats
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.options import options_of
from kvboost_edge.server.serve_options import command_options
from kvboost_edge.server.settings import ServerSettings


def test_pages_are_current():
    old = [
        path.name
        for path, text in generated_pages().items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert not old, "the reference pages are outdated: run make docs-reference"


def test_the_script_writes_and_checks(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "generated_pages", lambda: {page: "text\n"})
    assert script.main(["--check"]) == 1
    assert "make docs-reference" in capsys.readouterr().err
    assert script.main(["--write"]) == 0
    assert page.read_text() == "text\n"
    assert script.main(["--check"]) == 0
    with pytest.raises(SystemExit, match="--check"):
        script.main([])


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, Terms, ServerSettings])
def test_every_option_is_declared_and_has_a_row(cls):
    assert [*options_of(cls)] == [*cls.__dataclass_fields__]
    page = option_page()
    assert not [
        name
        for name in options_of(cls)
        if not re.search(rf'\n\| <a id="[a-z0-9-]+"></a>`{name}`(<br>| \|)', page)
    ]


def test_every_command_and_each_of_its_flags_is_listed():
    page = command_page()
    sections = dict(
        re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    )
    assert [*sections] == [*commands()]
    for name, command in commands().items():
        flags = [flag for one in command.params for flag in (*one.opts, *one.secondary_opts)]
        missing = [flag for flag in flags if flag[0] == "-" and f"`{flag}`" not in sections[name]]
        assert not missing, name
        assert f"\nkvboost-edge {name}" in sections[name]


def test_the_flags_of_the_server_are_on_one_of_two_pages():
    pages = option_page() + command_page()
    flags = [flag for name, one in command_options().items() for flag in one.flags(name)]
    assert len(flags) > 50
    assert not [flag for flag in flags if f"`{flag}`" not in pages]


def test_every_route_is_listed_and_every_field_has_a_meaning():
    page = http_page()
    operations = [
        f"{method.upper()} {path}"
        for path, ones in api_document()["paths"].items()
        for method in ones
    ]
    assert len(operations) > 30
    assert not [name for name in operations if f"\n### `{name}`\n" not in page]
    assert "\n### `GET /metrics`\n\nReturn" in page
    assert undescribed() == []
    assert {f"#{name}" for name in re.findall(r"\]\(#([\w-]+)\)", page)} <= {
        "#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    }


def test_names_of_values_keep_their_case_and_ranges_their_units():
    assert _as_sentence("24h: later") == "24h: later."
    assert _as_sentence("some text") == "Some text."
    assert _kind({"type": "string", "maxLength": 9})[0] == "string (at most 9 characters)"
    assert _kind({"anyOf": [{"type": "null"}, {"const": False}]}) == ("`false`", True)
    texts = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "string"}}
    assert _kind(texts)[0] == "array (2 entries) of string"


def test_every_metric_has_a_type_labels_and_a_meaning():
    rows = re.findall(
        r"^\| `(\w+:\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", metrics_page(), re.MULTILINE
    )
    assert len(rows) == len(families()) > 70
    assert {kind for _, kind, _, _ in rows} == {"counter", "gauge", "histogram"}
    labels = {name: text for name, _, text, _ in rows}
    assert labels["kvboost:http_requests_total"] == "`route`, `status`"
    assert labels["vllm:request_success_total"] == "`model_name`, `finished_reason`"


def test_every_key_of_the_statistics_is_described(tmp_path):
    options = {"max_cache_bytes": 16e6, "num_threads": 1, "disk_cache_dir": tmp_path}
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options) as engine:
        figures = engine.paged_stats()
        chunks = engine.cache_stats()
    assert described_keys(stats.paged_stats).keys() == figures.keys()
    assert described_keys(stats.cache_stats).keys() == chunks.keys()
    fields = figures["tiers"]["disk"]
    assert not [name for name in fields if f"\n| `{name}` |" not in stats_page()]


def test_every_public_name_has_a_directive():
    page = python_page()
    names = set(re.findall(r"^::: kvboost_edge\.(\w+)$", page, flags=re.MULTILINE))
    aliases = {name for name in kvboost_edge.__all__ if f"\n| `{name}` |" in page}
    assert aliases == {"KVBoost", "InferenceEngine"}
    assert names | aliases | {"__version__"} == set(kvboost_edge.__all__)


def test_a_public_name_without_a_group_is_refused(monkeypatch):
    monkeypatch.setattr(kvboost_edge, "__all__", [*kvboost_edge.__all__, "New"])
    with pytest.raises(ValueError, match="New"):
        python_page()


def test_the_table_of_families_is_replaced_and_must_be_there():
    page = f"# Models\n\n{families_table()}\nMore.\n"
    assert with_table(page.replace("Qwen2 and Qwen2.5", "another note")) == page
    with pytest.raises(ValueError, match="one table"):
        with_table("# Models\n")


def test_cells_stay_on_one_line_and_lines_have_at_most_100_columns():
    assert table(("a", "b"), [("1|2", "two\nlines")]) == (
        "| a | b |\n| --- | --- |\n| 1\\|2 | two lines |\n"
    )
    assert max(map(len, paragraph("word " * 50).splitlines())) <= 100
