"""Faults in how files of models are read."""

from __future__ import annotations

from faults.fault import fault
from faults.suites import GEMMA4, GEMMA4_EXPERTS, SPARSE

_GGUF = "tests/models/gguf/test_hybrids.py"
_PACKED = "tests/models/test_hybrids.py::test_the_packed_tensors_are_the_model_of_transformers"
_SAME = f"{_GGUF}::test_a_gguf_file_is_the_same_model"

FAULTS = (
    fault(
        "NaN weights are accepted",
        "models/weights/safetensors_check.py",
        "    if check_finite:",
        "    if False:",
        "tests/models",
    ),
    fault(
        "headers of any size are read, however little they describe",
        "models/weights/safetensors_check.py",
        "if length > max(_SMALL_HEADER_BYTES, (size - 8 - length) // _DATA_PER_HEADER):",
        "if False:",
        "tests/models/weights/test_safetensors_check.py",
    ),
    fault(
        "a layer shares with the one so many before it",
        "models/families/gemma4.py",
        "shapes.append(LayerShape(dim, kv_heads, wider * inner, giver, owns_kv=False))",
        "shapes.append(LayerShape(dim, kv_heads, wider * inner, index - shared, owns_kv=False))",
        *GEMMA4,
    ),
    fault(
        "scores are divided by the root of the head's size",
        "models/families/gemma4.py",
        "scale=1.0,",
        "",
        *GEMMA4,
    ),
    fault(
        "layers behind the last mixture have experts",
        "models/families/ernie4_5.py",
        "start <= index <= end",
        "start <= index",
        "tests/runners/native/test_families.py::test_variant_equals_transformers[ernie4_5_moe-end]",
    ),
    fault(
        "shares are not divided by their sum",
        "models/families/moe.py",
        'return "add" if',
        'return "" if',
        *SPARSE,
    ),
    fault(
        "shares are divided by their sum unasked",
        "models/families/moe.py",
        '"norm_topk_prob", False) else ""',
        '"norm_topk_prob", False) else "add"',
        *SPARSE,
    ),
    fault(
        "softmax stands before the choice of the shares",
        "models/families/granite.py",
        'score="chosen", ',
        "",
        *SPARSE,
    ),
    fault(
        "gate and up are exchanged",
        "models/weights/split_experts.py",
        '_GATE_UP = ("gate_proj", "up_proj")',
        '_GATE_UP = ("up_proj", "gate_proj")',
        *SPARSE,
        "tests/models/weights/test_experts.py",
    ),
    fault(
        "norms behind the MLP and behind the experts are exchanged",
        "models/families/gemma4.py",
        'norms=(f"{after}_1", "pre_feedforward_layernorm_2", f"{after}_2")',
        'norms=(f"{after}_2", "pre_feedforward_layernorm_2", f"{after}_1")',
        *GEMMA4_EXPERTS,
    ),
    fault(
        "an expert's matrix is read whole for every piece of it",
        "models/gguf/source.py",
        ("        first = start\n        last = stop\n        pick = None\n"),
        (
            "        first = 0\n"
            "        last = tensor.shape[0]\n"
            "        pick = np.arange(start, stop)\n"
        ),
        "tests/models/packed/test_memory.py::test_a_few_rows_of_an_expert_are_read_alone",
    ),
    fault(
        "blocks of all experts are read for every piece",
        "models/weights/stacked_experts.py",
        '        packed = self._span(f"{piece.whole}_blocks", 4, first, rows, groups * _BLOCK_BYTES)\n',
        '        every = self._files.stored_shape(f"{piece.whole}_blocks", "U8", 4)[0] * each\n'
        '        packed = self._span(f"{piece.whole}_blocks", 4, 0, every, groups * _BLOCK_BYTES)'
        "[first : first + rows]\n",
        "tests/models/packed/test_memory.py::test_a_few_rows_of_an_expert_are_read_alone",
    ),
    fault(
        "gate and up take each other's turns",
        "models/weights/stacked_experts.py",
        '("gate_proj", "up_proj")',
        '("up_proj", "gate_proj")',
        "tests/models/weights/test_stacked_experts.py::test_columns_take_turns",
    ),
    fault(
        "nibbles of safetensors in the other order",
        "models/weights/stacked_experts.py",
        "np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)",
        "np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=-1)",
        "tests/models/weights/test_stacked_experts.py::test_mxfp4_is_what_transformers_makes_of_it",
    ),
    fault(
        "borders of yarn are rounded in files that do not say it",
        "models/families/gpt_oss.py",
        'rope["truncate"] = False',
        'rope["truncate"] = True',
        "tests/runners/native/test_gpt_oss.py::test_borders_of_yarn_are_no_whole_numbers",
    ),
    fault(
        "the end of a message ends the answer",
        "models/gguf/metadata_config.py",
        "in_messages = set(vocabulary) >= _TURN_ENDINGS",
        "in_messages = False",
        "tests/models/gguf/test_source.py::test_the_endings_of_turns_in_messages",
    ),
    fault(
        "taps stand from the newest on",
        "models/weights/ordered.py",
        "(values.T).reshape",
        "(values.T[::-1]).reshape",
        f"{_PACKED}[lfm2]",
    ),
    fault(
        "states grow",
        "models/weights/ordered.py",
        "(-np.exp(values",
        "(np.exp(values",
        f"{_PACKED}[qwen3_5_text]",
    ),
    fault(
        "gates stand before queries",
        "models/weights/ordered.py",
        "dim * (_GATE in name)",
        "dim * (_GATE not in name)",
        f"{_PACKED}[qwen3_5_text]",
    ),
    fault(
        "norms of mixers have 1 on top",
        "models/packed/pack_plan.py",
        "PackEntry(name, VECTOR, ((tensor, count),)) for",
        "PackEntry(name, VECTOR, ((tensor, count),), offset=spec.family.norm_offset) for",
        f"{_PACKED}[qwen3_5_text]",
    ),
    fault(
        "sigmoids are not divided by their sum",
        "models/families/lfm2.py",
        'renorm="add" if flag_of(config, "norm_topk_prob", True) else ""',
        'renorm=""',
        f"{_PACKED}[lfm2_moe]",
    ),
    fault(
        "one layer more has no experts",
        "models/families/lfm2.py",
        "index >= dense",
        "index > dense",
        f"{_PACKED}[lfm2_moe]",
    ),
    fault(
        "shares of Qwen3.5's experts are as they are",
        "models/families/qwen3_5.py",
        '"norm_topk_prob": True,',
        '"norm_topk_prob": False,',
        f"{_PACKED}[qwen3_5_moe_text]",
    ),
    fault(
        "the width of an MLP is the config's",
        "models/families/lfm2.py",
        "= _adjusted_width(found)",
        '= found["intermediate_size"]',
        "tests/models/families/test_ssm.py",
    ),
    fault(
        "value heads of files follow their key heads",
        "models/families/qwen3_5.py",
        "TILED_HEADS: True",
        "TILED_HEADS: False",
        f"{_SAME}[qwen3_5_text]",
    ),
    fault(
        "layers that guess ahead are the model's",
        "models/families/gguf_keys.py",
        "return found - ahead",
        "return found",
        f"{_GGUF}::test_layers_that_guess_ahead_are_counted_among_the_blocks_and_not_used",
    ),
    fault(
        "the norm of mixers is read with 1 less",
        "models/gguf/source.py",
        " and not name.endswith(_PLAIN_NORM)",
        "",
        f"{_SAME}[qwen3_5_text]",
    ),
    fault(
        "gate and up of LFM2's files change places",
        "models/families/lfm2.py",
        ('    "ffn_gate": "feed_forward.w1",\n    "ffn_up": "feed_forward.w3",\n'),
        ('    "ffn_gate": "feed_forward.w3",\n    "ffn_up": "feed_forward.w1",\n'),
        f"{_SAME}[lfm2]",
    ),
    fault(
        "states of Granite 4 grow",
        "models/weights/ordered.py",
        "(-np.exp(values",
        "(np.exp(values",
        f"{_PACKED}[granitemoehybrid-h]",
    ),
    fault(
        "results are gated behind their norm",
        "models/families/granite.py",
        '"gated_before"',
        '"gated_after"',
        "tests/runners/native/test_hybrids.py::test_a_hybrid_equals_transformers[granitemoehybrid-h]",
    ),
    fault(
        "a convolution has no bias",
        "models/families/granite.py",
        'conv_bias=given["mamba_conv_bias"]',
        "conv_bias=False",
        f"{_PACKED}[granitemoehybrid-h]",
    ),
    fault(
        "gate and up of the shared MLP change places",
        "models/weights/ordered.py",
        "dict.fromkeys(family.mlp[:-1], spec.intermediate_size)",
        "dict.fromkeys(family.mlp[1::-1], spec.intermediate_size)",
        f"{_PACKED}[granitemoehybrid-h]",
    ),
    fault(
        "Granite 4 has rope unasked",
        "models/families/granite.py",
        '"position_embedding_type": None}',
        '"position_embedding_type": "rope"}',
        "tests/models/config/test_families.py::test_granite_4_has_rope_where_it_asks_for_it",
    ),
    fault(
        "the expert that all share is dropped",
        "models/families/granite.py",
        "shared=width, names=",
        "shared=0, names=",
        f"{_PACKED}[granitemoehybrid-experts]",
    ),
    fault(
        "layers without key heads attend",
        "models/families/granite.py",
        "[FULL if count else LINEAR for count in attends]",
        "[LINEAR if count else FULL for count in attends]",
        f"{_SAME}[granitemoehybrid-groups]",
    ),
    fault(
        "a file's own word on rope is not heard",
        "models/families/granite.py",
        "{**usual, **_gguf_config(keys, config), **",
        "{**_gguf_config(keys, config), **usual, **",
        f"{_GGUF}::test_a_granite_file_says_whether_there_is_rope",
    ),
    fault(
        "layers that mix tokens have an MLP as well",
        "models/families/layers.py",
        "if alone and kind != NO_MIXER",
        "if alone and kind == NO_MIXER",
        f"{_PACKED}[nemotron_h]",
    ),
    fault(
        "shares of Nemotron's files are divided whatever they say",
        "models/families/nemotron.py",
        'bool(keys.header.value(keys.name("expert_weights_norm"), bool))',
        "True",
        f"{_GGUF}::test_a_nemotron_file_says_whether_shares_are_divided_by_their_sum",
    ),
    fault(
        "what the gate is multiplied with is not taken back",
        "models/families/falcon_h1.py",
        "mlp_out=down / gate",
        "mlp_out=down",
        f"{_PACKED}[falcon_h1]",
    ),
)
