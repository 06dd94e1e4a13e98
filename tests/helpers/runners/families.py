"""Families of tiny models that represent all others in tests that do not depend on the family."""

from __future__ import annotations

VARIED = ("llama", "mistral", "gemma2", "gemma4", "glm4", "gpt_oss", "qwen3_moe")
"""Families that differ in their attention."""
