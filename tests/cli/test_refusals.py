"""Tests that errors in a request are reported before a model is searched for, loaded or packed."""

import json
import sys

import pytest

from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import install_extra
from kvboost_edge.options import options_of

EACH = pytest.mark.parametrize("command", [["generate", "Hi"], ["chat"]], ids=["generate", "chat"])


@pytest.fixture
def no_model(monkeypatch):
    """Lookup of models that fails the test."""

    def looked_for(*args, **options):
        raise AssertionError("a model was searched for")

    monkeypatch.setattr("kvboost_edge.cli.session.locate_model", looked_for)


@pytest.fixture
def refusal(printed):
    """Function that returns the complete output of a failing command, which must be one line."""

    def call(*argv, code=2):
        (line,) = printed(*argv, code=code).err.strip().splitlines()
        assert line.startswith("kvboost-edge: error: ")
        return line

    return call


@EACH
@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["-s", "temperature=hot"], "temperature='hot' must be a number"),
        (["-s", "temperature=-1"], "temperature=-1"),
        (["-s", "tempratur=1"], "unknown sampling option 'tempratur'"),
        (["-n", "-1"], "max_new_tokens=-1"),
        (["-s", "priority=high"], "priority='high'"),
        (["-s", "regex=("], "regex is not supported: "),
        (["-s", "regex=a", "-s", "grammar=b"], "grammar= and regex= are both given"),
        (["-o", "block_size=7"], "block_size"),
    ],
)
def test_settings_are_checked_before_loading(no_model, command, extra, named, refusal):
    assert named in refusal(*command, *extra)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        ("generate x --temperatur 1", "--temperature"),
        ("generate x --thread 1", "--threads"),
        ("generate x --num-threads 1", "--threads"),
        ("chat --n-predict 5", "--max-new-tokens"),
        ("cache status --jso", "--json"),
        ("serve --prot 1", "--port"),
    ],
)
def test_an_unknown_flag_suggests_the_nearest(printed, argv, meant):
    err = printed(*argv.split(), code=2).err
    given = next(word for word in argv.split() if word.startswith("--"))
    assert f"No such option: {given}. Did you mean {meant}? " in " ".join(err.split())


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("generate x --disk-cache-dir d", "Use -o disk_cache_dir=VALUE."),
        ("generate x --weights int4", "Use -o weights=VALUE."),
        ("doctor --weights int4", "Use -o weights=VALUE."),
        ("bench --weights int4", "Use --option weights=VALUE."),
        ("chat --top-k 40", "Use -s top_k=VALUE."),
        ("chat --priority 1", "Use -s priority=VALUE."),
        ("-o list", "kvboost-edge generate -o list"),
        ("cache status --weights int4", ""),
        ("warmup --top-k 40", ""),
    ],
)
def test_an_engine_option_as_a_flag_names_the_correct_form(printed, argv, advice):
    err = " ".join(printed(*argv.split(), code=2).err.split())
    assert "No such option: -" in err
    assert advice in err
    assert ("Use -" in err) == advice.startswith("Use -")


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("serve ./x.gguf", "Give the model with -m."),
        ("chat ./x.gguf", "Give the model with -m."),
        ("bench ./x.gguf", "Give the model with -m."),
        ("generate Hi x", "Give the model with -m, and put text that contains spaces in quotes."),
        ("doctor x y", "Give the model with -m, and put text that contains spaces in quotes."),
        ("demo ./x.gguf", ""),
    ],
)
def test_an_extra_argument_names_the_option_of_the_model(printed, argv, advice):
    err = " ".join(printed(*argv.split(), code=2).err.replace("│", "").split())
    assert f"({argv.split()[-1]})" in err
    assert advice in err
    assert ("Give the model" in err) == bool(advice)


@pytest.mark.parametrize("argv", ["generate x --xyzzy", "serve --bogus"])
def test_an_unknown_flag_without_a_similar_one_suggests_none(printed, argv):
    err = printed(*argv.split(), code=2).err
    assert f"No such option: {argv.split()[-1]}" in " ".join(err.split())
    assert "Did you mean" not in err


@pytest.mark.parametrize("argv", ["generate x --mode foo", "cache foo", "launch foo"])
def test_a_wrong_choice_is_named_first(printed, argv):
    err = printed(*argv.split(), code=2).err
    assert ": 'foo' is not one of " in " ".join(err.replace("│", "").split())


