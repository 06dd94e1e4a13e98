"""Tests of presets for the settings: built-in ones, stored ones, and damaged browser storage."""

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.slow

OWN = '<img src=x onerror="window.hacked=1">'


@pytest.fixture
def page(stand_in):
    made = stand_in()
    made.click("nav [data-view=settings]")
    return made


def chosen(page):
    return page.evaluate("document.getElementById('preset').selectedOptions[0].textContent")


def values(page, *names):
    return [page.input_value(f"#{name}") for name in names]


def store(page, name, **fields):
    for field, text in fields.items():
        page.fill(f"#{field}", text)
    page.fill("#preset-name", name)
    page.button("Save").click()


def test_built_in_presets_have_valid_values(modules):
    body = """
      const {validate} = await import('/static/sampling.js');
      return it.BUILT_IN.map(({name, texts}) => [name, validate(texts)]);
    """
    presets = dict(modules.module("presets", body))
    assert list(presets) == ["Server defaults", "Creative", "Precise", "Deterministic"]
    assert all(checked["errors"] == {} for checked in presets.values())
    warmth = [presets[name]["values"]["temperature"] for name in list(presets)[1:]]
    assert warmth == sorted(warmth, reverse=True)
    assert presets["Deterministic"]["values"] == {"temperature": 0, "seed": 0}
    assert presets["Server defaults"]["values"] == {}


def test_a_preset_sets_the_sampling_fields(page):
    assert chosen(page) == "Server defaults"
    page.fill("#max_tokens", "7")
    page.fill("#system", "Be brief.")
    page.get_by_label("Preset", exact=True).select_option("Precise")
    assert values(page, "temperature", "top_p", "top_k") == ["0.3", "0.9", "40"]
    assert chosen(page) == "Precise"
    sent = page.begin("Hello")
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.3, 0.9, 40)
    assert (sent["max_tokens"], sent["messages"][0]["content"]) == (7, "Be brief.")
    page.fill("#top_k", "41")
    assert chosen(page) == "Your own values"
    page.get_by_label("Preset", exact=True).select_option("Server defaults")
    assert values(page, "temperature", "top_p", "top_k", "max_tokens") == ["", "", "", "7"]
    page.expects("#delete-preset").to_be_hidden()


def test_a_user_preset_is_stored_in_the_browser(page):
    fields = {"system": "Speak <i>Latin</i>.", "temperature": "0,7", "min_p": "0.1", "seed": "5"}
    fields |= {"max_tokens": "99", "reasoning_budget": "64"}
    store(page, OWN, **fields)
    page.shows("#preset-status", f"The preset {OWN} is saved in this browser.")
    assert chosen(page) == OWN
    page.button("Reset settings").click()
    page.keyboard.press("Escape")
    assert page.input_value("#seed") == "5"
    page.reset_settings()
    assert chosen(page) == "Server defaults"
    page.reload()
    page.click("nav [data-view=settings]")
    page.get_by_label("Preset", exact=True).select_option(OWN)
    assert values(page, *fields) == list(fields.values())
    page.reload()
    page.click("nav [data-view=settings]")
    assert chosen(page) == OWN
    sent = page.begin("Salve")
    assert (sent["temperature"], sent["reasoning_budget"], sent["seed"]) == (0.7, 64, 5)
    store(page, OWN, temperature="0.8")  # replaces the old one
    kept = json.loads(page.evaluate("localStorage.getItem('presets')"))
    assert [(one["name"], one["texts"]["temperature"]) for one in kept] == [(OWN, "0.8")]
    page.click("#delete-preset")
    page.shows("#confirm-text", f"This browser will no longer keep “{OWN}”.")
    page.keyboard.press("Escape")
    assert chosen(page) == OWN
    page.click("#delete-preset")
    page.click("#confirm-action")
    page.expects("#preset").to_be_focused()
    assert page.evaluate("localStorage.getItem('presets')") == "[]"
    assert page.locator("#preset option").all_inner_texts()[0] == "Your own values"
    assert page.evaluate("window.hacked") is None


@pytest.mark.full
def test_a_preset_without_a_system_prompt_keeps_the_current_one(page):
    store(page, "Short", max_tokens="5")
    page.fill("#system", "Be kind.")
    page.get_by_label("Preset", exact=True).select_option("Creative")
    page.get_by_label("Preset", exact=True).select_option("Short")
    assert values(page, "system", "max_tokens") == ["Be kind.", "5"]
    assert chosen(page) == "Short"


@pytest.mark.full
def test_invalid_presets_are_refused_with_a_reason(page):
    for name, fields, problem in (
        (" ", {}, "Enter a name for the preset."),
        ("creative", {}, "creative is a built-in preset. Choose another name."),
        ("Hot", {"temperature": "9"}, "Correct the marked fields before you save them."),
    ):
        store(page, name, **fields)
        page.shows("#preset-error", problem)
        page.expects("#preset-name").to_be_focused()
        expect(page.locator("#preset-name")).to_have_attribute("aria-invalid", "true")
        assert page.evaluate("localStorage.getItem('presets')") is None
        page.fill("#preset-name", "x")
        page.expects("#preset-error").to_be_empty()


def test_presets_are_limited_in_number_and_name(modules):
    body = """
      const texts = {temperature: '1'};
      const stored = [];
      for (let number = 0; number < 51; number += 1) stored.push(it.storePreset({name: `n${number}`, texts}));
      const again = it.storePreset({name: 'n3', texts: {temperature: '2'}});
      return [stored.filter((problem) => problem !== ''), again, it.storedPresets().length, it.problemOfName('x'.repeat(61))];
    """
    assert modules.module("presets", body) == [
        ["50 presets are stored, which is the limit. Delete one."],
        "",
        50,
        "The name is longer than 60 characters.",
    ]


def test_damaged_presets_are_ignored(modules):
    good = {"name": "good", "texts": {"system": "s", "temperature": "1"}}
    bad = [
        None,
        7,
        {"name": "", "texts": {}},
        {"name": "Creative", "texts": {}},
        {"name": "none", "texts": None},
        {"name": "number", "texts": {"temperature": 1}},
        {"name": "wrong", "texts": {"temperature": "hot"}},
        {"name": "key", "texts": {"api-key": "x"}},
    ]
    read = "localStorage.setItem('presets', argument); return it.storedPresets();"
    assert modules.module("presets", read, json.dumps([*bad, good])) == [good]
    for text in ("", "{", "{}", "null", "7"):
        assert modules.module("presets", read, text) == []


@pytest.mark.full
def test_presets_of_another_tab_are_listed(page):
    other = page.page.context.new_page()
    other.goto(page.origin)
    kept = [{"name": "From afar", "texts": {"temperature": "1.5"}}]
    other.evaluate("(text) => localStorage.setItem('presets', text)", json.dumps(kept))
    other.close()
    expect(page.locator("#preset optgroup[label=Yours] option")).to_have_text(["From afar"])


@pytest.mark.full
def test_without_storage_presets_still_fill_the_settings(page):
    page.evaluate(
        "window.storage = Object.getOwnPropertyDescriptor(window, 'localStorage');"
        "Object.defineProperty(window, 'localStorage', "
        "{configurable: true, get() { throw new Error('no'); }})"
    )
    page.get_by_label("Preset", exact=True).select_option("Creative")
    assert page.input_value("#temperature") == "1"
    store(page, "Mine")
    page.shows("#preset-error", "The browser cannot store the presets.")
    page.evaluate("Object.defineProperty(window, 'localStorage', window.storage)")
