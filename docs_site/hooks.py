"""MkDocs hooks that add pages from outside docs/, llms.txt, and each page's Markdown text."""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

from docs_site.notebook import notebook_page

__all__ = ["on_config", "on_files", "on_page_markdown", "on_post_build"]

_DOCS = "docs/"
# Folder of the site for repository files outside docs/.
_OUTSIDE = "repository/"
# File types that become pages. Other files are copied.
_LANGUAGES = {".ipynb": "", ".py": "python", ".sh": "sh"}

_FENCE = re.compile(r"^( *)(```+|~~~+)[^\n]*\n.*?^\1\2[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<label>!?\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<target>[^()\s]+)\)")

# Search rank of a page, by the start of its path in the site.
_SEARCH_BOOSTS = {
    "repository/CHANGELOG.md": 0.1,
    "repository/": 0.5,
    "how-to/": 2,
    "reference/options.md": 4,
}
# Pages excluded from the search: a log, and a copy of the text of other pages.
_NOT_SEARCHED = ("repository/benchmarks/LOG.md", "repository/README.md")

_OPTION_PAGE = "reference/options.md"
_OPTION_ROW = re.compile(
    r'^\| <a id="(?P<anchor>[^"]+)"></a>(?P<names>[^|]+) \| (?P<text>.+?) \|', re.MULTILINE
)

# Pages of this build by their path in the site.
_pages: dict[str, Any] = {}


def on_config(config: Any) -> Any:
    """Give headings the same anchors as GitHub."""
    for extension in ("toc", "pymdownx.tabbed"):
        config.mdx_configs.setdefault(extension, {})["slugify"] = slugify(case="lower")
    _pages.clear()
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files outside docs/ that the navigation or a page refers to."""
    root = Path(config.config_file_path).parent
    waiting = [_repository_path(file.src_uri) for file in files if file.is_documentation_page()]
    named = {path for _, entries in _sections(config.nav) for _, path in entries}
    waiting += sorted(map(_repository_path, named - {file.src_uri for file in files}))
    seen = set(waiting)
    for path in waiting:  # the list grows during the loop
        source = root / path
        if not source.is_file():
            continue  # the build reports missing files
        if not path.startswith(_DOCS):
            files.append(_outside_file(path, source, config))
        if source.suffix != ".md":
            continue
        for target in _linked_files(source.read_text(encoding="utf-8"), path, root):
            if not target.startswith(_DOCS) and target not in seen:
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Redirect links to files outside docs/ to the site's copies, and set the search rank."""
    root = Path(config.config_file_path).parent
    place = page.file.src_uri
    path = _repository_path(place)

    def rewrite(found: re.Match[str]) -> str:
        name, hash_sign, anchor = found["target"].partition("#")
        target = _resolve(path, name)
        if target is None or not (root / target).exists():
            return found[0]
        if (root / target).is_dir():
            return found["label"][1:-1]  # directories have no page in the site
        link = posixpath.relpath(_site_path(target), posixpath.dirname(place) or ".")
        return f"{found['label']}({link}{hash_sign}{anchor})"

    boosts = [boost for start, boost in _SEARCH_BOOSTS.items() if place.startswith(start)]
    if place in _NOT_SEARCHED:
        page.meta["search"] = {"exclude": True}
    elif boosts:
        page.meta["search"] = {"boost": boosts[0]}
    _pages[place] = page
    return _outside_fences(markdown, lambda text: _LINK.sub(rewrite, text))


