"""Faults of `make mutants` in layers that differ, as Gemma 4's do, or have experts: (name, file, old, new, tests)."""

from __future__ import annotations

from faults.hybrids import HYBRID_FAULTS

_CONFIG, _FAMILIES, _TOKENS = (
    "models/config/special/gemma4.py",
    "models/config/families.py",
    "kernels/program/tokens.py",
)
_PROGRAM, _CPU = "runners/native/program.py", "backends/cpu.py"
_FAMILY = "tests/runners/native/test_families.py::test_family_equals_transformers"
_EQUAL = (f"{_FAMILY}[gemma4]", f"{_FAMILY}[gemma4-wide]")
_BITS = ("tests/runners/native/test_gemma4.py",)
_ROUTE, _EXPERTS, _OF_CONFIG = "kernels/program/route.py", "kernels/program/experts.py", "models/config/experts.py"
_ROUTED, _MIXED = ("tests/kernels/program/test_experts.py",), ("tests/runners/native/test_mixtures.py",)
_COLUMNS, _OF_COLUMNS = "models/weights/columns/experts.py", "tests/models/weights/columns/test_experts.py"
_FEW_ROWS = "tests/models/packed/test_memory.py::test_a_few_rows_of_an_expert_are_read_alone"
_ACTIVATIONS, _CHANNELS = "kernels/program/activations.py", "text/turns/channels/"
_OF_GPT_OSS = "tests/runners/native/test_gpt_oss.py"
_GPT_OSS = (f"{_OF_GPT_OSS}::test_all_logits_of_prompts_around_window_and_block",)
_BIASED = ("tests/kernels/program/test_experts.py::test_biased_experts_equal_plain_numpy",)
_OF_CHANNELS = ("tests/text/turns/channels/test_turn.py",)
_MIXTURE = "runners/native/mixture.py"
_BESIDE = (f"{_FAMILY}[gemma4-moe]",)
_SPARSE = tuple(f"{_FAMILY}[{name}]" for name in ("qwen3_moe", "qwen2_moe", "olmoe", "ernie4_5_moe", "granitemoe"))

