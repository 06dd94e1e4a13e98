"""Files of Ollama's converters give the model that the hub's file of the same weights gives."""

import jinja2
import numpy as np
import pytest
from gguf import GGUFWriter

from helpers.gguf.ollama import OllamaChange, write_ollama_layout
from helpers.gguf.writer import save_model, write_gguf
from helpers.models.embedding_models import save_bidirectional_model
from helpers.oracles.packed_plan import plan_floats
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.ollama_layout import in_llama_cpp_layout

QWEN3_5 = OllamaChange(
    keys={"rope.dimension_sections": None, "full_attention_interval": None},
    added={
        "*.ssm.v_head_reordered": True,
        "*.image_token_id": 5,
        "*.rope.mrope_section": [2, 1, 1],
        "*.rope.mrope_interleaved": True,
        "*.vision.block_count": 2,
    },
    tensors={".ssm_dt.bias": ".ssm_dt"},
    parts=("v.patch_embed.weight", "mtp.fc.weight"),
)
CHANGES = {
    "gemma3": (
        "gemma3",
        OllamaChange(
            keys={
                "rope.freq_base": "rope.global.freq_base",
                "rope.freq_base_swa": "rope.local.freq_base",
                "attention.layer_norm_rms_epsilon": None,
            },
            added={"*.mm.tokens_per_image": 256, "*.vision.block_count": 2},
            tokens=3,
            parts=("v.blk.0.attn_q.weight", "mm.mm_input_projection.weight"),
        ),
    ),
    "gemma4": (
        "gemma4-moe",
        OllamaChange(
            tensors={".ffn_down_exps.scale": ".ffn_gate_inp.per_expert_scale"},
            parts=("model.vision_tower.a.weight", "a.blk.0.attn_q.weight"),
        ),
    ),
    "gpt-oss": (
        "gpt_oss",
        OllamaChange(
            "gptoss",
            keys={"rope.scaling.type": None, "expert_feed_forward_length": None},
            tensors={
                ".attn_output.": ".attn_out.",
                ".attn_sinks.weight": ".attn_sinks",
                ".post_attention_norm": ".ffn_norm",
            },
        ),
    ),
    "lfm2": (
        "lfm2",
        OllamaChange(
            keys={"feed_forward_length": None},
            added={"*.feed_forward_length": 12288},
            tensors={"token_embd_norm": "output_norm"},
        ),
    ),
    "ministral 3": (
        "ministral3",
        OllamaChange(
            keys={
                "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
                "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
                "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
                "attention.temperature_scale": "rope.scaling_beta",
            },
            parts=("v.blk.0.attn_q.weight",),
        ),
    ),
    "olmo 3": ("olmo3", OllamaChange("olmo3")),
    "nemotron omni": ("nemotron_h", OllamaChange("nemotron_h_omni")),
    "qwen3.5": ("qwen3_5_text", QWEN3_5),
    "qwen3.5 mixture": (
        "qwen3_5_moe_text",
        QWEN3_5._replace(added={**QWEN3_5.added, "*.norm_top_k_prob": True}),
    ),
}


def both_layouts(name, folder):
    family, change = CHANGES[name]
    hub = write_gguf(save_model(family, folder / "model"), folder / "hub.gguf")
    return hub, write_ollama_layout(hub, folder / "ollama.gguf", change)


@pytest.mark.parametrize("name", CHANGES)
def test_ollamas_layout_gives_the_hubs_model(name, tmp_path):
    hub, ollama = both_layouts(name, tmp_path)
    spec, weights = plan_floats(hub)
    found, stored = plan_floats(ollama)
    assert found == spec
    assert stored.keys() == weights.keys()
    for key, value in weights.items():
        np.testing.assert_array_equal(stored[key], value, err_msg=key)


