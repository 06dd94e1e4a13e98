"""Flash attention for transformers models that run outside of the engine.

The functions have KVBoost's names. torch and transformers are loaded on first use. The engine does
not use this module, because its backends choose their own kernels.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from kvboost_edge.compat.torch_extra import require_torch
from kvboost_edge.errors import RequestError

__all__ = [
    "flash_attention_available",
    "get_flash_attn_tier",
    "install_flash_attention",
    "uninstall_flash_attention",
]


def flash_attention_available() -> bool:
    """Return whether this machine has a GPU and a flash-attention kernel for it.

    Without a CUDA device, the result is always False.
    """
    return get_flash_attn_tier() != "vanilla"


def get_flash_attn_tier() -> str:
    """Return the name of the best flash attention on this machine.

    - "kvboost_cuda": the project's own kernels are installed, and passed their test on the first
      CUDA device
    - "torch_flash": torch's kernel
    - "vanilla": no flash attention
    """
    if importlib.util.find_spec("torch") is None:
        return "vanilla"
    from kvboost_edge.backends.cuda import find_tier

    return find_tier()


def install_flash_attention(model: Any) -> int:
    """Make a transformers model call the best attention kernel of its device.

    The call has no effect on a CPU, on a GPU without such a kernel, or if a kernel is already
    installed. The kernel computes only plain causal attention. For other masks (padding, packed
    sequences) the model falls back to torch.

    Returns:
        The number of attention modules that now call the kernel.

    Raises:
        RequestError: `model` is not a transformers model.
        ModelFormatError: the model does not run with the kernel.
    """
    require_torch("install_flash_attention", "transformers")
    from kvboost_edge.runners.torch import flash

    return flash.install(_checked(model))


def uninstall_flash_attention(model: Any) -> int:
    """Restore the original attention of a model.

    Returns:
        The number of attention modules that were changed; 0 if no kernel was installed.
    """
    require_torch("uninstall_flash_attention", "transformers")
    from kvboost_edge.runners.torch import flash

    return flash.uninstall(_checked(model))


def _checked(model: Any) -> Any:
    from kvboost_edge.runners.torch.flash import is_model

    if not is_model(model):
        raise RequestError(
            f"{type(model).__name__} is not a transformers model; pass a model with a config"
        )
    return model
