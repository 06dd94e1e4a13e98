"""Gemma 4 from GGUF: config and tensors give the model that the file was written from, and
contradictions are refused.
"""

import numpy as np
import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from helpers.gguf.gemma4 import makers_config
from helpers.gguf.writer import write_gguf
from helpers.json_files import read_json
from helpers.models.tensor_files import tensors_of
from helpers.models.tiny_models import FAMILIES, save_tiny_model
from helpers.text.hostile_words import gemma4_metadata
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.host.file_memo import NO_CACHE
from kvboost_edge.kernels.block_rows import decode_rows_entry
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.config.spec import describe_model
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource
from kvboost_edge.models.packed.pack_plan import pack_plan, row_tables
from kvboost_edge.models.packed.stream import packing_entries
from kvboost_edge.runners.native.runner import NativeRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

LAYERS = 8  # of the family; layers 5 and 6 attend to the KV of layer 3, layer 7 to that of layer 4
SMALL = {key: value for key, value in FAMILIES["gemma4"].items() if key != "model_type"}
LARGE = {
    **SMALL,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 8.0,
}
EXPERTS = {
    **LARGE,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
MODELS = {
    "small": SMALL,
    "large": LARGE,
    "shared alone": {**SMALL, "use_double_wide_mlp": False},
    "experts": EXPERTS,
}


def _whole(tensors):
    """Return the experts' matrices as transformers stores them, all of a layer in one."""
    found = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS) if len(found) < len(tensors) else ():
        each = [
            f"model.layers.{layer}.experts.{expert}." for expert in range(EXPERTS["num_experts"])
        ]
        both = [
            torch.cat([tensors[f"{one}{part}_proj.weight"] for part in ("gate", "up")])
            for one in each
        ]
        found[f"model.layers.{layer}.experts.gate_up_proj"] = torch.stack(both)
        down = [tensors[f"{one}down_proj.weight"] for one in each]
        found[f"model.layers.{layer}.experts.down_proj"] = torch.stack(down)
    return found


def test_gate_and_up_may_be_separate_tensors(tmp_path):
    """Files of early converters store gate and up separately. They give the same model."""
    model, whole = _write(tmp_path, EXPERTS)
    more = {}
    for layer in range(LAYERS):
        both = tensors_of(model)[f"model.layers.{layer}.experts.gate_up_proj"]
        gate, up = np.split(both, 2, axis=1)
        more |= {
            f"blk.{layer}.ffn_gate_up_exps.weight": None,
            f"blk.{layer}.ffn_gate_exps.weight": gate.copy(),
            f"blk.{layer}.ffn_up_exps.weight": up.copy(),
        }
    apart = write_gguf(model, tmp_path / "apart.gguf", more=more)
    with GgufSource(read_gguf(whole)) as one, GgufSource(read_gguf(apart)) as other:
        assert one.names() == other.names()
        for name in one.names():
            np.testing.assert_array_equal(one.rows(name), other.rows(name))


BAD_EXPERTS = {
    "no factors of the router": (
        {"more": {"blk.2.ffn_gate_inp.scale": None}},
        "lacks tensor .*router.scale",
    ),
    "no factors of experts": (
        {"more": {"blk.2.ffn_down_exps.scale": None}},
        "lacks tensor .*per_expert_scale",
    ),
    "factors of fewer experts": (
        {"more": {"blk.2.ffn_down_exps.scale": np.ones(5, np.float32)}},
        r"per_expert_scale' has shape \(5,\)",
    ),
    "a factor that is NaN": (
        {"more": {"blk.2.ffn_down_exps.scale": np.array([1, 1, np.nan, 1, 1, 1], np.float32)}},
        "holds NaN",
    ),
    "no norm": (
        {"more": {"blk.2.post_ffw_norm_1.weight": None}},
        "lacks tensor .*post_feedforward_layernorm_1",
    ),
    "fewer experts": ({"keys": {"expert_count": 5}}, r"has shape \(6, 64\), expected \(5, 64\)"),
    "more of a token than there are": (
        {"keys": {"expert_used_count": 7}},
        "top_k_experts=7 exceeds num_experts=6",
    ),
    "another width": (
        {"keys": {"expert_feed_forward_length": 32}},
        r"has shape \(64, 64\), expected \(32, 64\)",
    ),
    "a file that denies them": (
        {"keys": {"expert_count": 0}},
        "is not supported by the native runner",
    ),
    "another factor": (
        {"more": {"blk.2.ffn_up.scale": np.ones(1, np.float32)}},
        r"'blk.2.ffn_up.scale'.* is a factor of 'blk.2.ffn_up.weight' \(F32\)",
    ),
}


@pytest.mark.parametrize("name", BAD_EXPERTS)
def test_contradictory_experts_are_refused(name, tmp_path):
    change, message = BAD_EXPERTS[name]
    _, path = _write(tmp_path, EXPERTS, **change)
    with pytest.raises(ModelFormatError, match=message):
        NativeRunner.from_dir(path, weights="int8", cache_dir=NO_CACHE)


