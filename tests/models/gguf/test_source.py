"""GGUF files as models: tensors, configs and logits equal those of the safetensors model that they
were written from.
"""

import logging

import numpy as np
import pytest
from gguf import GGUFWriter

from helpers.distance import distance
from helpers.gguf.writer import (
    FAMILIES,
    WIDE,
    gguf_tensors,
    save_gguf,
    save_model,
    write_gguf,
)
from helpers.json_files import change_json
from helpers.models.specs import spec_of
from helpers.models.tensor_files import change_tensors, tensors_of
from helpers.models.tiny_models import save_nested_model, save_tiny_model
from helpers.oracles.bit_cases import native_logits
from helpers.raising import assert_raises
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ConfigError, ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.locate import locate_model
from kvboost_edge.models.weights.safetensors_source import SafetensorsSource
from kvboost_edge.models.weights.stacked_experts import ColumnExperts


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if not name.startswith(("granitemoehybrid", "minicpm"))]
)
def test_each_family_equals_safetensors(name, tmp_path):
    model = save_model(name, tmp_path / "model")
    path = write_gguf(model, tmp_path / "m.gguf")
    exact = name not in ("gemma", "gemma2", "gemma3")
    directory = ColumnExperts if name == "gpt_oss" else SafetensorsSource
    with GgufSource(read_gguf(path)) as ours, directory(model) as theirs:
        assert ours.names() == theirs.names() - {
            "lm_head.weight" if FAMILIES[name].get("tie_word_embeddings") else ""
        }
        for tensor in ours.names():
            assert ours.shape(tensor) == theirs.shape(tensor)
            # Gemma's norms are stored with 1 added, which rounds.
            np.testing.assert_allclose(
                ours.rows(tensor), theirs.rows(tensor), rtol=0, atol=0 if exact else 2e-7
            )
    assert_specs_equal(path, model, () if name not in ("mistral", "mistral3") else NAMES)
    ours_logits = native_logits(path)
    theirs_logits = native_logits(model)
    if exact:
        np.testing.assert_array_equal(ours_logits, theirs_logits)
    else:
        assert distance(ours_logits, theirs_logits) <= 1e-5


NAMES = ("model_type", "family")


def assert_specs_equal(path, model, but):
    """Assert that two models have the same spec except for these fields; return the first one."""
    spec = spec_of(path)
    expected = spec_of(model)
    for field in set(spec.__dataclass_fields__) - {*but}:
        assert getattr(spec, field) == getattr(expected, field), field
    return spec


@pytest.mark.parametrize("name", ["granitemoehybrid", "granitemoehybrid-nope"])
def test_granite_4_without_experts_is_read_as_granite(name, tmp_path):
    """The converter splits its matrix of gate and up."""
    model = save_tiny_model(name, tmp_path / "model")
    path = write_gguf(model, tmp_path / "m.gguf")
    spec = assert_specs_equal(path, model, NAMES)
    assert spec.model_type == "granite"
    assert {layer.rope for layer in spec.layers} == {-1 if name.endswith("nope") else 0}
    np.testing.assert_array_equal(native_logits(path), native_logits(model))


def test_rows_and_tensors_that_a_file_lacks_are_refused(tmp_path):
    name = "model.layers.1.self_attn.k_proj.weight"
    with GgufSource(read_gguf(save_gguf("llama", tmp_path))) as source:
        assert_raises(ModelFormatError, "rows 60 to 70 are out of range", source.rows, name, 60, 70)
        assert_raises(ModelFormatError, "lacks tensor 'nothing'", source.rows, "nothing")


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_engine_equals_safetensors(kind, tmp_path):
    model = save_tiny_model("llama", tmp_path / "model")
    path = write_gguf(model, tmp_path / "m.gguf", kind=kind)
    if kind == "F16":  # the checkpoint is rounded in the same way
        _round_to_half(model)
    results = []
    for source in (path, str(model)):
        options = {"weights": "f32", "runner": "native", "backend": "cpu", "num_blocks": 32}
        with CPUPagedEngine.from_pretrained(source, **options) as engine:
            ids = engine.tokenizer.encode("the quick brown fox")
            messages = [{"role": "user", "content": "hi there"}]
            results.append(
                (
                    ids,
                    engine.logits(ids).tolist(),
                    engine.generate("hello", max_new_tokens=12).output_token_ids,
                    engine.generate(messages, max_new_tokens=4).output_token_ids,
                    engine.tokenizer.encode_chat(messages),
                )
            )
    assert results[0] == results[1]


