"""Tests of the file with the defaults of served models."""

import pytest

from kvboost_edge.errors import ConfigError
from kvboost_edge.server.model_defaults import ModelDefaults, read_model_defaults
from kvboost_edge.server.serve_options import options_from

FILE = """
[chat]
system = "Answer in one word."
temperature = 0.3
dry_multiplier = 0.8
samplers = "dk"

["owner/coder"]
top_k = 9
"""
READ = {
    "chat": ModelDefaults(
        "Answer in one word.",
        {"temperature": 0.3, "dry_multiplier": 0.8, "samplers": ("dry", "top_k")},
    ),
    "owner/coder": ModelDefaults("", {"top_k": 9}),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "defaults.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_the_file_has_a_table_for_each_model(file):
    assert read_model_defaults(file) == READ


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[chat", "is not valid TOML"),
        ("temperature = 1", "'temperature' must be a table"),
        ("[chat]\nsystem = 3", "system=3 must be a string"),
        ("[chat]\ntemprature = 3", "did you mean 'temperature'"),
        ("[chat]\nseed = 3", "'seed' is not a default"),
        ("[chat]\ntop_p = 3", r"top_p=3 must be in \(0, 1\]"),
        ("[chat]\nmirostat = 1", "use mirostat=2"),
        ("x = '" + "x" * (1 << 20) + "'", "more than 1048576 bytes"),
    ],
)
def test_an_invalid_file_is_refused(file, text, message):
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        read_model_defaults(file)
    assert "--model-defaults" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_defaults(tmp_path / "none.toml")


def test_tables_must_name_served_models(file):
    def chosen(*models):
        return options_from({"model": list(models), "model_defaults_file": str(file)}).settings

    settings = chosen("first,chat=owner/a", "owner/coder")
    assert settings.defaults_of("first") == READ["chat"]
    assert settings.defaults_of("owner/coder") == READ["owner/coder"]
    assert settings.defaults_of("other") == ModelDefaults()
    with pytest.raises(ConfigError, match="'owner/coder', which is not served; use one of 'chat'"):
        chosen("chat=./a")
    with pytest.raises(ConfigError, match="two tables for the model 'chat'"):
        chosen("chat,owner/coder=./a")