def test_embedding_gemma_gives_the_hubs_vectors(tmp_path):
    """Ollama calls it gemma3. Its pooling and the sizes of its dense layers follow from that."""
    hub = write_gguf(
        save_bidirectional_model(tmp_path / "model"),
        tmp_path / "hub.gguf",
        keys={"pooling_type": 1},
    )
    ollama = write_ollama_layout(
        hub,
        tmp_path / "ollama.gguf",
        OllamaChange(
            "gemma3",
            keys={
                "pooling_type": None,
                "rope.freq_base_swa": "rope.local.freq_base",
                "rope.freq_base": "rope.global.freq_base",
                **{f"dense_{n}_feat_{side}": None for n in (2, 3) for side in ("in", "out")},
            },
            added={"*.attention.causal": False},
            tensors={
                "dense_2": "dense.0",
                "dense_3": "dense.1",
                "output_norm.weight": "norm.weight",
            },
        ),
    )
    vectors = []
    for path in (hub, ollama):
        with CPUPagedEngine.from_pretrained(path, weights="f32", num_threads=1) as engine:
            vectors.append(engine.embed([list(range(40))]))
    np.testing.assert_array_equal(vectors[1], vectors[0])


def test_gemma3_gets_what_ollama_knew(tmp_path):
    """From 4B on, global layers have linear RoPE. Tokens of images have no row, and the template is
    not in the file.
    """
    small, large = (
        write_ollama_layout(
            write_gguf(
                save_model("gemma3", tmp_path / f"model-{context}"),
                tmp_path / f"hub-{context}.gguf",
                keys={"context_length": context},
            ),
            tmp_path / f"ollama-{context}.gguf",
            OllamaChange(
                keys={
                    "rope.freq_base": None,
                    "rope.freq_base_swa": None,
                    "attention.layer_norm_rms_epsilon": None,
                    "tokenizer.chat_template": None,
                },
                tokens=3,
            ),
        )
        for context in (32768, 131072)
    )
    full = {"rope_theta": 1e6, "partial_rotary_factor": 1.0}
    for path, settings in ((small, full), (large, {**full, "rope_type": "linear", "factor": 8.0})):
        checkpoint = Checkpoint.open(path)
        assert checkpoint.config["rms_norm_eps"] == 1e-6
        assert checkpoint.config["rope_parameters"] == {
            "full_attention": settings,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        metadata = checkpoint.gguf_metadata()
        assert len(metadata["tokenizer.ggml.tokens"]) == checkpoint.config["vocab_size"]
        assert len(metadata["tokenizer.ggml.token_type"]) == checkpoint.config["vocab_size"]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    template = jinja2.Template(metadata["tokenizer.chat_template"])
    assert template.render(messages=turns, bos_token="<bos>", add_generation_prompt=True) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_5_text",
            OllamaChange(tensors={".ssm_dt.bias": ".ssm_dt"}),
            "converted by Ollama, and its value heads are in the order of an early version; use",
        ),
        (
            "qwen3_5_moe_text",
            QWEN3_5._replace(added={**QWEN3_5.added, "*.norm_top_k_prob": False}),
            "norm_top_k_prob is false",
        ),
        (
            "gpt_oss",
            OllamaChange("gptoss", tensors={".attn_q.": ".attn_qkv."}),
            "has the merged matrices of an early version; run `ollama pull` again",
        ),
    ],
)
def test_layouts_that_cannot_be_translated_are_refused(family, change, message, tmp_path):
    hub = write_gguf(save_model(family, tmp_path / "model"), tmp_path / "hub.gguf")
    ollama = write_ollama_layout(hub, tmp_path / "ollama.gguf", change)
    with pytest.raises(ModelFormatError, match=message):
        Checkpoint.open(ollama)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gemma4", "tokenizer.ggml.model"),
        ("mistral3", "tokenizer.ggml.pre"),
        ("nemotron_h_omni", "nemotron_h_omni.expert_count"),
        ("qwen35", "qwen35.ssm.group_count"),
    ],
)
def test_keys_of_another_type_are_refused_by_name(family, key, tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", family)
    writer.add_array(key, [1, 2])
    for name in ("blk.0.ssm_dt", "v.patch_embed.weight"):
        writer.add_tensor(name, np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match=f"key '{key}' must be (str|int)"):
        Checkpoint.open(tmp_path / "m.gguf")


def test_the_hubs_layout_does_not_change(tmp_path):
    for name in ("gemma3", "lfm2", "ministral3", "qwen3_5_text"):
        folder = tmp_path / name
        header = read_gguf(write_gguf(save_model(name, folder), tmp_path / f"{name}.gguf"))
        found = in_llama_cpp_layout(header)
        assert found.values.keys() == header.values.keys()
        assert found.tensors == header.tensors
