"""Flash attention for transformers models outside the engine.

The names are those of KVBoost. torch and transformers are loaded on first use. The engine does not
use this module: its backends choose their kernels themselves.
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
    """Return whether the machine has a GPU with a flash-attention kernel.

    False on every machine without a CUDA device.
    """
    return get_flash_attn_tier() != "vanilla"


def get_flash_attn_tier() -> str:
    """Return the best flash attention of this machine.

    - "kvboost_cuda": the project's kernels are installed and passed their test on the first CUDA
      device
    - "torch_flash": torch's own
    - "vanilla": neither
    """
    if importlib.util.find_spec("torch") is None:
        return "vanilla"
    from kvboost_edge.backends.cuda import find_tier

    return find_tier()


def install_flash_attention(model: Any) -> int:
    """Make a transformers model call the best kernel of its device.

    Changes nothing on a CPU, on a GPU without a kernel, and if it is installed already. Calls whose
    mask is not plainly causal (padding, packed sequences) are computed by torch with that mask, so
    results stay right.

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
    """Restore the model's own attention.

    Returns:
        The number of attention modules changed; 0 if nothing was installed.
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
