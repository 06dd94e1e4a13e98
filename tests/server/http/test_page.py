"""Tests of the responses at `/` and `/static` and of the contents of these files."""

import hashlib
import re
from importlib.resources import files

import pytest

from kvboost_edge.server.http.headers import PAGE_HEADERS
from kvboost_edge.server.http.page import STATIC_FILES

FOLDER = files("kvboost_edge.server.http") / "static"
TEXTS = {name: (FOLDER / name).read_text(encoding="utf-8") for name in STATIC_FILES}
PATHS = {name: "/" if name == "index.html" else f"/static/{name}" for name in STATIC_FILES}
MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
# Colors of text (contrast 4.5 to 1) and of meaningful graphics (3 to 1) with their backgrounds:
# WCAG 2.2, level AA.
TEXT_PAIRS = [
    *((ink, ground) for ink in ("text", "muted") for ground in ("bg", "surface", "raised", "tint")),
    *(("accent", ground) for ground in ("bg", "surface")),
    ("warn", "surface"),
    ("bad", "surface"),
    ("bad", "bad-tint"),
    ("text", "bad-tint"),
    ("on-accent", "accent"),
]
MARK_PAIRS = [
    *((ink, "surface") for ink in ("control", "free-line", "cached", "used", "shared", "accent")),
    ("control", "bg"),
    ("cached", "cached-tint"),
    ("shared", "shared-dot"),
    ("accent", "raised"),
]


async def test_every_file_has_its_type_and_security_headers(tiny_app):
    for name, path in PATHS.items():
        answer = await tiny_app.get(path)
        assert answer.status_code == 200
        assert answer.content == (FOLDER / name).read_bytes()
        assert answer.headers["content-type"].split(";")[0] == MEDIA_TYPES[name.rsplit(".")[-1]]
        assert answer.headers["cache-control"] == "no-cache"
        for header, value in PAGE_HEADERS.items():
            assert answer.headers.get_list(header) == [value], header
    assert PAGE_HEADERS["Content-Security-Policy"].startswith("default-src 'self';")
    assert "unsafe" not in PAGE_HEADERS["Content-Security-Policy"]


async def test_an_unchanged_file_is_answered_with_304(tiny_app):
    first = await tiny_app.get("/static/main.js")
    tag = first.headers["etag"]
    assert tag.strip('"') == hashlib.sha256(first.content).hexdigest()[:32]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await tiny_app.get("/static/main.js", headers={"If-None-Match": given})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    other = await tiny_app.get("/static/main.js", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


async def test_head_returns_the_length_without_a_body(tiny_app):
    for name, path in PATHS.items():
        answer = await tiny_app.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert int(answer.headers["content-length"]) == len((FOLDER / name).read_bytes())


@pytest.mark.parametrize(
    "path",
    [
        "/static",
        "/static/",
        "/static/index.html",
        "/static/none.js",
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static/..%2fpage.py",
        "/static/main.js/",
        "/static//main.js",
        "/static/main.js%00",
        "/index.html",
    ],
)
async def test_other_paths_are_not_served(tiny_app, path):
    assert (await tiny_app.get(path)).status_code == 404


async def test_static_files_are_not_in_the_openapi_document(tiny_app):
    paths = tiny_app.app.openapi()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/static")]


@pytest.mark.parametrize("name", STATIC_FILES)
def test_static_files_have_no_external_urls_and_no_inner_html(name):
    text = TEXTS[name]
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not addresses
    banned = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
        "createContextualFragment",
        "srcdoc",
        "javascript:",
        "@import",
        "url(",
    )
    assert not [word for word in banned if word in text]


def test_the_page_has_no_inline_script_style_or_handler():
    page = TEXTS["index.html"]
    assert not re.findall(r"<style|\sstyle=|\son[a-z]+=", page)
    assert all(
        re.search(r'src="/static/[a-z]+\.js"></script>', script)
        for script in re.findall(r"<script.*", page)
    )


def test_the_served_files_are_those_that_the_page_refers_to():
    named = {
        name for text in TEXTS.values() for name in re.findall(r"[\"']/static/([^\"']+)[\"']", text)
    }
    assert named == set(STATIC_FILES) - {"index.html"}


def test_every_element_id_used_by_a_script_exists():
    ids = re.findall(r'\sid="([^"]+)"', TEXTS["index.html"])
    assert len(ids) == len(set(ids))
    asked = {
        name
        for file, text in TEXTS.items()
        if file.endswith(".js")
        for name in re.findall(r"(?:byId|getElementById)\(\"([^\"]+)\"\)", text)
    }
    assert asked <= set(ids)


def test_the_page_is_small():
    assert sum(len(text.encode()) for text in TEXTS.values()) < 208 * 1024


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_have_contrast(theme):
    colours = _themes()[theme]
    low = {
        (ink, ground): round(ratio, 2)
        for pairs, least in ((TEXT_PAIRS, 4.5), (MARK_PAIRS, 3.0))
        for ink, ground in pairs
        if (ratio := _contrast(colours[ink], colours[ground])) < least
    }
    assert not low


def test_both_dark_themes_have_equal_colours():
    themes = _themes()
    assert themes["dark"] == themes["system dark"]
    assert set(themes["light"]) == set(themes["dark"])


def _themes():
    """Return a map of theme to color name to "#rrggbb"."""
    style = TEXTS["style.css"]
    blocks = {
        "light": r":root \{(.*?)\}",
        "dark": r':root\[data-theme="dark"\] \{(.*?)\}',
        "system dark": r":root:not\(\[data-theme\]\) \{(.*?)\}",
    }
    return {
        theme: dict(
            re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", re.search(pattern, style, re.DOTALL)[1])
        )
        for theme, pattern in blocks.items()
    }


def _contrast(first, second):
    """Return WCAG's contrast ratio of two colors, 1 to 21."""
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour):
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
