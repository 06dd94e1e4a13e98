"""Files that make a tiny checkpoint an embedding model, as sentence-transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from helpers.models.tiny_checkpoints import BOS_ID, EOS_ID
from helpers.models.tiny_models import save_tiny_model

HIDDEN = 64
DENSE = (160, 48)  # outputs of the matrices after the pooling


def make_embedding_model(
    directory: Path, kind: str = "lasttoken", *, dense: Sequence[int] = (), begins: bool = False
) -> Path:
    """Write modules, pooling, dense matrices with these numbers of outputs, and a tokenizer that
    appends <eos> to each text (and prepends <bos> if `begins`).
    """
    folders = [f"{number}_Dense" for number, _ in enumerate(dense, 2)]
    kinds = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *((folder, "Dense") for folder in folders),
    ]
    kinds.append((f"{2 + len(dense)}_Normalize", "Normalize"))
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{name}",
        }
        for number, (path, name) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    switches = {
        f"pooling_mode_{name}": name == kind for name in ("cls_token", "mean_tokens", "lasttoken")
    }
    (directory / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": HIDDEN, **switches})
    )
    inputs = HIDDEN
    rng = np.random.default_rng(5)
    for folder, outputs in zip(folders, dense, strict=True):
        (directory / folder).mkdir()
        weight = (rng.standard_normal((outputs, inputs)) / np.sqrt(inputs)).astype(np.float32)
        save_file({"linear.weight": weight}, directory / folder / "model.safetensors")
        settings = {"in_features": inputs, "out_features": outputs, "bias": False}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        (directory / folder / "config.json").write_text(json.dumps(settings))
        inputs = outputs
    _end_texts(directory, begins)
    return directory


def _end_texts(directory: Path, begins: bool) -> None:
    path = directory / "tokenizer.json"
    begin, end = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<bos>", "<eos>"))
    single = [*([begin] if begins else []), {"Sequence": {"id": "A", "type_id": 0}}, end]
    special = {
        name: {"id": name, "ids": [number], "tokens": [name]}
        for name, number in (("<bos>", BOS_ID), ("<eos>", EOS_ID))
    }
    template = {
        "type": "TemplateProcessing",
        "pair": [],
        "single": single,
        "special_tokens": special,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": template}))


def save_bidirectional_model(
    directory: Path, *, dense: Sequence[int] = DENSE, **overrides: object
) -> Path:
    """Save a tiny model of EmbeddingGemma's family: bidirectional attention, mean pooling, and
    dense matrices after it.
    """
    directory.mkdir(exist_ok=True)
    save_tiny_model("gemma3", directory, use_bidirectional_attention=True, **overrides)
    return make_embedding_model(directory, "mean_tokens", dense=dense, begins=True)
