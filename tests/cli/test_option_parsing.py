"""Tests of NAME=VALUE options."""

import functools

import pytest
import typer

from helpers.raising import assert_raises
from kvboost_edge import __version__
from kvboost_edge.cli.app import app
from kvboost_edge.cli.chat import _for_server
from kvboost_edge.cli.option_parsing import (
    engine_options,
    one_model,
    parse_value,
    sampling_options,
    token_limit,
)
from kvboost_edge.config import EngineConfig
from kvboost_edge.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("4e9", 4e9),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("cpu", "cpu"),
    ],
)
def test_values_get_the_type_of_their_notation(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("num_blocks=64", 64),
        ("max_cache_bytes=4e9", 4_000_000_000),
        ("target_tpot=40", 40.0),
        ("max_memory=none", None),
        ("kv_cache_bits=8,4", (8, 4)),
        ("kv_cache_bits=none", None),
        ("strict=False", False),
        ("backend=cpu-paged", "cpu"),
        ("revision=123", "123"),
        ("disk_cache_dir=123", "123"),
        ("draft_model=true", "true"),
        ("generation_config=none", "none"),
        ("recompute_strategy=none", "none"),
    ],
)
def test_engine_options_have_their_declared_type(pair, value):
    name = pair.partition("=")[0]
    parsed = engine_options([pair])
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)
    EngineConfig.from_options(**parsed)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("num_blocks=6.5", "num_blocks='6.5' must be an integer"),
        ("strict=1", "strict='1' must be True or False"),
        ("max_memory=much", "max_memory='much' must be a size in bytes"),
    ],
)
def test_engine_options_of_another_type_are_refused(pair, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        EngineConfig.from_options(**engine_options([pair]))


def test_values_may_hold_an_equals_sign():
    assert sampling_options(["stop=a=b"]) == {"stop": ["a=b"]}


def test_stop_may_be_repeated_and_stays_text():
    assert sampling_options(["stop=END", "top_k=4", "stop=7"]) == {"top_k": 4, "stop": ["END", "7"]}


@pytest.mark.parametrize("pair", ["num_blocks", "=3", ""])
def test_malformed_pairs_are_refused(pair):
    assert_raises(ConfigError, "NAME=VALUE", engine_options, [pair])
    assert_raises(ConfigError, "NAME=VALUE", sampling_options, [pair])


def test_pack_cache_is_turned_off_by_flag_or_option():
    assert (
        engine_options(None, {"pack_cache": False})
        == engine_options(["pack_cache=false"])
        == {"pack_cache": False}
    )
    with pytest.raises(ConfigError, match="'pack_cache' is given twice"):
        engine_options(["pack_cache=true"], {"pack_cache": False})


def test_no_options_give_an_empty_dict():
    assert engine_options(None) == {}
    assert sampling_options(None) == {}


@pytest.mark.parametrize(
    ("text", "limit"),
    [("5", 5), (64, 64), ("-1", -1), ("max", None), ("MAX", None), ("None", None)],
)
def test_a_token_limit_is_a_number_or_max(text, limit):
    assert token_limit(text) == limit


def test_an_invalid_token_limit_is_wrong_usage():
    with pytest.raises(typer.BadParameter, match="'many' is neither a whole number nor 'max'"):
        token_limit("many")


@pytest.mark.parametrize("word", ["max", "none", "None"])
def test_max_new_tokens_accepts_the_same_words(word):
    assert sampling_options([f"max_new_tokens={word}"]) == {"max_new_tokens": None}
    assert sampling_options(["max_new_tokens=7"]) == {"max_new_tokens": 7}


def test_no_limit_is_not_sent_to_a_server():
    assert _for_server({"max_new_tokens": None, "top_k": 4}) == {"top_k": 4}
    assert _for_server({"max_new_tokens": 0}) == {"max_tokens": 0}


def test_a_model_is_an_argument_or_an_option():
    assert one_model("a", None) == one_model(None, "a") == one_model(None, None, "a") == "a"
    assert_raises(typer.BadParameter, "given twice", one_model, "a", "b")
    assert_raises(typer.BadParameter, "no model is given; give a directory", one_model, None, None)


def test_every_command_takes_the_model_the_same_way(tiny_model_dir, answered, printed):
    ways = ([tiny_model_dir], ["-m", tiny_model_dir], ["--model", tiny_model_dir])
    assert len({answered("inspect", *way)["fingerprint"] for way in ways}) == 1
    assert f"Model {tiny_model_dir}" in answered("doctor", "-m", tiny_model_dir)
    for wrong in (["inspect"], ["inspect", "a", "-m", "b"], ["doctor", "a", "-m", "b"]):
        assert "model" in printed(*wrong, code=2).err


def test_version_is_printed(printed):
    assert printed("--version").out == f"kvboost-edge {__version__}\n"


def test_supported_families_are_listed_once(tmp_path, printed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    out = printed("doctor", tmp_path, code=1).out
    assert out.count("unknown model type; supported: ") == 1
    assert out.count("refused: see compatibility") == 2


@functools.cache
def _commands():
    """Return the commands by name; building their parsers takes longer than parsing."""
    return typer.main.get_command(app).commands


def _spellings():
    """Return (command, one name, another name) for every option with several names."""
    return [
        (name, parameter.opts[0], other)
        for name, command in _commands().items()
        for parameter in command.params
        if parameter.param_type_name == "option"
        for other in parameter.opts[1:]
    ]


def _parsed(command, *words):
    """Return the parameters that the command's function would receive."""
    known = _commands()[command]
    needed = [p for p in known.params if p.param_type_name == "argument" and p.required]
    given = [{"action": "status", "client": "claude"}.get(p.name, "text") for p in needed]
    return known.make_context(command, [*given, *words]).params


@pytest.mark.parametrize(("command", "one", "other"), _spellings())
def test_spellings_of_an_option_mean_the_same(command, one, other):
    (option,) = (p for p in _commands()[command].params if one in p.opts)
    value = [] if option.is_flag else ["3"]
    first, second = (_parsed(command, spelling, *value) for spelling in (one, other))
    assert first == second
    assert first[option.name] != _parsed(command)[option.name]


@pytest.mark.parametrize("command", ["chat", "demo", "eval", "generate"])
def test_pack_cache_and_no_pack_cache(command):
    assert _parsed(command, "--pack-cache")["pack_cache"] is True
    assert _parsed(command, "--no-pack-cache")["pack_cache"] is False