def _round_to_half(model):
    halves = {n: t.astype(np.float16) for n, t in tensors_of(model).items() if t.ndim == 2}
    change_tensors(model, {n: t.astype(np.float32) for n, t in halves.items()})


def test_torch_runner_is_refused(tmp_path):
    path = save_gguf("llama", tmp_path)
    with pytest.raises((ConfigError, ModelFormatError), match="GGUF"):
        CPUPagedEngine.from_pretrained(path, runner="torch", num_blocks=8)


def test_path_summary_and_fingerprint_of_a_file(tmp_path):
    model = save_tiny_model("llama", tmp_path / "model", **WIDE)
    paths = [write_gguf(model, tmp_path / f"{kind}.gguf", kind=kind) for kind in ("Q8_0", "F16")]
    assert locate_model(paths[0]) == paths[0].resolve()
    assert locate_model(str(paths[0])) == paths[0].resolve()
    for missing in (tmp_path / "none.gguf", "none.gguf"):
        with pytest.raises(ModelFormatError, match="does not exist; check the path"):
            locate_model(missing)
    summary = Checkpoint.open(paths[0]).summary()
    assert summary.files == (paths[0],)
    assert summary.num_params == sum(t.size for t in gguf_tensors(model).values())
    assert set(summary.dtypes) == {"F32", "Q8_0"}
    assert len({Checkpoint.open(path).fingerprint() for path in (*paths, model)}) == 3
    moved = paths[0].rename(tmp_path / "other-name.gguf")
    assert Checkpoint.open(moved).fingerprint() == Checkpoint.open(moved).fingerprint()
    assert Checkpoint.open(moved).generation().eos_token_ids == (258,)
    with Checkpoint.open(moved).open_source() as source:
        assert isinstance(source, GgufSource)
        assert source.file_of("model.norm.weight") == moved


def _file(path, arch="llama", *, drop="", tensors=None, **keys):
    """Write a GGUF file of one tiny layer, with keys changed or dropped and tensors added or
    replaced.
    """
    sizes = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    sizes.update({key.replace("__", "."): value for key, value in keys.items()})
    writer = GGUFWriter(path, arch)
    for key, value in sizes.items():
        if key == drop:
            continue
        name = f"{arch}.{key}" if not key.startswith(("split", "tokenizer")) else key
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    values = {"token_embd.weight": np.ones((40, 32), dtype=np.float32), **(tensors or {})}
    for name, tensor in values.items():
        if tensor is not None:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONES = np.ones(8, dtype=np.float32)