LAYER_FAULTS = (
    (
        "rows of attention outlive their plan",
        "runners/native/whole_pass.py",
        "*(id(plan.items) for plan in plans))",
        "*(0 for plan in plans))",
        "tests/runners/native/test_long.py",
    ),
    (
        "a step's plan outlives its window",
        "kernels/attention/paged.py",
        "    if window == 0:\n        return tile_end\n",
        "    if window >= 0:\n        return tile_end\n",
        "tests/kernels/attention/test_paged.py",
    ),
    (
        "a layer shares with the one so many before it",
        _CONFIG,
        "shapes.append(LayerShape(dim, kv_heads, wider * inner, giver, owns_kv=False))",
        "shapes.append(LayerShape(dim, kv_heads, wider * inner, index - shared, owns_kv=False))",
        *_EQUAL,
    ),
    ("scores are divided by the root of the head's size", _FAMILIES, "scale=1.0, capped", "capped", *_EQUAL),
    ("the norm of values is dropped", _TOKENS, "if op[lt.F_V_NORM] != 0:", "if op[lt.F_V_NORM] == -1:", *_EQUAL),
    (
        "values that are keys are those behind the norm",
        _TOKENS,
        "        copy_floats(keys, kv_heads * dim, values)\n    late = op[lt.F_LATE_NORM] != 0\n",
        "        _heads(keys, kv_heads, dim, op[lt.F_K_NORM], op[lt.F_NORM_ALL], eps)\n"
        "        copy_floats(keys, kv_heads * dim, values)\n    late = op[lt.F_LATE_NORM] != 0\n",
        *_EQUAL,
    ),
    (
        "a layer's number is dropped",
        _TOKENS,
        "value * params[lt.P_SUM_FACTOR])\n\n\n@kernel\ndef _per_layer",
        "value)\n\n\n@kernel\ndef _per_layer",
        *_EQUAL,
    ),
    ("a layer takes another's input", _PROGRAM, "lt.F_BY_FIRST: index * width", "lt.F_BY_FIRST: 0", *_EQUAL),
    (
        "open blocks that later layers read are written over",
        "runners/native/plan.py",
        "layer.kv + 1 if layer.kv in given else 0",
        "0",
        *_BITS,
    ),
    ("rows that go on alone see one token less", _CPU, "- behind + counts)", "- behind + counts - 1)", *_BITS),
    ("rows that go on alone are one sequence", _CPU, "(np.diff(rows, prepend=-2) != 1) | ", "", *_BITS),
    (
        "rows go on with the inputs of others",
        "runners/native/runner.py",
        "per_layer(num_tokens)[rows]",
        "per_layer(num_tokens)[: len(rows)]",
        *_BITS,
    ),
    ("of equal scores the higher number is chosen", _ROUTE, "number > best)", "number >= best)", *_ROUTED),
    (
        "one expert too few is chosen",
        _ROUTE,
        "for rank in range(used):\n        # The",
        "for rank in range(used - 1):\n        # The",
        *_ROUTED,
    ),
    (
        "powers of logits overflow",
        _ROUTE,
        "exp_f32(load_f32(row + 4 * index) - largest)",
        "exp_f32(load_f32(row + 4 * index))",
        f"{_ROUTED[0]}::test_logits_beyond_any_power_have_shares",
    ),
    (
        "shares are divided by less than the least",
        _ROUTE,
        "total = max(total, params[lt.P_EPS])",
        "total = total + np.float32(0.0)",
        f"{_ROUTED[0]}::test_routing_equals_the_specification",
    ),
    (
        "layers behind the last mixture have experts",
        _OF_CONFIG,
        "start <= index <= end",
        "start <= index",
        "tests/runners/native/test_families.py::test_variant_equals_transformers[ernie4_5_moe-end]",
    ),
    ("shares are not divided by their sum", _OF_CONFIG, 'return "add" if', 'return "" if', *_SPARSE),
    (
        "shares are divided by their sum unasked",
        _OF_CONFIG,
        '"norm_topk_prob", False) else ""',
        '"norm_topk_prob", False) else "add"',
        *_SPARSE,
    ),
    (
        "the bias of the choice becomes a part of the share",
        _ROUTE,
        "        store_f32(shares + 4 * rank, load_f32(row + 4 * load_i64(chosen + 8 * rank)))",
        "        store_f32(shares + 4 * rank, _wanted(row, op[lt.F_BIAS], load_i64(chosen + 8 * rank)))",
        *_ROUTED,
    ),
    ("softmax stands before the choice of the shares", _OF_CONFIG, 'score="chosen", ', "", *_SPARSE),
    (
        "the shared expert's gate is forgotten",
        _EXPERTS,
        "share = sigmoid_f32(gate) * factor",
        "share = factor",
        *_SPARSE,
    ),
    (
        "gate and up are exchanged",
        "models/weights/experts.py",
        '_GATE_UP = ("gate_proj", "up_proj")',
        '_GATE_UP = ("up_proj", "gate_proj")',
        *_SPARSE,
        "tests/models/weights/test_experts.py",
    ),
    (
        "experts come in falling order",
        _EXPERTS,
        "    for index in range(count_active(job)):\n",
        "    for index in range(count_active(job) - 1, -1, -1):\n",
        *_ROUTED,
    ),
    (
        "a token's experts keep the order of their ranks",
        _ROUTE,
        "while at > 0 and load_i64(chosen + 8 * (at - 1)) > found:",
        "while at < 0:",
        *_ROUTED,
    ),
    (
        "experts add their rows and not their shares",
        _EXPERTS,
        "share = load_f32(job.buffers[lt.B_SHARES] + 4 * place) * factor",
        "share = np.float32(factor)",
        *_ROUTED,
    ),
    (
        "an expert's panel is that of the pass",
        _EXPERTS,
        "token_place(slot - first, tokens, 0, job.matrix)",
        "token_place(slot - first, job.tokens, 0, job.matrix)",
        *_ROUTED,
    ),
    (
        "an expert has the scales of the first",
        _EXPERTS,
        "op[lt.F_SCALE] + tile * groups * SCALE_BYTES",
        "op[lt.F_SCALE]",
        *_ROUTED,
    ),
    (
        "the factors of the router's inputs are dropped",
        _MIXTURE,
        'out.norm(f"{layer}router_in", f"{layer}router")',
        'out.norm(f"{layer}experts_in", f"{layer}router")',
        *_BESIDE,
    ),
    ("the router's root of the width is dropped", _MIXTURE, "factor=spec.hidden_size**-0.5", "factor=1.0", *_BESIDE),
    ("factors of experts are dropped", _ROUTE, "if op[lt.F_SCALE] != 0:", "if op[lt.F_SCALE] == -1:", *_BESIDE),
    (
        "a share has another expert's factor",
        _ROUTE,
        "share *= load_f32(op[lt.F_SCALE] + 4 * load_i64(chosen + 8 * rank))",
        "share *= load_f32(op[lt.F_SCALE] + 4 * rank)",
        *_BESIDE,
        *_ROUTED,
    ),
    (
        "experts read what the MLP beside them reads",
        _MIXTURE,
        'out.norm(f"{layer}experts_in", f"{layer}router")',
        'out.norm(f"{layer}mlp_in", f"{layer}router")',
        *_BESIDE,
    ),
    (
        "norms behind the MLP and behind the experts are exchanged",
        "models/config/experts.py",
        'norms=(f"{after}_1", "pre_feedforward_layernorm_2", f"{after}_2")',
        'norms=(f"{after}_2", "pre_feedforward_layernorm_2", f"{after}_1")',
        *_BESIDE,
    ),
    (
        "experts are added to what was there",
        _EXPERTS,
        "if op[lt.F_ADD] == 0:",
        "if op[lt.F_ADD] == -1:",
        *_ROUTED,
        *_BESIDE,
    ),
    (
        "a thread clears the tiles of others",
        _EXPERTS,
        "for index in range(begin * LANES, end * LANES):",
        "for index in range(op[lt.F_COUNT]):",
        *_ROUTED,
    ),
    (
        "one expert too few is computed",
        _ROUTE,
        "return min(op[lt.F_EXPERTS], job.tokens * op[lt.F_USED])",
        "return count_active(job) - 1",
        *_ROUTED,
    ),
    (
        "an expert's matrix is read whole for every piece of it",
        "models/gguf/source.py",
        "first, last, pick = start, stop, None",
        "first, last, pick = 0, tensor.shape[0], np.arange(start, stop)",
        _FEW_ROWS,
    ),
    (
        "blocks of all experts are read for every piece",
        _COLUMNS,
        """        packed = self._span(f"{piece.whole}_blocks", 4, first, rows, groups * _BLOCK_BYTES)
""",
        """        every = self._files.stored_shape(f"{piece.whole}_blocks", "U8", 4)[0] * each
        packed = self._span(f"{piece.whole}_blocks", 4, 0, every, groups * _BLOCK_BYTES)[first : first + rows]
""",
        _FEW_ROWS,
    ),
    (
        "gate and up take each other's turns",
        _COLUMNS,
        '("gate_proj", "up_proj")',
        '("up_proj", "gate_proj")',
        f"{_OF_COLUMNS}::test_columns_take_turns",
    ),
    (
        "nibbles of safetensors in the other order",
        _COLUMNS,
        "np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)",
        "np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=-1)",
        f"{_OF_COLUMNS}::test_mxfp4_is_what_transformers_makes_of_it",
    ),
    (
        "sinks are dropped",
        "runners/native/whole_pass.py",
        "np.array([0 if sinks is None else sinks.ctypes.data for sinks in self._sinks])",
        "np.array([0 for sinks in self._sinks])",
        *_GPT_OSS,
    ),
    (
        "an expert's bias stands behind its share",
        _EXPERTS,
        """                bias = _bias_of(op, expert * op[lt.F_COUNT] + tile * LANES)
                target = Target(scratch, _LINE, 0, bias, 0, np.float32(1.0))
                float_rows(job.kernels[kind], (n, where, x, 4 * op[lt.F_SRC_STEP], target))
                _add_shares(job, op, factor, scratch, first + token, n, tile, 1)
""",
        """                bias = _bias_of(op, expert * op[lt.F_COUNT] + tile * LANES)
                target = Target(scratch, _LINE, 0, 0, 0, np.float32(1.0))
                float_rows(job.kernels[kind], (n, where, x, 4 * op[lt.F_SRC_STEP], target))
                _add_shares(job, op, factor, scratch, first + token, n, tile, 1)
                for row in range(n):
                    at = place_at(job, experts, first + token + row) // op[lt.F_USED] * op[lt.F_DST_STEP]
                    _add_scaled(bias, np.float32(1.0), 1, job.buffers[op[lt.F_DST]] + 4 * (at + tile * LANES))
""",
        *_BIASED,
    ),
    (
        "gates have no limit",
        _ACTIVATIONS,
        "x = b.select(is_clamped, _emit_limit(b, x, _SWIGLU_LIMIT), x)",
        "x = b.select(is_clamped, x, x)",
        *_BIASED,
    ),
    (
        "the way up has a limit on one side",
        _ACTIVATIONS,
        "both = _emit_limit(b, _emit_limit(b, up, _SWIGLU_LIMIT), -_SWIGLU_LIMIT)",
        "both = _emit_limit(b, up, _SWIGLU_LIMIT)",
        *_BIASED,
    ),
    (
        "borders of yarn are rounded in files that do not say it",
        "models/gguf/experts.py",
        'rope["truncate"] = False',
        'rope["truncate"] = True',
        f"{_OF_GPT_OSS}::test_borders_of_yarn_are_no_whole_numbers",
    ),
    (
        "the end of a message ends the answer",
        "models/gguf/config.py",
        "in_messages = set(vocabulary) >= _TURN_ENDINGS",
        "in_messages = False",
        "tests/models/gguf/test_source.py::test_the_endings_of_turns_in_messages",
    ),
    (
        "a call in channels ends where its message does alone",
        _CHANNELS + "turn.py",
        "self._marks = (*format.ends, format.start)",
        "self._marks = (format.end, format.done)",
        *_OF_CHANNELS,
    ),
    (
        "a message to a tool that was not offered is a call",
        _CHANNELS + "turn.py",
        'self._tools.get(header.recipient), ""',
        'header.recipient, ""',
        *_OF_CHANNELS,
    ),
    (
        "of several calls in a message the first one is told",
        _CHANNELS + "history.py",
        "for number, call in enumerate(calls):",
        "for number, call in enumerate(calls[:1]):",
        *_OF_CHANNELS,
    ),
    (
        "a grammar of channels lets answers pass where a call is asked for",
        _CHANNELS + "grammar.py",
        "[] if required else [[*self._head",
        "[] if not required else [[*self._head",
        *_OF_CHANNELS,
    ),
    *HYBRID_FAULTS,
)
