"""Reading and changing the tensors of a tiny model's directory."""

import numpy as np
from safetensors.numpy import load_file, save_file


def tensors_of(directory):
    return load_file(directory / "model.safetensors")


def change_tensors(directory, change):
    """Rewrite the tensor file.

    Args:
        change: a function that changes a dict of all tensors, or new tensors by name; None
            removes a tensor.
    """
    tensors = tensors_of(directory)
    if callable(change):
        change(tensors)
    else:
        tensors |= change
    kept = {
        name: np.ascontiguousarray(tensor) for name, tensor in tensors.items() if tensor is not None
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
