"""Tests of the documentation site: it builds without a warning, and pages, links and lists are
complete.
"""

import html.parser
import json
import posixpath
import re
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mkdocs.structure.files import Files

from docs_site import hooks
from docs_site.notebook import notebook_page
from test_readme import FEATURES

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
# Markdown of docs/ and of the repository's files that the site shows.
DOCS = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
KINDS = ["Tutorial", "How-to guides", "Reference", "Explanation"]


class Page(html.parser.HTMLParser):
    """Links, anchors and resources of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors, self.resources = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href") is not None:
            self.links.append(found["href"])
        elif tag == "link" and found.get("href"):
            self.resources.append(found["href"])
        elif tag in ("script", "img", "iframe", "source", "video") and found.get("src"):
            self.resources.append(found["src"])


@pytest.fixture(scope="module")
def pages(site):
    """Every page of the site by its path."""
    return {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"  # its links are absolute
    }


def entries(nav):
    for item in nav:
        for value in item.values():
            yield from [value] if isinstance(value, str) else entries(value)


def test_the_navigation_has_every_page_once_in_four_kinds():
    listed = [*entries(CONFIG["nav"])]
    assert len(listed) == len(set(listed))
    assert {path for path in listed if not path.startswith("repository/")} == DOCS
    titles = [title for item in CONFIG["nav"] for title in item]
    assert [title for title in titles if title in KINDS] == KINDS
    folders = {"tutorial": 0, "how-to": 1, "reference": 2, "explanation": 3}
    for item in CONFIG["nav"]:
        [(title, value)] = item.items()
        for path in entries(value) if isinstance(value, list) else ():
            folder = path.partition("/")[0]
            assert folder not in folders or KINDS[folders[folder]] == title, path


@pytest.mark.parametrize("kind", KINDS)
def test_the_overview_of_a_section_links_to_its_other_pages(kind):
    [section] = [item[kind] for item in CONFIG["nav"] if kind in item]
    overview, *paths = entries(section)
    folder = posixpath.dirname(overview)
    text = (ROOT / "docs" / overview).read_text(encoding="utf-8")
    linked = {
        posixpath.normpath(posixpath.join("docs", folder, link))
        for link in re.findall(r"\]\(([^)]+)\)", text)
    }
    assert linked == {hooks._repository_path(path) for path in paths}


@pytest.mark.slow
def test_every_internal_link_and_anchor_leads_somewhere(site, pages):
    assert len(pages) > len(DOCS)
    wrong = []
    for name, page in pages.items():
        for link in page.links + page.resources:
            place = urllib.parse.urlsplit(link)
            if place.scheme or place.netloc:
                continue
            path = urllib.parse.unquote(place.path)
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            target = name if not path else target
            if not (site / target).is_file():
                wrong.append(f"{name}: {link}")
            elif place.fragment and target in pages and target.endswith(".html"):
                anchor = urllib.parse.unquote(place.fragment)
                if anchor not in pages[target].anchors and not anchor.startswith("__"):
                    wrong.append(f"{name}: {link}")
    assert not wrong


@pytest.mark.slow
def test_pages_load_nothing_from_the_network(pages):
    assert all(page.resources for page in pages.values())
    assert not [
        f"{name}: {one}"
        for name, page in pages.items()
        for one in page.resources
        if urllib.parse.urlsplit(one).scheme not in ("", "data")
        or urllib.parse.urlsplit(one).netloc
    ]


def test_no_page_has_a_diagram_that_the_theme_would_draw_with_a_script_from_the_network():
    assert not [
        path for path in DOCS if "```mermaid" in (ROOT / "docs" / path).read_text(encoding="utf-8")
    ]


@pytest.mark.slow
def test_llms_txt_lists_every_page_and_each_exists_as_markdown(site, pages):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^- \[.+?\]\(([^)]+)\): (.+)$", text, flags=re.MULTILINE))
    markdown = {
        re.sub(r"(^|/)index\.html$", r"\1README.md", name).removesuffix(".html").removesuffix(".md")
        + ".md"
        for name in pages
    }
    assert set(listed) == markdown
    assert set(listed) >= DOCS  # under their paths in docs/, for older links
    assert not [path for path in listed if not (site / path).read_text(encoding="utf-8").strip()]
    for kind in KINDS:
        assert f"\n## {kind}\n" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", [name.strip() for name in FEATURES.replace("\n", " ").split(",")]
)
def test_the_index_names_each_feature_by_its_standard_name(feature, site):
    text = re.sub(r"<[^>]+>", "", (site / "index.html").read_text(encoding="utf-8"))
    assert feature.lower() in " ".join(text.lower().split())


def config(root):
    return SimpleNamespace(config_file_path=str(root / "mkdocs.yml"), nav=[])


def rewritten(text, place, root):
    page = SimpleNamespace(file=SimpleNamespace(src_uri=place), meta={})
    return hooks.on_page_markdown(text, page=page, config=config(root), files=Files([]))


def test_links_out_of_the_docs_lead_to_the_copies(tmp_path):
    for path in ("docs/guide/a.md", "docs/b.md", "CHANGES.md", "tools/run.py", "data/figures.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    cases = {
        "[c](../../CHANGES.md#new)": "[c](../repository/CHANGES.md#new)",
        "[r](../../tools/run.py)": "[r](../repository/tools/run.py.md)",
        "[f](../../data/figures.json)": "[f](../repository/data/figures.json)",
        "[d](../../tools/)": "d",
        "[b](../b.md)": "[b](../b.md)",
        "[gone](../../gone.md)": "[gone](../../gone.md)",  # the build reports it
        "[x](https://example.org/a.md)": "[x](https://example.org/a.md)",
        "[here](#part)": "[here](#part)",
        "```\n[c](../../CHANGES.md)\n```": "```\n[c](../../CHANGES.md)\n```",
    }
    for text, expected in cases.items():
        assert rewritten(text, "guide/a.md", tmp_path) == expected
    back = rewritten("[b](docs/b.md)", "repository/CHANGES.md", tmp_path)
    assert back == "[b](../b.md)"


@pytest.mark.parametrize(
    "path", ["docs/a.md", "CHANGES.md", "run.py", "tools/run.sh", "data.json", "a.ipynb"]
)
def test_the_place_of_a_file_in_the_site_leads_back_to_it(path):
    assert hooks._repository_path(hooks._site_path(path)) == path


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("# A\n\nFirst. Second.", "First."),
        ("# A\n\n```sh\ncode\n```\n\n1. one\n\nSee [b](b.md) now:\n\nMore.", "See b now."),
        ("# A\n\n| a |\n| --- |\n", "Title"),
    ],
)
def test_a_page_is_summed_up_by_its_first_sentence(text, summary):
    assert hooks._summary(SimpleNamespace(markdown=text, title="Title")) == summary


@pytest.fixture
def notebook(tmp_path):
    """Function that writes a notebook with one text cell and some code cells."""

    def written(*sources):
        cells = [{"cell_type": "markdown", "source": ["# A tour\n", "\n", "Text."]}]
        cells += [{"cell_type": "code", "source": [source]} for source in sources]
        path = tmp_path / "tour.ipynb"
        path.write_text(json.dumps({"cells": cells}))
        return path

    return written


def test_a_notebook_becomes_a_page_with_the_output_of_its_cells(notebook):
    path = notebook("a = 1", "print(a + 1)")
    page = notebook_page(path, run=True)
    assert page == "# A tour\n\nText.\n\n```python\na = 1\n```\n\n" + (
        "```python\nprint(a + 1)\n```\n\n```text\n2\n```\n"
    )
    assert "```text" not in notebook_page(path, run=False)


def test_a_cell_that_fails_is_an_error(notebook):
    with pytest.raises(RuntimeError, match="No such figure"):
        notebook_page(notebook("raise ValueError('No such figure')"), run=True)


def test_every_column_of_a_table_has_a_title():
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    texts[ROOT / "README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    titles = re.compile(r"^(\|.*\|)\n\| ?:?---", flags=re.MULTILINE)
    untitled = {
        f"{path.name}: {line}"
        for path, text in texts.items()
        for line in titles.findall(text)
        if not all(cell.strip() for cell in line.strip("|").split("|"))
    }
    assert not untitled
