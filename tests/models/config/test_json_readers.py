"""config.json and generation_config.json: sizes under all their names, every EOS id, and errors
that name the damaged key.
"""

import json

import pytest

from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.config.json_readers import (
    context_length,
    generation_defaults,
    read_config,
    read_generation_config,
)
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.families.fields import integer_of, number_of

CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def write(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


OLD = {
    "model_type": "gpt2",
    "vocab_size": 9,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 1024,
}
PART = {"model_type": "gemma3", "text_config": {"hidden_size": 8, "num_hidden_layers": 1}}


@pytest.mark.parametrize(
    "config", [CONFIG, OLD, PART], ids=["sound", "older names", "a part of a larger one"]
)
def test_a_valid_config_is_read(config, tmp_path):
    assert read_config(write(tmp_path, config)) == config


def test_older_key_names_are_read():
    assert context_length(OLD) == 1024


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "num_key_value_heads"])
def test_a_missing_key_is_named(tmp_path, key):
    with pytest.raises(ModelFormatError, match=f"config.json.*{key}"):
        read_config(write(tmp_path, {name: value for name, value in CONFIG.items() if name != key}))


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "model_type"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [], 1 << 40])
def test_an_invalid_size_is_named(tmp_path, key, value):
    with pytest.raises(ModelFormatError, match=f"config.json.*{key}"):
        read_config(write(tmp_path, {**CONFIG, key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 66}, "66"),
        ({"head_dim": 0}, "head_dim"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000 must be an integer from 1 to 10000",
        ),
        *(
            ({"quantization_config": value}, "quantization_config must be an object, got")
            for value in ([], 0, "awq", True)
        ),
    ],
)
def test_contradictory_sizes_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelFormatError, match=message):
        read_config(write(tmp_path, {**CONFIG, **changes}))


NEMOTRON = {
    **{
        key: value
        for key, value in CONFIG.items()
        if key not in ("num_hidden_layers", "num_key_value_heads")
    },
    "model_type": "nemotron_h",
    "hidden_size": 98,
    "num_attention_heads": 40,
}


@pytest.mark.parametrize("layers", [{}, {"num_hidden_layers": None}, {"num_hidden_layers": 52}])
@pytest.mark.parametrize(
    "kinds",
    [
        {"layers_block_type": ["mlp", "full_attention", "linear_attention"]},
        {"layer_types": ["mlp", "attention", "mamba"]},
        {"hybrid_override_pattern": "-*M", "layers_block_type": None},
    ],
)
def test_layer_types_determine_the_number_of_layers(tmp_path, layers, kinds):
    assert read_config(write(tmp_path, {**NEMOTRON, **layers, **kinds}))["num_hidden_layers"] == 3


def test_nemotron_heads_need_not_divide_the_hidden_size(tmp_path):
    config = {**NEMOTRON, "hybrid_override_pattern": "-*M", "attention_head_dim": 64}
    assert describe_model(read_config(write(tmp_path, config))).head_dim == 64
    del config["attention_head_dim"]
    assert describe_model(read_config(write(tmp_path, config))).head_dim == 128
    with pytest.raises(
        ModelFormatError, match="hidden_size=98 is not a multiple of num_attention_heads=40"
    ):
        read_config(write(tmp_path, {**CONFIG, "hidden_size": 98, "num_attention_heads": 40}))


@pytest.mark.parametrize("model_type", ["nemotron_h", "falcon_h1"])
def test_missing_key_value_heads_have_a_default(tmp_path, model_type):
    """Without the key there are 8 key and value heads, with null as many as query heads."""
    config = {
        **NEMOTRON,
        "hybrid_override_pattern": "-*M",
        "num_hidden_layers": 2,
        "intermediate_size": 96,
    }
    config |= {"model_type": model_type, "hidden_size": 640, "mamba_n_heads": 16}
    assert describe_model(read_config(write(tmp_path, config))).num_kv_heads == 8
    assert (
        describe_model(
            read_config(write(tmp_path, {**config, "num_key_value_heads": None}))
        ).num_kv_heads
        == 40
    )
    with pytest.raises(
        ModelFormatError, match="num_attention_heads=4 is not a multiple of num_key_value_heads=8"
    ):
        read_config(write(tmp_path, {**config, "num_attention_heads": 4}))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"\xff", b"null", b"[" * 100_000])
