"""Tensor names of multi-token prediction (MTP) heads.

A head predicts the token after the next one. It consists of two norms, a projection, one decoder
layer of the model's own kind, a last norm and an LM head. Embedding and LM head are usually the
model's. With the model's hidden state h at position p, taken after its last norm, and the next
token x at position p + 1, the head computes

    rows = projection @ [embedding_norm(embedding of x), hidden_norm(h)]
    state = last_norm(layer(rows))
    logits of position p + 2 = LM head @ state

The layer attends to its own KV of the earlier positions. RoPE sees only distances, so a row may be
at position p or p + 1, as long as all rows agree. To predict another token, `state` takes the place
of h, and the predicted token that of x. This holds for all families below, as in llama.cpp and
transformers. vLLM passes on the state before the last norm for GLM-4.5.

An assistant (Gemma 4) is a head in a checkpoint of its own, with several layers and a hidden size
of its own. Its layers have queries only, and attend to the KV of the model's last layer of the same
kind that computes KV. With the same h and x,

    rows = projection @ [embedding of x, h]
    state = last_norm(layers(rows))
    logits of position p + 2 = LM head @ state

The embedding is the model's, with the model's factor. To predict another token, `post_projection @
state` takes the place of h. All rows of a draft have the position p + 1 and attend to the positions
0 to p, which are those that the model has computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "ASSISTANT_HEAD",
    "ASSISTANT_OUTER",
    "EMBEDDING_NORM",
    "GGUF_MTP",
    "HIDDEN_NORM",
    "LAYER_MTP",
    "MODULE_MTP",
    "POST_PROJECTION",
    "PROJECTION",
    "MtpNames",
]

EMBEDDING_NORM = "mtp.embedding_norm"
HIDDEN_NORM = "mtp.hidden_norm"
PROJECTION = "mtp.projection"
POST_PROJECTION = "mtp.post_projection"
"""Names of the tensors that only a head has, without ".weight". The last is that of an assistant.

Its other tensors have the names of a model with one layer.
"""

_EMBEDDING = "model.embed_tokens"
_LAST_NORM = "model.norm"
_HEAD = "lm_head"


class MtpNames(NamedTuple):
    """Tensor names of a head in files.

    Attributes:
        prefix: prefix of all its tensors. "{}" is the number of layers of the model.
        layer: prefix of the tensors of its decoder layer, after `prefix`.
        outer: mapping from the names of the other tensors, after `prefix`, to ours. Both are
            without an ending such as ".weight".
    """

    prefix: str
    layer: str
    outer: Mapping[str, str]

    def own_name(self, name: str, layers: int) -> str | None:
        """Return our name for a tensor, or None if the head has no such tensor."""
        prefix = self.prefix.format(layers)
        inner = name.removeprefix(prefix)
        if not name.startswith(prefix):
            return None
        stem, _, ending = inner.rpartition(".")
        if stem in self.outer:
            return f"{self.outer[stem]}.{ending}"
        if not inner.startswith(self.layer):
            return None
        return f"model.layers.0.{inner.removeprefix(self.layer)}"


MODULE_MTP = MtpNames(
    "mtp.",
    "layers.0.",
    MappingProxyType(
        {
            "pre_fc_norm_embedding": EMBEDDING_NORM,
            "pre_fc_norm_hidden": HIDDEN_NORM,
            "fc": PROJECTION,
            "norm": _LAST_NORM,
            "embed_tokens": _EMBEDDING,
        }
    ),
)
"""Names of a head that is a module of its own (Qwen3.5)."""

LAYER_MTP = MtpNames(
    "model.layers.{}.",
    "",
    MappingProxyType(
        {
            "enorm": EMBEDDING_NORM,
            "hnorm": HIDDEN_NORM,
            "eh_proj": PROJECTION,
            "shared_head.norm": _LAST_NORM,
            "embed_tokens": _EMBEDDING,
            "shared_head.head": _HEAD,
        }
    ),
)
"""Names of a head that is stored as a further layer (GLM-4.5)."""

GGUF_MTP: Mapping[str, str] = MappingProxyType(
    {
        "nextn.enorm": EMBEDDING_NORM,
        "nextn.hnorm": HIDDEN_NORM,
        "nextn.eh_proj": PROJECTION,
        "nextn.shared_head_norm": _LAST_NORM,
        "nextn.embed_tokens": _EMBEDDING,
        "nextn.shared_head_head": _HEAD,
    }
)
"""Names in GGUF files, inside the block of the head, of the tensors that are not its layer's.

They are without ".weight".
"""

ASSISTANT_OUTER: Mapping[str, str] = MappingProxyType(
    {
        "pre_projection.weight": f"{PROJECTION}.weight",
        "post_projection.weight": f"{POST_PROJECTION}.weight",
    }
)
"""Names of tensors in an assistant's files, and ours."""

ASSISTANT_HEAD = f"{_EMBEDDING}.weight", f"{_HEAD}.weight"
"""Name of an assistant's own embedding, which serves only as its LM head, and ours."""