REFUSED = {
    "no context": ({"drop": "context_length"}, "lacks the key 'llama.context_length'"),
    "no eps": (
        {"drop": "attention.layer_norm_rms_epsilon"},
        "llama.attention.layer_norm_rms_epsilon",
    ),
    "no heads": ({"drop": "attention.head_count"}, "llama.attention.head_count"),
    "zero heads": ({"attention__head_count": 0}, "head_count=0 must be an integer from 1"),
    "text for a size": ({"block_count": "two"}, "block_count='two'"),
    "heads per layer": ({"attention__head_count_kv": [1, 2]}, "head_count_kv"),
    "odd heads": ({"attention__head_count_kv": 3}, "not a multiple of 3"),
    "values of another length": (
        {"attention__key_length": 16, "attention__value_length": 8},
        "value_length=8",
    ),
    "other vocabulary": ({"vocab_size": 41}, "vocab_size=41.*40 rows"),
    "other width": ({"embedding_length": 64}, "embedding_length=64.*32 columns"),
    "too many tokens": (
        {"tokenizer__ggml__tokens": [str(i) for i in range(41)]},
        "41 tokens.*40 rows",
    ),
    "eos beyond": ({"tokenizer__ggml__eos_token_id": 40}, "eos_token_id=40 is outside"),
    "no embedding": ({"tensors": {"token_embd.weight": None, "x": ONES}}, "token_embd.weight"),
    "experts": ({"expert_count": 8}, "lacks the key 'llama.expert_used_count'"),
    "encoder": ({"attention__causal": False}, "attention.causal=False"),
    "unknown key": ({"attention__clamp_kqv": 8.0}, "'llama.attention.clamp_kqv' is not supported"),
    "too many layers": (
        {"block_count": 1 << 31},
        "block_count=2147483648 must be an integer from 1 to 10000",
    ),
    "a window llama has not": (
        {"attention__sliding_window": 8},
        "'llama.attention.sliding_window' is not supported",
    ),
    "a scale llama has not": ({"logit_scale": 0.5}, "'llama.logit_scale' is not supported"),
    "infinite base": ({"rope__freq_base": float("inf")}, "rope.freq_base=inf"),
    "rope type": ({"rope__scaling__type": "longrope"}, "rope.scaling.type='longrope'"),
    "yarn without factor": ({"rope__scaling__type": "yarn"}, "rope.scaling.factor"),
    "a factor of yarn": (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 8.0,
            "rope__scaling__yarn_attn_factor": 1.3,
            "rope__scaling__original_context_length": 32,
        },
        "yarn_attn_factor=1.3 .*supported: 1 and 1.20794",
    ),
    "long factors": (
        {"tensors": {"rope_factors_long.weight": ONES}},
        "lacks tensor 'rope_factors_short.*longrope",
    ),
    "factors of two kinds": (
        {
            "tensors": {f"rope_factors_{name}.weight": ONES for name in ("long", "short")},
            "rope__scaling__type": "linear",
        },
        "'linear' contradicts the tensor 'rope_factors_short",
    ),
    "factors": ({"tensors": {"rope_freqs.weight": ONES[:7]}}, r"rope_freqs.weight.*\(8,\)"),
    "negative factors": ({"tensors": {"rope_freqs.weight": -ONES}}, "rope_freqs.weight.*positive"),
    "two rope scalings": (
        {"tensors": {"rope_freqs.weight": ONES}, "rope__scaling__type": "yarn"},
        "contradicts the tensor",
    ),
    "odd rope": ({"rope__dimension_count": 7}, "rope.dimension_count=7"),
    "part of a file": ({"split__count": 2}, "one of 2 parts.*does not end in -00001-of-00002.gguf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_metadata_is_refused(name, tmp_path):
    change, message = REFUSED[name]
    path = _file(tmp_path / "m.gguf", **change)
    with pytest.raises(ModelFormatError, match=message) as caught:
        _ = Checkpoint.open(path).config
    assert "m.gguf" in str(caught.value)


def test_neutral_values_are_accepted(tmp_path):
    neutral = {
        "attention__sliding_window": 0,
        "rope__scaling__attn_factor": 1.0,
        "logit_scale": 1.0,
        "pooling_type": 0,
    }
    assert (
        Checkpoint.open(_file(tmp_path / "m.gguf", **neutral)).config
        == Checkpoint.open(_file(tmp_path / "p.gguf")).config
    )


def test_vision_tensors_are_ignored(tmp_path, caplog):
    """Ollama's blobs contain such tensors and keys."""
    model = save_nested_model("qwen3_vl", tmp_path / "model")
    expected = native_logits(write_gguf(model, tmp_path / "m.gguf"))
    other = {
        f"{name}.weight": ONES for name in ("v.blk.0.attn_q", "v.patch_embd", "mm.0", "a.conv1")
    }
    path = write_gguf(
        model, tmp_path / "o.gguf", keys={"vision.block_count": 1, "mm.tokens": 4}, more=other
    )
    assert Checkpoint.open(path).format == "GGUF F32"
    Checkpoint.open(path).summary()
    with caplog.at_level(logging.INFO, "kvboost_edge"):
        np.testing.assert_array_equal(native_logits(path), expected)
    assert "text only; tensors of a (1), mm (1), v (2) are not used" in caplog.text


@pytest.mark.parametrize("has_output_bias", [True, False])
def test_a_missing_output_bias_is_zero(has_output_bias, tmp_path):
    """Llama in transformers has all four biases or none. A file may lack the last one, which then
    is zero.
    """
    model = save_tiny_model("llama", tmp_path / "model", attention_bias=True, **WIDE)
    biases = {
        n: np.zeros_like(t) for n, t in tensors_of(model).items() if n.endswith("o_proj.bias")
    }
    change_tensors(model, biases)
    expected = native_logits(model)
    if not has_output_bias:
        change_tensors(model, dict.fromkeys(biases))
    path = write_gguf(model, tmp_path / "m.gguf")
    assert spec_of(path).output_bias == has_output_bias
    np.testing.assert_array_equal(native_logits(path), expected)


def test_errors_name_the_file_and_the_gguf_key(tmp_path):
    path = _file(
        tmp_path / "m.gguf",
        block_count=3,
        tensors={"blk.0.attn_norm.weight": np.ones(32, dtype=np.float32)},
    )
    with pytest.raises(
        ModelFormatError,
        match=r"m\.gguf: layer 1 has no tensors, but m\.gguf gives num_hidden",
    ):
        Checkpoint.open(path).summary()


REFUSED_ARCHITECTURES = {
    "falcon": "Falcon models of 2023",
    "bert": "it is an encoder",
    "bitnet-b1.58": "bitnet.cpp; use the safetensors",
}


def test_unknown_architectures_and_tensors_are_refused(tmp_path):
    with pytest.raises(
        ModelFormatError,
        match=r"'plamo'.*supported: bitnet, ernie4_5, ernie4_5-moe, exaone4, falcon-h1, gemma",
    ):
        _ = Checkpoint.open(_file(tmp_path / "plamo.gguf", "plamo")).config
    for arch, reason in REFUSED_ARCHITECTURES.items():
        with pytest.raises(ModelFormatError, match=rf"'{arch}' is not supported .*\(.*{reason}"):
            _ = Checkpoint.open(_file(tmp_path / f"{arch}.gguf", arch)).config
    for arch in (
        "deepseek2",
        "glm-dsa",
    ):  # DeepSeek, Kimi K2 and GLM-4.7-Flash; GLM-5
        path = _file(tmp_path / "latent.gguf", arch, attention__kv_lora_rank=512)
        with pytest.raises(
            ModelFormatError,
            match=rf"'{arch}' is not supported in GGUF files \(its multi-head latent attention",
        ):
            _ = Checkpoint.open(path).config
    path = _file(tmp_path / "m.gguf", tensors={"blk.0.ssm_in.weight": ONES})
    with pytest.raises(
        ModelFormatError, match=r"ssm_in.weight.*not supported for the architecture llama"
    ):
        Checkpoint.open(path).open_source()


def test_partial_rope_and_per_layer_head_counts_are_read(tmp_path):
    path = _file(
        tmp_path / "m.gguf",
        rope__dimension_count=8,
        attention__head_count_kv=[2],
        rope__scale_linear=4.0,
    )
    spec = spec_of(path)
    assert spec.num_kv_heads == 2
    assert (spec.ropes[0].half, spec.ropes[0].frequencies[0]) == (4, 0.25)


def test_yarns_default_factor_may_be_given(tmp_path):
    """OLMo 3's config sets it explicitly."""
    yarn = {"type": "yarn", "factor": 8.0, "original_context_length": 32}
    keys = {f"rope__scaling__{key}": value for key, value in yarn.items()}
    spelled = _file(tmp_path / "m.gguf", **keys, rope__scaling__yarn_attn_factor=1.2079441541679836)
    assert (
        Checkpoint.open(spelled).config
        == Checkpoint.open(_file(tmp_path / "p.gguf", **keys)).config
    )


@pytest.mark.parametrize(
    ("keys", "windows"), [({}, [4096] * 3 + [0]), ({"attention__sliding_window": 0}, [0] * 4)]
)
def test_exaone4_with_64_layers_has_windows_by_default(keys, windows, tmp_path):
    spec = spec_of(_file(tmp_path / "m.gguf", "exaone4", block_count=64, **keys))
    assert [layer.window for layer in spec.layers] == windows * 16
    assert [layer.rope for layer in spec.layers] == [
        -1 if 4096 in windows and not w else 0 for w in windows
    ] * 16


# The last tokens of 40 with their types, the EOS id, and all ids that end a turn. <|end|> ends a
# message of the turn if calls and turns have separate end tokens, and otherwise the turn. Gemma 4's
# file declares <|tool_response>, after which the caller must answer a call, as visible text.
ENDINGS = {
    "by text": ({"t37": 1, "t38": 1, "<|im_end|>": 3}, 5, (5, 7, 39)),
    "calls": ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, 38, (38, 39)),
    "no calls": ({"<|end|>": 3, "<|return|>": 3, "t39": 3}, 38, (37, 38)),
    "gemma4": ({"<turn|>": 3, "<|tool_response>": 4, "<|im_end|>": 4}, 1, (1, 37, 38)),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_end_of_turn_ids_are_found(name, tmp_path):
    last, eos, expected = ENDINGS[name]
    keys = {
        "tokens": [*(f"t{i}" for i in range(37)), *last],
        "token_type": [1] * 37 + [*last.values()],
    }
    keys |= {"eos_token_id": eos, **({"eot_token_id": 7} if name == "by text" else {})}
    path = _file(
        tmp_path / "m.gguf", **{f"tokenizer__ggml__{key}": value for key, value in keys.items()}
    )
    assert Checkpoint.open(path).generation().eos_token_ids == expected


def test_shapes_that_contradict_the_metadata_are_refused(tmp_path):
    model = save_tiny_model("llama", tmp_path / "model")
    change_json(model / "config.json", num_hidden_layers=4)
    path = write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(ModelFormatError, match="layer 3"):
        Checkpoint.open(path).summary()