def test_damaged_file_is_named(tmp_path, raw):
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"config\.json is missing"):
        read_config(tmp_path)


def test_a_sliding_window_does_not_limit_the_context():
    assert context_length({**CONFIG, "sliding_window": 16}) == 4096
    assert context_length({"text_config": {"max_position_embeddings": 77}}) == 77
    with pytest.raises(ModelFormatError, match="max_position_embeddings"):
        context_length({})


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 2}, None, None, (2,)),
        ({"eos_token_id": [7, 2]}, None, 7, (2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 9]}, 11, (2, 5, 9, 11)),
        ({}, {"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": -1}, None, ()),
        ({"text_config": {"eos_token_id": 4}, "eos_token_id": [1]}, {}, None, (1, 4)),
    ],
)
def test_all_eos_ids_are_collected(tmp_path, config, generation, tokenizer, expected):
    directory = write(tmp_path, {**CONFIG, **config}, generation)
    assert read_generation_config(directory, tokenizer_eos=tokenizer).eos_token_ids == expected
    assert (
        generation_defaults(
            {**CONFIG, **config}, generation or {}, tokenizer_eos=tokenizer
        ).eos_token_ids
        == expected
    )


def test_bos_and_pad_ids():
    found = generation_defaults({"bos_token_id": 1, "pad_token_id": 3}, {"bos_token_id": 2})
    assert (found.bos_token_id, found.pad_token_id, found.eos_token_ids) == (2, 3, ())


@pytest.mark.parametrize("value", ["2", [2, None], 2.0, True])
def test_an_invalid_eos_id_is_named(tmp_path, value):
    with pytest.raises(ModelFormatError, match=r"generation_config\.json.*eos_token_id"):
        read_generation_config(write(tmp_path, CONFIG, {"eos_token_id": value}))


@pytest.mark.parametrize("number", [1, 2])
def test_a_directory_with_a_gguf_file_names_it(number, tmp_path):
    for name in ("a.gguf", "b.gguf")[:number]:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError, match="is missing") as caught:
        read_config(tmp_path)
    assert (f"give the file {tmp_path / 'a.gguf'} as the model" in str(caught.value)) == (
        number == 1
    )


@pytest.mark.parametrize("value", ["x", None, True, float("nan"), -0.1, 1.1, [1]])
def test_a_number_out_of_range_is_named(value):
    assert number_of({"a": 1}, "a", 0, 1) == 1.0
    with pytest.raises(ModelFormatError, match=r"here: a=.* must be a number from 0 to 1"):
        number_of({"a": value}, "a", 0, 1, "here")
    with pytest.raises(ModelFormatError, match=r"config: a=.* must be an integer from 2 to"):
        integer_of({"a": value}, "a", 2)


@pytest.mark.parametrize("key", ["rms_norm_eps", "attention_multiplier", "logits_scaling"])
@pytest.mark.parametrize("value", ["x", float("nan"), -1, 1e40])
def test_an_invalid_number_is_refused_by_every_runner(key, value, tmp_path):
    with pytest.raises(ModelFormatError, match=rf"config\.json: {key}=.* must be a number from"):
        read_config(write(tmp_path, {**CONFIG, key: value}))
    assert read_config(write(tmp_path, {**CONFIG, key: 0.5}))[key] == 0.5


def test_suppressed_tokens_are_read(tmp_path):
    assert generation_defaults(CONFIG, {}).suppressed_token_ids == ()
    assert generation_defaults(CONFIG, {"suppress_tokens": [9, 3, 9, -1]}).suppressed_token_ids == (
        3,
        9,
    )
    assert generation_defaults(CONFIG, {"suppress_tokens": None}).suppressed_token_ids == ()
    directory = write(tmp_path, CONFIG, {"suppress_tokens": [5, 10**6]})
    with pytest.raises(
        ModelFormatError,
        match=r"generation_config.*suppress_tokens contains the id 1000000, outside",
    ):
        read_generation_config(directory)
    with pytest.raises(
        ModelFormatError, match=r"suppress_tokens=.* must be an integer or a list of integers"
    ):
        generation_defaults(CONFIG, {"suppress_tokens": ["x"]})