def _write(directory, settings, **options):
    model = save_tiny_model("gemma4_text", directory / "hf", **settings)
    return model, write_gguf(model, directory / "m.gguf", **options)


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_equal_transformers(name, tmp_path):
    """transformers computes the same bits with our config and tensors as with the original."""
    directory, path = _write(tmp_path, MODELS[name])
    config = dict(Checkpoint.open(path, cache_dir=NO_CACHE).config)
    expected = makers_config(read_json(directory / "config.json"))
    changed = {"eos_token_id": [expected["eos_token_id"]]}
    assert {key: config[key] for key in config if key in expected} == {
        key: value for key, value in {**expected, **changed}.items() if key in config
    }
    assert config["global_head_dim"] == 64
    with GgufSource(read_gguf(path)) as source:
        stored = _whole({key: torch.from_numpy(source.rows(key)) for key in source.names()})
    theirs = tensors_of(directory)
    assert stored.keys() == theirs.keys()
    assert "model.layers.3.layer_scalar" in stored
    fields = {
        key: value
        for key, value in config.items()
        if key not in ("attention_output_bias", "mlp_bias")
    }
    ours = Gemma4ForCausalLM(Gemma4TextConfig(**fields)).eval()
    missing, unexpected = ours.load_state_dict(stored, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert unexpected == []
    model = Gemma4ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (1, 60)))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_the_kernel_of_the_per_layer_table_is_compiled_ahead(kind, tmp_path):
    _, path = _write(
        tmp_path, SMALL, kind=lambda name: kind if name == "per_layer_token_embd.weight" else "F32"
    )
    model = Checkpoint.open(path, cache_dir=NO_CACHE)
    spec = describe_model(model.config)
    with model.open_source() as source:
        entries = packing_entries(pack_plan(spec, "f32", source), source, row_tables(spec))
    assert (decode_rows_entry in entries) is (kind == "Q8_0")


def test_the_summary_supports_layers_of_two_sizes(tmp_path):
    _, path = _write(tmp_path, SMALL)
    assert Checkpoint.open(path, cache_dir=NO_CACHE).summary().num_params > 0


METADATA = gemma4_metadata()
TOKENS = METADATA["tokenizer.ggml.tokens"]
WORDED = {**SMALL, "vocab_size": len(TOKENS), "vocab_size_per_layer_input": len(TOKENS)}


def test_a_gguf_file_is_enough_for_chat(tmp_path):
    """Tokenizer, template and end tokens come from the file. Answers end with a turn or a call."""
    template = (
        "{{ bos_token }}{% for m in messages %}<|turn>{{ m['role'] }}\\n{{ m['content'] "
        "}}<turn|>\\n{% endfor %}"
    )
    _, path = _write(tmp_path, WORDED, tokenizer={**METADATA, "tokenizer.chat_template": template})
    assert Checkpoint.open(path).generation().eos_token_ids == tuple(
        sorted(TOKENS.index(token) for token in ("<eos>", "<turn|>", "<|tool_response>"))
    )
    with CPUPagedEngine.from_pretrained(path, weights="f32", num_blocks=32) as engine:
        ids = engine.tokenizer.encode_chat([{"role": "user", "content": "a  b"}])
        assert [TOKENS[token] for token in ids[:2]] == ["<bos>", "<|turn>"]
        answer = engine.generate([{"role": "user", "content": "a  b"}], max_new_tokens=6)
        assert 1 <= len(answer.output_token_ids) <= 6
        again = engine.generate(ids, max_new_tokens=6)
        assert again.output_token_ids == answer.output_token_ids


def test_suppressed_tokens_of_a_file_are_never_generated(tmp_path):
    """Neither the most likely token nor its successors are generated once they are suppressed."""
    model, path = _write(tmp_path, WORDED, tokenizer=METADATA)
    suppressed = []
    for number in range(3):
        with CPUPagedEngine.from_pretrained(path, weights="f32", num_blocks=32) as engine:
            answer = engine.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).output_token_ids
            sampled = engine.generate(
                [5, 6, 7], max_new_tokens=9, ignore_eos=True, temperature=3.0, seed=1
            )
        assert not set(suppressed) & {*answer, *sampled.output_token_ids}
        suppressed.append(answer[0])
        given = {**METADATA, "tokenizer.ggml.suppress_tokens": suppressed}
        path = write_gguf(model, tmp_path / f"{number}.gguf", tokenizer=given)
    assert len(set(suppressed)) == 3
    for wrong, message in (
        ([10**6], "suppress_tokens contains the id 1000000, outside the vocabulary"),
        ("5", "suppress_tokens='5' must be a list of token ids"),
    ):
        given = {**METADATA, "tokenizer.ggml.suppress_tokens": wrong}
        path = write_gguf(model, tmp_path / "wrong.gguf", tokenizer=given)
        with pytest.raises(ModelFormatError, match=message):
            Checkpoint.open(path).generation()


