"""Which flash-attention kernels this machine has, and putting them into a transformers model
outside the engine.

The names are those users know. torch and transformers are loaded on first use. The engine needs
none of this: its backends choose their kernels themselves.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from kvboost_edge.errors import RequestError

__all__ = [
    "flash_attention_available",
    "get_flash_attn_tier",
    "install_flash_attention",
    "uninstall_flash_attention",
]


def flash_attention_available() -> bool:
    """Whether a GPU is here with a flash-attention kernel for it. False on every machine without a
    CUDA device.
    """
    return get_flash_attn_tier() != "vanilla"


def get_flash_attn_tier() -> str:
    """ "kvboost_cuda": the project's kernels are installed and passed their test on the first CUDA
    device; "torch_flash": torch's own; "vanilla": neither.
    """
    if importlib.util.find_spec("torch") is None:
        return "vanilla"
    from kvboost_edge.backends.cuda import find_tier

    return find_tier()


def install_flash_attention(model: Any) -> int:
    """Make a transformers model call the best kernel of the device it is on; how many attention
    modules do so now.

    0, with nothing changed, on a CPU, on a GPU without a kernel, and where it is installed already.
    Calls whose mask is not plainly causal (padding, packed sequences) are computed by torch with
    that mask, so results stay right. Raises RequestError for what is no transformers model,
    ModelFormatError for one that does not run with it.
    """
    from kvboost_edge.runners.torch import flash

    return flash.install(_checked(model))


def uninstall_flash_attention(model: Any) -> int:
    """Give the model back what it called before; how many attention modules changed. 0 where
    nothing was installed.
    """
    from kvboost_edge.runners.torch import flash

    return flash.uninstall(_checked(model))


def _checked(model: Any) -> Any:
    from kvboost_edge.runners.torch.flash import is_model

    if not is_model(model):
        raise RequestError(
            f"{type(model).__name__} is not a transformers model with a config; give one"
        )
    return model
