"""Tests that several modules of faults name."""

from __future__ import annotations

_INVARIANCE = "tests/engine/test_invariance.py::test_bits_do_not_depend_on_how_a_token_is_computed"
_FAMILY = "tests/runners/native/test_families.py::test_family_equals_transformers"

GEMMA4 = (f"{_FAMILY}[gemma4]", f"{_FAMILY}[gemma4-wide]")
GEMMA4_EXPERTS = (f"{_FAMILY}[gemma4-moe]",)
SPARSE = tuple(
    f"{_FAMILY}[{name}]"
    for name in ("qwen3_moe", "qwen2_moe", "olmoe", "ernie4_5_moe", "granitemoe")
)
# Layers that share KV; only some rows go on to the last layers.
GEMMA4_ROWS = tuple(
    f"{_INVARIANCE}[{row}]"
    for row in (
        "gemma4 Q6_K 4-4 some rows",
        "gemma4-wide int4 16-16 some rows",
        "gemma4-alike f32 4-4 some rows",
        "gemma4-alike f32 4-4 chunked",
    )
)
