"""Tests that faults of several rooms name."""

from __future__ import annotations

__all__ = ["GEMMA4", "GEMMA4_EXPERTS", "SPARSE"]

_FAMILY = "tests/runners/native/test_families.py::test_family_equals_transformers"

GEMMA4 = (f"{_FAMILY}[gemma4]", f"{_FAMILY}[gemma4-wide]")
GEMMA4_EXPERTS = (f"{_FAMILY}[gemma4-moe]",)
SPARSE = tuple(f"{_FAMILY}[{name}]" for name in ("qwen3_moe", "qwen2_moe", "olmoe", "ernie4_5_moe", "granitemoe"))
