"""Faults in the CPU kernels."""

from __future__ import annotations

from faults.fault import fault
from faults.suites import GEMMA4, GEMMA4_EXPERTS, SPARSE

_ROOMS = ("tests/kernels", "tests/backends")
_SELECTION = ("tests/kernels/attention/test_block_selection.py",)
_ROUTED = ("tests/kernels/program/test_experts.py",)

FAULTS = (
    fault(
        "wide arithmetic drops the offset of minima in half groups",
        "kernels/linear/wide.py",
        "factor = -float(HALF_OFFSET) if self.format.minima_in_halves else -1.0",
        "factor = -1.0",
        "tests/kernels/program/test_wide.py",
    ),
    fault(
        "wide arithmetic leaves codes after the last input in the panel",
        "kernels/linear/wide.py",
        "    with emit_loop(b, missing) as index:",
        "    with emit_loop(b, int_constant(0)) as index:",
        "tests/kernels/program/test_wide.py",
    ),
    fault(
        "causal mask shows one token too many",
        "kernels/attention/float_attend.py",
        "// shape.heads_per_kv + 1 - start",
        "// shape.heads_per_kv + 2 - start",
        *_ROOMS,
    ),
    fault(
        "sliding window off by one",
        "kernels/attention/float_attend.py",
        "low = end - shape.window if",
        "low = end - shape.window + 1 if",
        *_ROOMS,
    ),
    fault(
        "drops the softcap",
        "kernels/attention/float_attend.py",
        "if shape.softcap > 0:",
        "if shape.softcap > 1e9:",
        *_ROOMS,
    ),
    fault(
        "drops attention sinks",
        "kernels/attention/units.py",
        "if job.sinks != 0:",
        "if job.sinks == -1:",
        *_ROOMS,
    ),
    fault(
        "leaves sinks in natural logarithms",
        "kernels/attention/units.py",
        "load_f32(job.sinks + 4 * q_head) * _LOG2_E",
        "load_f32(job.sinks + 4 * q_head)",
        *_ROOMS,
    ),
    fault(
        "returns the log-sum-exp to base 2",
        "kernels/attention/units.py",
        "fma_f32(maximum, _LN_2, log_total)",
        "maximum + log_total",
        *_ROOMS,
    ),
    fault(
        "compares scores to base 2 with a natural softcap",
        "kernels/attention/float_launch.py",
        "softcap=float(options.softcap) * LOG2_E",
        "softcap=float(options.softcap)",
        *_ROOMS,
    ),
    fault(
        "lets 2^x become subnormal",
        "kernels/vectors.py",
        "_EXP2_LOWEST = -126.0",
        "_EXP2_LOWEST = -127.0",
        "tests/kernels/test_vectors.py",
    ),
    fault(
        "merging partitions ignores the weight of earlier ones",
        "kernels/attention/units.py",
        "dim, keep, add)",
        "dim, np.float32(1.0), add)",
        *_ROOMS,
    ),
    fault(
        "truncates to bfloat16 instead of rounding",
        "kernels/attention/storage.py",
        "rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))",
        "rounded = bits",
        *_ROOMS,
    ),
    fault(
        "does not copy the last byte of a block",
        "kernels/attention/storage.py",
        "for at in range(pool.shape[1]):",
        "for at in range(pool.shape[1] - 1):",
        *_ROOMS,
    ),
    fault(
        "keeps an attention schedule beyond the sliding window",
        "kernels/attention/paged.py",
        "    if window == 0:\n        return tile_end\n",
        "    if window >= 0:\n        return tile_end\n",
        "tests/kernels/attention/test_paged.py",
    ),
    fault(
        "sparse prefill shows the padding of the last kept tile",
        "kernels/attention/sparse_attend.py",
        "kept_unit(unit, count)",
        "kept_unit(unit, STRIPS)",
        *_SELECTION,
    ),
    fault(
        "sparse prefill drops the local key blocks",
        "kernels/attention/block_selection.py",
        "block >= num_blocks - LOCAL_BLOCKS",
        "block >= num_blocks",
        *_SELECTION,
    ),
    fault(
        "sparse prefill selects by the first tokens of a quantized block",
        "kernels/quantized_kv/sparse_code_attend.py",
        "codes = here + 4 * (position % layout.block_size)",
        "codes = here",
        *_SELECTION,
    ),
    fault(
        "drops the norm of values",
        "kernels/program/tokens.py",
        "if op.v_norm != 0:",
        "if op.v_norm == -1:",
        *GEMMA4,
    ),
    fault(
        "takes values that equal keys after the key norm",
        "kernels/program/tokens.py",
        "        copy_floats(keys, kv_heads * dim, values)\n    late = op.late_norm != 0\n",
        "        _heads(keys, kv_heads, dim, op.k_norm, op.norm_all, op.eps)\n"
        "        copy_floats(keys, kv_heads * dim, values)\n"
        "    late = op.late_norm != 0\n",
        *GEMMA4,
    ),
    fault(
        "drops a layer's output factor",
        "kernels/program/tokens.py",
        "value * op.sum_factor)\n\n\n@kernel\ndef _per_layer",
        "value)\n\n\n@kernel\ndef _per_layer",
        *GEMMA4,
    ),
    fault(
        "chooses the higher-numbered of two experts with equal scores",
        "kernels/program/expert_routing.py",
        "found < 0 or number > best",
        "found < 0 or number >= best",
        *_ROUTED,
    ),
    fault(
        "chooses one expert too few",
        "kernels/program/expert_routing.py",
        "for rank in range(used):\n        # Find",
        "for rank in range(used - 1):\n        # Find",
        *_ROUTED,
    ),
    fault(
        "chooses the higher-numbered of two expert groups with equal scores",
        "kernels/program/expert_routing.py",
        "(number == own and other < group)",
        "(number == own and other > group)",
        "tests/kernels/program/test_experts.py::test_ties_choose_the_lower_group",
    ),
    fault(
        "scores an expert group by its largest score alone",
        "kernels/program/expert_routing.py",
        "return largest + second",
        "return largest",
        "tests/kernels/program/test_experts.py::test_routing_equals_the_reference",
    ),
    fault(
        "softmax of router logits overflows",
        "kernels/program/expert_routing.py",
        "exp_f32(load_f32(row + 4 * index) - largest)",
        "exp_f32(load_f32(row + 4 * index))",
        "tests/kernels/program/test_experts.py::test_extreme_router_logits_have_finite_shares",
    ),
    fault(
        "divides expert weights by a sum below the minimum",
        "kernels/program/expert_routing.py",
        "total = max(total, np.float32(op.eps))",
        "total = total + np.float32(0.0)",
        "tests/kernels/program/test_experts.py::test_routing_equals_the_reference",
    ),
    fault(
        "adds the routing bias to the expert weights",
        "kernels/program/expert_routing.py",
        "        store_f32(shares + 4 * rank, load_f32(row + 4 * load_i64(chosen + 8 * rank)))",
        "        store_f32(shares + 4 * rank, _wanted(row, op.bias, load_i64(chosen + 8 * rank)))",
        *_ROUTED,
    ),
    fault(
        "ignores the shared expert's gate",
        "kernels/program/experts.py",
        "share = sigmoid_f32(gate) * op.factor",
        "share = op.factor",
        *SPARSE,
    ),
    fault(
        "accumulates experts in descending order",
        "kernels/program/experts.py",
        "    for index in range(count_active(job)):\n",
        "    for index in range(count_active(job) - 1, -1, -1):\n",
        *_ROUTED,
    ),
    fault(
        "leaves a token's experts in the order of their scores",
        "kernels/program/expert_routing.py",
        "while at > 0 and load_i64(chosen + 8 * (at - 1)) > found:",
        "while at < 0:",
        *_ROUTED,
    ),
    fault(
        "adds expert outputs without their weights",
        "kernels/program/experts.py",
        "share = load_f32(job.buffers[lt.B_SHARES] + 4 * place) * op.factor",
        "share = op.factor",
        *_ROUTED,
    ),
    fault(
        "locates an expert's rows with the row count of the whole pass",
        "kernels/program/experts.py",
        "token_place(slot - first, tokens, 0, job.matrix)",
        "token_place(slot - first, job.tokens, 0, job.matrix)",
        *_ROUTED,
    ),
    fault(
        "all experts use the first expert's scales",
        "kernels/program/experts.py",
        "matrix.scales + tile * scale_bytes(kind, groups)",
        "matrix.scales",
        *_ROUTED,
    ),
    fault(
        "drops the per-expert factors",
        "kernels/program/expert_routing.py",
        "if op.factors != 0:",
        "if op.factors == -1:",
        *GEMMA4_EXPERTS,
    ),
    fault(
        "multiplies an expert's weight by another expert's factor",
        "kernels/program/expert_routing.py",
        "share *= load_f32(op.factors + 4 * load_i64(chosen + 8 * rank))",
        "share *= load_f32(op.factors + 4 * rank)",
        *GEMMA4_EXPERTS,
        *_ROUTED,
    ),
    fault(
        "adds expert outputs to what the buffer held before",
        "kernels/program/experts.py",
        "if op.add == 0:",
        "if op.add == -1:",
        *_ROUTED,
        *GEMMA4_EXPERTS,
    ),
    fault(
        "a thread clears other threads' tiles",
        "kernels/program/experts.py",
        "for index in range(begin * LANES, end * LANES):",
        "for index in range(rows.step):",
        *_ROUTED,
    ),
    fault(
        "computes one expert too few",
        "kernels/program/expert_routing.py",
        "return min(experts.total, job.tokens * experts.used)",
        "return count_active(job) - 1",
        *_ROUTED,
    ),
    fault(
        "adds an expert's bias without the expert's weight",
        "kernels/program/experts.py",
        "                target = Target(scratch, _LINE, 0, bias, 0, np.float32(1.0))\n"
        "                float_rows(job.kernels[kind], (n, where, x, 4 * inputs, target))\n"
        "                _add_shares(job, op, scratch, first + token, n, tile, 1)\n",
        "                target = Target(scratch, _LINE, 0, 0, 0, np.float32(1.0))\n"
        "                float_rows(job.kernels[kind], (n, where, x, 4 * inputs, target))\n"
        "                _add_shares(job, op, scratch, first + token, n, tile, 1)\n"
        "                for row in range(n):\n"
        "                    of = place_at(job, experts, first + token + row) // op.experts.used\n"
        "                    to = row_at(job, op.out, of) + 4 * tile * LANES\n"
        "                    _add_scaled(bias, np.float32(1.0), 1, to)\n",
        "tests/kernels/program/test_experts.py::test_biased_experts_equal_plain_numpy",
    ),
    fault(
        "does not clamp SwiGLU gates",
        "kernels/program/activations.py",
        "x = b.select(is_clamped, _emit_limit(b, x, _SWIGLU_LIMIT), x)",
        "x = b.select(is_clamped, x, x)",
        "tests/kernels/program/test_experts.py::test_biased_experts_equal_plain_numpy",
    ),
    fault(
        "clamps the SwiGLU up projection on one side only",
        "kernels/program/activations.py",
        "both = _emit_limit(b, _emit_limit(b, up, _SWIGLU_LIMIT), -_SWIGLU_LIMIT)",
        "both = _emit_limit(b, up, _SWIGLU_LIMIT)",
        "tests/kernels/program/test_experts.py::test_biased_experts_equal_plain_numpy",
    ),
    fault(
        "drops the dt bias",
        "kernels/program/states/scan.py",
        "softplus_f32(load_f32(times + 4 * head) + load_f32(op.dt_bias + 4 * head))",
        "softplus_f32(load_f32(times + 4 * head))",
        "tests/runners/native/test_hybrids.py::test_hybrid_models_equal_transformers[granitemoehybrid-h]",
    ),
    fault(
        "squared ReLU squares negative inputs",
        "kernels/program/activations.py",
        'b.fcmp_ordered("<", raw, _splat(0.0))',
        'b.fcmp_ordered("<", raw, _splat(-1e30))',
        "tests/kernels/program/test_rows.py::test_activation_without_a_gate",
    ),
    fault(
        "does not multiply the squared gate by the up projection",
        "kernels/program/activations.py",
        "b.fmul(square, factor)",
        "square",
        "tests/kernels/program/test_rows.py::test_activations_equal_the_reference",
    ),
    fault(
        "reuses compiled kernels after an edit of one of their modules",
        "kernels/sources.py",
        '"notices.py", "reference/*")',
        '"notices.py", "vectors.py", "reference/*")',
        "tests/kernels/test_jit.py::test_the_source_digest_covers_every_module_that_affects_code",
    ),
    fault(
        "keeps no compiled kernels if Numba has no folder for them",
        "kernels/code_cache.py",
        "        _CacheDirectoryLocator,\n",
        "",
        "tests/kernels/test_aot.py::test_kernels_go_to_the_cache_directory_if_numba_has_no_folder",
    ),
)