def on_post_build(*, config: Any) -> None:
    """Write llms.txt and each page's Markdown text, and add the options to the search index."""
    site = Path(config.site_dir)
    index = site / "search" / "search_index.json"
    if index.is_file():
        found = json.loads(index.read_text(encoding="utf-8"))
        found["docs"] += _option_entries(_pages[_OPTION_PAGE].markdown)
        index.write_text(json.dumps(found), encoding="utf-8")
    for name, page in _pages.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.markdown, encoding="utf-8")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    sections = _sections(config.nav)
    listed = {name for _, entries in sections for _, name in entries}
    rest = sorted(_pages.keys() - listed)
    if rest:
        sections.append(("Optional", [(_pages[name].title, name) for name in rest]))
    for heading, entries in sections:
        lines += [f"## {heading}", ""]
        lines += [f"- [{title}]({name}): {_summary(_pages[name])}" for title, name in entries]
        lines += [""]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def _sections(nav: list[Any], heading: str = "Home") -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the navigation as (heading, entries) pairs.

    An entry is a pair (title, path in the site).
    """
    found: list[tuple[str, list[tuple[str, str]]]] = [(heading, [])]
    for item in nav:
        [(title, value)] = item.items()
        if isinstance(value, str):
            found[0][1].append((title, value))
        else:
            found += _sections(value, title)
    return [(title, entries) for title, entries in found if entries]


def _option_entries(markdown: str) -> list[dict[str, Any]]:
    """Return a search index entry for each row of the options page."""
    location = Path(_OPTION_PAGE).with_suffix(".html").as_posix()
    return [
        {
            "location": f"{location}#{row['anchor']}",
            "title": row["names"].replace("`", "").replace("<br>", ", "),
            "text": html.escape(row["text"]),
            "boost": _SEARCH_BOOSTS[_OPTION_PAGE],
        }
        for row in _OPTION_ROW.finditer(markdown)
    ]


def _outside_file(path: str, source: Path, config: Any) -> File:
    if source.suffix == ".ipynb":
        page = notebook_page(source, run=bool(os.environ.get("KVBOOST_EDGE_RUN_NOTEBOOKS")))
        return File.generated(config, _site_path(path), content=page)
    language = _LANGUAGES.get(source.suffix)
    if not language:
        return File.generated(config, _site_path(path), abs_src_path=str(source))
    text = source.read_text(encoding="utf-8")
    page = f"# `{path}`\n\n`````{language}\n{text.rstrip()}\n`````\n"
    return File.generated(config, _site_path(path), content=page)


def _site_path(path: str) -> str:
    """Return the path in the site of a file in the repository."""
    if path.startswith(_DOCS):
        return path.removeprefix(_DOCS)
    return _OUTSIDE + path + (".md" if Path(path).suffix in _LANGUAGES else "")


def _repository_path(place: str) -> str:
    """Return the path in the repository of a file in the site."""
    if not place.startswith(_OUTSIDE):
        return _DOCS + place
    path = Path(place.removeprefix(_OUTSIDE))
    return (path.with_suffix("") if Path(path.stem).suffix in _LANGUAGES else path).as_posix()


def _resolve(path: str, link: str) -> str | None:
    """Return the file that a link on a page refers to, or None for other sites and this page."""
    if not link or re.match(r"[a-z][a-z0-9+.-]*:|/", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _linked_files(text: str, path: str, root: Path) -> Iterator[str]:
    targets: list[str] = []

    def note(part: str) -> str:
        targets.extend(found["target"].partition("#")[0] for found in _LINK.finditer(part))
        return part

    _outside_fences(text, note)
    for link in targets:
        target = _resolve(path, link)
        if target is not None and (root / target).is_file():
            yield target


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply a change to the text outside fenced code blocks."""
    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _summary(page: Any) -> str:
    """Return the first sentence of a page without markup, or the page's title."""
    for block in re.split(r"\n\s*\n", _FENCE.sub("", page.markdown)):
        line = " ".join(block.split())
        if line and not re.match(r"[#|!<:>*-]|\d+\. |\[[^\]]*\]\([^)]*\)$", line):
            line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line)
            sentence = re.split(r"(?<=[.!?]) ", line)[0].rstrip(":")
            return sentence if sentence[-1] in ".!?" else f"{sentence}."
    return str(page.title)
