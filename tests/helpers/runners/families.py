"""Families of tiny models that stand for all, where the family is not what a test is about."""

from __future__ import annotations

VARIED = ("llama", "mistral", "gemma2", "gemma4", "glm4", "gpt_oss", "qwen3_moe")
"""Families that differ in their attention."""
