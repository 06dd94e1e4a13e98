"""Faults of `make mutants` in layers that differ, as Gemma 4's do: (name, file, old, new, tests)."""

from __future__ import annotations

_CONFIG, _FAMILIES, _TOKENS = "models/config/gemma4.py", "models/config/families.py", "kernels/program/tokens.py"
_PROGRAM, _CPU = "runners/native/program.py", "backends/cpu.py"
_FAMILY = "tests/runners/native/test_families.py::test_family_equals_transformers"
_EQUAL = (f"{_FAMILY}[gemma4]", f"{_FAMILY}[gemma4-wide]")
_BITS = ("tests/runners/native/test_gemma4.py",)

LAYER_FAULTS = (
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
)