@pytest.mark.parametrize("argv", ["generate -o list", "generate x -o", "chat --option list"])
def test_the_engine_options_are_listed(no_model, printed, argv):
    lines = printed(*argv.split()).out.splitlines()
    shown = {name for line in lines if not line.startswith(" ") for name in line.split(":")[:1]}
    assert shown == set(options_of(EngineConfig))
    assert "block_size: integer, a multiple of 16, at most 256 (tokens)" in lines
    assert "    Number of tokens in a block of the KV cache. Default: 16" in lines


@pytest.mark.parametrize("argv", ["generate -s list", "generate x -s", "chat --sampling list"])
def test_the_sampling_parameters_are_listed(no_model, printed, argv):
    lines = printed(*argv.split()).out.splitlines()
    shown = {name for line in lines if not line.startswith(" ") for name in line.split(":")[:1]}
    assert shown == {*options_of(SamplingParams), *options_of(Terms)}
    assert "min_p: number, in [0, 1]" in lines


@pytest.mark.parametrize("command", ["generate Hi", "chat", "doctor", "serve"])
def test_an_invalid_context_size_names_the_format(no_model, printed, command):
    err = printed(*command.split(), "--ctx-size", "4k", code=2).err
    assert "'4k' is not a" in err
    assert "is not a whole number such as 4096" in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize("command", ["generate Hi", "bench", "inspect x", "serve"])
def test_invalid_kv_cache_bits_name_the_format(no_model, printed, command):
    err = printed(*command.split(), "--kv-cache-bits", "8,4,4", code=2).err
    assert "must be 16, 8, 4, or a pair such as 8,4" in " ".join(err.replace("│", " ").split())


def test_models_suggest_refuses_engine_options(refusal):
    assert "'weights' has no effect with --suggest" in refusal(
        "models", "--suggest", "-o", "weights=int4"
    )


def test_commands_without_engine_options_list_none(printed):
    assert "No such option: -o" in printed("cache", "-o", code=2).err


@EACH
def test_a_schema_is_checked_before_loading(no_model, command, tmp_path, refusal, monkeypatch):
    file = tmp_path / "schema.json"
    wrong = {"Invalid type: objct": {"type": "objct"}, "does not exist": {"$ref": "#/none"}}
    for named, schema in wrong.items():
        file.write_text(json.dumps(schema))
        line = refusal(*command, "--json-schema", file)
        assert "json_schema: the schema is invalid: " in line
        assert named in line
    monkeypatch.setattr("kvboost_edge.engine.grammar.compiler._is_installed", lambda: False)
    assert install_extra("structured") in refusal(*command, "--json-schema", file, code=1)


@pytest.mark.parametrize("extra", [[], ["--chat"]])
def test_an_empty_prompt_is_refused_before_loading(no_model, extra, refusal, typed):
    typed("")
    for prompt in ("-", ""):
        assert "the prompt is empty" in refusal("generate", prompt, *extra, code=1)


def test_settings_are_checked_before_reading_the_prompt(no_model, refusal, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "temperature" in refusal("generate", "-", "-s", "temperature=hot")


@EACH
def test_more_tokens_than_the_context_are_refused_before_packing(
    command, tiny_model_dir, tmp_path, refusal, monkeypatch
):
    monkeypatch.setenv("KVBOOST_EDGE_CACHE", str(tmp_path))
    line = refusal(*command, "-m", tiny_model_dir, "-n", "100000", code=1)
    assert "the model's context of 512 tokens" in line
    assert "-n max" in line
    assert not (tmp_path / "packed").exists()


def test_eval_options_are_checked_before_loading(no_model, tmp_path, refusal):
    (tmp_path / "text").write_text("Hello")
    argv = ["eval", tmp_path / "text", "--against", "weights=int4", "--against", "wieghts=int8"]
    assert "wieghts" in refusal(*argv)


def test_an_answer_may_fill_the_context(tiny_model_dir, answered, refusal, scale):
    argv = [
        "generate",
        "Hello",
        "-m",
        tiny_model_dir,
        "-s",
        "ignore_eos=true",
        "-o",
        "num_blocks=64",
    ]
    limits = (["-n", "max"], ["-n", "None"], ["-s", "max_new_tokens=None"])
    for limit in limits[: scale(1, 3)]:
        result = answered(*argv, *limit)
        assert result["prompt_tokens"] + result["generated_tokens"] == 512
    assert "-n max" in refusal(*argv, "--json", "-n", "511", code=1)
