"""Faults of `make mutants` in how hybrids are read, from either kind of file: (name, file, old, new, tests)."""

from __future__ import annotations

__all__ = ["HYBRID_FAULTS"]

_ORDERED, _PLAN, _EXPERTS = "models/weights/ordered.py", "packed/plan.py", "models/config/experts.py"
_HYBRIDS, _NAMES = "models/config/special/hybrids.py", "models/gguf/names.py"
_PACKED = "tests/models/test_hybrids.py::test_the_packed_tensors_are_the_model_of_transformers"
_GGUF = "tests/models/gguf/test_hybrids.py"
_BRACED = "text/turns/braced/"
_RUN = "tests/runners/native/test_hybrids.py"
_SAME = f"{_GGUF}::test_a_gguf_file_is_the_same_model"

HYBRID_FAULTS = (
    ("taps stand from the newest on", _ORDERED, "(values.T).reshape", "(values.T[::-1]).reshape", f"{_PACKED}[lfm2]"),
    ("states grow", _ORDERED, "(-np.exp(values", "(np.exp(values", f"{_PACKED}[qwen3_5_text]"),
    (
        "gates stand before queries",
        _ORDERED,
        "dim * (_GATE in name)",
        "dim * (_GATE not in name)",
        f"{_PACKED}[qwen3_5_text]",
    ),
    (
        "norms of mixers have 1 on top",
        f"models/{_PLAN}",
        "PackEntry(name, VECTOR, ((tensor, count),)) for",
        "PackEntry(name, VECTOR, ((tensor, count),), offset=spec.family.norm_offset) for",
        f"{_PACKED}[qwen3_5_text]",
    ),
    (
        "sigmoids are not divided by their sum",
        _EXPERTS,
        'renorm="add" if flag_of(config, "norm_topk_prob", True) else ""',
        'renorm=""',
        f"{_PACKED}[lfm2_moe]",
    ),
    ("one layer more has no experts", _EXPERTS, "index >= dense", "index > dense", f"{_PACKED}[lfm2_moe]"),
    (
        "shares of Qwen3.5's experts are as they are",
        _EXPERTS,
        '"norm_topk_prob": True, "decoder_sparse_step": 1',
        '"norm_topk_prob": False, "decoder_sparse_step": 1',
        f"{_PACKED}[qwen3_5_moe_text]",
    ),
    (
        "the width of an MLP is the config's",
        _HYBRIDS,
        "= adjusted_width(found)",
        '= found["intermediate_size"]',
        "tests/models/config/special/test_hybrids.py",
    ),
    (
        "value heads of files follow their key heads",
        "models/gguf/hybrids.py",
        "TILED_HEADS: True",
        "TILED_HEADS: False",
        f"{_SAME}[qwen3_5_text]",
    ),
    (
        "layers that guess ahead are the model's",
        "models/gguf/keys.py",
        "return found - ahead",
        "return found",
        f"{_GGUF}::test_layers_that_guess_ahead_are_counted_among_the_blocks_and_not_used",
    ),
    (
        "the norm of mixers is read with 1 less",
        "models/gguf/source.py",
        " and not name.endswith(_PLAIN_NORM)",
        "",
        f"{_SAME}[qwen3_5_text]",
    ),
    (
        "gate and up of LFM2's files change places",
        _NAMES,
        '"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3"',
        '"ffn_gate": "feed_forward.w3", "ffn_up": "feed_forward.w1"',
        f"{_SAME}[lfm2]",
    ),
    ("states of Granite 4 grow", _ORDERED, "(-np.exp(values", "(np.exp(values", f"{_PACKED}[granitemoehybrid-h]"),
    (
        "steps of time have no bias",
        "kernels/program/states/gates.py",
        "softplus_f32(load_f32(wide_at + 4 * head) + load_f32(op[lt.F_DT_BIAS] + 4 * head))",
        "softplus_f32(load_f32(wide_at + 4 * head))",
        f"{_RUN}::test_a_hybrid_equals_transformers[granitemoehybrid-h]",
    ),
    (
        "results are gated behind their norm",
        "models/config/special/granite.py",
        '"gated_before"',
        '"gated_after"',
        f"{_RUN}::test_a_hybrid_equals_transformers[granitemoehybrid-h]",
    ),
    (
        "a convolution has no bias",
        "models/config/special/granite.py",
        'conv_bias=given["mamba_conv_bias"]',
        "conv_bias=False",
        f"{_PACKED}[granitemoehybrid-h]",
    ),
    (
        "gate and up of the shared MLP change places",
        _ORDERED,
        "dict.fromkeys(family.mlp[:-1], spec.intermediate_size)",
        "dict.fromkeys(family.mlp[1::-1], spec.intermediate_size)",
        f"{_PACKED}[granitemoehybrid-h]",
    ),
    (
        "Granite 4 has rope unasked",
        "models/config/special/granite.py",
        '"position_embedding_type": None}',
        '"position_embedding_type": "rope"}',
        "tests/models/config/test_families.py::test_granite_4_has_rope_where_it_asks_for_it",
    ),
    (
        "the expert that all share is dropped",
        _EXPERTS,
        "shared=width, names=",
        "shared=0, names=",
        f"{_PACKED}[granitemoehybrid-experts]",
    ),
    (
        "layers without key heads attend",
        "models/gguf/hybrids.py",
        '["full_attention" if count else "linear_attention" for count in attends]',
        '["linear_attention" if count else "full_attention" for count in attends]',
        f"{_SAME}[granitemoehybrid-groups]",
    ),
    (
        "a file's own word on rope is not heard",
        "models/gguf/special.py",
        "{**usual, **_granite(keys, config), **",
        "{**_granite(keys, config), **usual, **",
        f"{_GGUF}::test_a_granite_file_says_whether_there_is_rope",
    ),
    (
        "layers that mix tokens have an MLP as well",
        "models/config/layers.py",
        "if alone and kind != NO_MIXER",
        "if alone and kind == NO_MIXER",
        f"{_PACKED}[nemotron_h]",
    ),
    (
        "shares of Nemotron's files are divided whatever they say",
        "models/gguf/hybrids.py",
        'bool(keys.header.value(keys.name("expert_weights_norm"), bool))',
        "True",
        f"{_GGUF}::test_a_nemotron_file_says_whether_shares_are_divided_by_their_sum",
    ),
    (
        "what the gate is multiplied with is not taken back",
        "models/config/special/falcon.py",
        "mlp_out=down / gate",
        "mlp_out=down",
        f"{_PACKED}[falcon_h1]",
    ),
    (
        "what a mixer leaves waits where queries go",
        "runners/native/states.py",
        "lt.B_MIXED if builder.sizes.mixed else lt.B_QUERY",
        "lt.B_QUERY",
        "tests/runners/native/test_hybrids.py::test_a_hybrid_equals_transformers[falcon_h1]",
    ),
    (
        "what is below 0 is squared",
        "kernels/program/activations.py",
        'b.fcmp_ordered("<", raw, _splat(0.0))',
        'b.fcmp_ordered("<", raw, _splat(-1e30))',
        "tests/kernels/program/test_matrices.py::test_the_activation_without_a_gate",
    ),
    (
        "any quote ends a string of a call",
        "text/turns/literals.py",
        "not in _BEHIND_VALUE",
        "in ()",
        "tests/text/turns/test_parser.py",
    ),
    (
        "a model without the tokens of LFM2's calls is taken to know them",
        "text/turns/unshown/keyword_calls.py",
        "is_token(_CALL) and is_token(_CALL_END)",
        "is_token(_CALL) or is_token(_CALL_END)",
        "tests/text/turns/unshown/test_keyword_calls.py",
    ),
    (
        "tools that were not offered are shown as well",
        "text/turns/unshown/keyword_calls.py",
        " and len(listed) == len(names)",
        "",
        "tests/text/turns/unshown/test_keyword_calls.py",
    ),
    (
        "past calls that a template leaves out are lost",
        "text/tokenizer.py",
        "shown = with_calls_written(",
        "_ = with_calls_written(",
        "tests/text/turns/unshown/test_keyword_calls.py",
    ),
    (
        "what is still open is closed once where a call breaks off",
        f"{_BRACED}reader.py",
        '"".join(reversed(self._open))',
        '"}"',
        f"tests/{_BRACED}test_reader.py",
    ),
    (
        "an enum allows values of other types",
        f"{_BRACED}grammar.py",
        "for one in choices if _is_of(one, types)",
        "for one in choices",
        f"tests/{_BRACED}test_grammar.py",
    ),
    (
        "results that hang on calls are lost with them",
        "text/tokenizer.py",
        "in_calls=self.turn_format.results_need_calls",
        "in_calls=False",
        f"tests/{_BRACED}test_replay.py",
    ),
    (
        "what ends a turn with calls is part of the answer",
        "text/turns/reader.py",
        "or token_id == self._ending",
        "",
        f"tests/{_BRACED}test_replay.py",
    ),
)