def test_unused_tensors_of_shared_layers_are_ignored(tmp_path):
    """The makers' checkpoints contain such tensors, and the converter writes them."""
    unused = np.ones((64, 64), np.float32)
    _, path = _write(
        tmp_path, SMALL, more={"blk.5.attn_k.weight": unused, "blk.5.attn_v.weight": unused}
    )
    without = write_gguf(tmp_path / "hf", tmp_path / "without.gguf")
    assert (
        Checkpoint.open(path, cache_dir=NO_CACHE).config
        == Checkpoint.open(without, cache_dir=NO_CACHE).config
    )


TABLE = "per_layer_token_embd.weight"
ONES = np.ones(32, np.float32)
SLIDES = [True, True, False, True, False, True, True, False]
REFUSED = {
    "no table": (
        SMALL,
        {"more": {TABLE: None}},
        f"lacks the tensor '{TABLE}', which .*per_layer_input=16 needs",
    ),
    "another table": (
        SMALL,
        {"more": {TABLE: np.ones((300, 127), np.float32)}},
        r"contradicts .*\(300, 127\)",
    ),
    "fewer rows": (
        SMALL,
        {"more": {TABLE: np.ones((299, 128), np.float32)}},
        r"contradicts .*\(299, 128\)",
    ),
    "a table of no width": (
        SMALL,
        {"keys": {"embedding_length_per_layer_input": 0}},
        "per_layer_input=0 contradicts the tensor",
    ),
    "no pattern": (
        SMALL,
        {"keys": {"attention.sliding_window_pattern": 6}},
        "pattern=6 must be true",
    ),
    "a short pattern": (
        SMALL,
        {"keys": {"attention.sliding_window_pattern": SLIDES[1:]}},
        "an entry for each of the 8 layers",
    ),
    "a long list of widths": (
        SMALL,
        {"keys": {"feed_forward_length": [96] * 9}},
        "has 9 entries, but the model has 8 layers",
    ),
    "three widths": (
        SMALL,
        {"keys": {"feed_forward_length": [96, 97, *[96] * 6]}},
        "must be the same for the first 5 layers",
    ),
    "another width of sharing layers": (
        SMALL,
        {"keys": {"feed_forward_length": [96] * 5 + [288] * 3}},
        "the same or twice as large for the others",
    ),
    "a list of no width": (
        SMALL,
        {"keys": {"feed_forward_length": [0] * 8}},
        "feed_forward_length=0 must be",
    ),
    "heads of no kind": (
        LARGE,
        {"keys": {"attention.head_count_kv": [2, 1, 1, 2, 1, 2, 2, 1]}},
        "one number for sliding layers",
    ),
    "few heads": (
        LARGE,
        {"keys": {"attention.head_count_kv": [2] * 7}},
        "has 7 entries, but the model has 8 layers",
    ),
    "other heads with values": (
        SMALL,
        {"keys": {"attention.head_count_kv": [2 if slide else 1 for slide in SLIDES]}},
        "only for full layers without values",
    ),
    "all shared": (
        SMALL,
        {"keys": {"attention.shared_kv_layers": 8}},
        "shared_kv_layers=8 must be less than the number of layers, 8",
    ),
    "more shared": (
        SMALL,
        {"keys": {"attention.shared_kv_layers": 2**31}},
        "shared_kv_layers=2147483648 must be less than",
    ),
    "values of some layers": (
        LARGE,
        {"more": {"blk.2.attn_v.weight": np.ones((64, 64), np.float32)}},
        "lacks the tensor 'blk.4.attn_v.weight'",
    ),
    "no values where it slides": (
        SMALL,
        {"more": {"blk.0.attn_v.weight": None}},
        "'blk.0.attn_v.weight'; only full-attention layers",
    ),
    "values of another length": (
        SMALL,
        {"keys": {"attention.value_length_swa": 16}},
        "length_swa=16 must equal .*32",
    ),
    "a rope of a part": (
        SMALL,
        {"keys": {"rope.dimension_count_swa": 16}},
        "dimension_count_swa=16 must equal .*32",
    ),
    "no rope": (
        SMALL,
        {"more": {"rope_freqs.weight": None}},
        "lacks the tensor 'rope_freqs.weight'",
    ),
    "another rope": (
        SMALL,
        {"more": {"rope_freqs.weight": 2 * ONES}},
        "must be ones followed by 1e\\+30",
    ),
    "a rope that turns late": (
        SMALL,
        {"more": {"rope_freqs.weight": np.where(np.arange(32) < 8, 1e30, 1).astype(np.float32)}},
        "must be ones",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictory_files_are_refused(name, tmp_path):
    settings, change, message = REFUSED[name]
    _, path = _write(tmp_path, settings, **change)
    with pytest.raises(ModelFormatError, match=message) as caught:
        _ = Checkpoint.open(path, cache_dir=NO_CACHE).config
    assert "m.gguf" in str(caught.value)
