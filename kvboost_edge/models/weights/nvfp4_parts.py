"""Names of the tensors that NVFP4 checkpoints have besides their codes."""

from __future__ import annotations

__all__ = ["UNUSED_SCALES"]

UNUSED_SCALES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Endings of scales of activations and of a KV cache, which are not used.

They may be infinite, for example those of experts that calibration never reached.
"""
