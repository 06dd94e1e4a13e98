"""Decoders as ONNX files for tests, written from tiny transformers models without the `onnx`
package.

There are two graph variants: that of onnxruntime-genai's builder (MatMulNBits or MatMul,
GroupQueryAttention, KV in one buffer), and that of a plain export (concat.py: attention in small
operators, concatenated KV). `write_onnx` sets the model's weights to the stored ones, so that
transformers' own logits are the oracle.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from helpers.models.tiny_checkpoints import BOS_ID, EOS_ID, PAD_ID, save_tokenizer
from helpers.onnx import wire
from helpers.onnx.blocks import Form, dequantize, packed_codes, quantize

MICROSOFT = "com.microsoft"
# Type numbers of ONNX
FLOAT = 1
HALF = 10
Array = np.ndarray


class Decoder:
    """The nodes and weights of one model while its file is written."""

    def __init__(self, model: PreTrainedModel, form: Form) -> None:
        self.hf = model
        self.config = model.config
        self.form = form
        location = (
            ("model.onnx.data" if form.genai else "model_q4.onnx_data") if form.external else None
        )
        self.weights = wire.Weights(location)
        self.nodes: list[bytes] = []
        self.state = {
            name: array.detach().numpy().copy() for name, array in model.state_dict().items()
        }
        self.kind = str(self.config.model_type)
        self.layers = int(self.config.num_hidden_layers)
        self.heads = int(self.config.num_attention_heads)
        self.kv_heads = int(self.config.num_key_value_heads)
        self.hidden = int(self.config.hidden_size)
        self.eps = float(self.config.rms_norm_eps)
        self.dim = int(getattr(self.config, "head_dim", None) or self.hidden // self.heads)
        self.is_gemma = self.kind.startswith("gemma")
        self.known: set[str] = set()

    def op(
        self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any
    ) -> str:
        self.nodes.append(wire.node(op, inputs, [output], domain, **attributes))
        return output

    def constant(self, array: Array) -> str:
        """Return the name of a Constant node; each value has one node."""
        name = f"/constants/{array.dtype}/{array.tolist()}"
        if name not in self.known:
            self.known.add(name)
            self.nodes.append(wire.node("Constant", [], [name], value=array))
        return name

    def real(self, value: float) -> str:
        return self.constant(np.array(value, dtype=np.float32))

    def integer(self, value: int) -> str:
        return self.constant(np.array(value, dtype=np.int64))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, dtype=np.int64))

    def once(self, name: str, array: Array) -> str:
        if name not in self.known:
            self.known.add(name)
            self.weights.add(name, array)
        return name

    def matmul(
        self, source: str, name: str, weights: Array, bias: Array | None = None
    ) -> tuple[str, Array]:
        """Compute source @ weights^T + bias. Return the name of the result and the weights as
        stored in the file.
        """
        form = self.form
        kind = np.float16 if self.form.halves else np.float32
        inputs = [source]
        if not form.bits:
            stored = weights.astype(kind)
            inputs.append(self.weights.add(f"{name}.MatMul.weight", stored.T))
            value = self.op("MatMul", inputs, f"/{name}/MatMul")
            weights = stored.astype(np.float32)
        else:
            codes, scales, zeros = quantize(weights, form)
            inputs += self._bits(name, codes, scales, zeros)
            weights = dequantize(codes, scales, zeros, form.bits, weights.shape[1])
            if bias is not None and form.bias_inside:
                inputs += [""] * (5 - len(inputs)) + [
                    self.weights.add(f"{name}.MatMul.bias", bias.astype(kind))
                ]
                bias = None
            rows, columns = weights.shape
            value = self.matmul_bits(inputs, rows, columns, f"/{name}/MatMul")
        if bias is not None:
            value = self.op(
                "Add", [value, self.weights.add(f"{name}.Add.bias", bias)], f"/{name}/Add"
            )
        return value, weights

    def matmul_bits(self, inputs: list[str], rows: int, columns: int, output: str) -> str:
        sizes = {"K": columns, "N": rows, "bits": self.form.bits, "block_size": self.form.block}
        return self.op("MatMulNBits", inputs, output, MICROSOFT, **sizes)

    def _bits(self, name: str, codes: Array, scales: Array, zeros: Array | None) -> list[str]:
        bits = self.form.bits
        found = [
            self.weights.add(f"{name}.MatMul.weight_Q{bits}", packed_codes(codes, bits)),
            self.weights.add(f"{name}.MatMul.weight_scales", scales),
        ]
        if zeros is not None:
            points = (
                zeros.astype(scales.dtype)
                if self.form.zeros == "floats"
                else packed_codes(zeros, bits)
            )
            found.append(self.weights.add(f"{name}.MatMul.weight_zp", points))
        return found

    def norm(self, name: str) -> str:
        """Store the weights of a norm, given by transformers' name, as the operator multiplies by
        them.
        """
        weights = self.state[f"{name}.weight"]
        return self.once(f"{name}.weight", weights + np.float32(1) if self.is_gemma else weights)

    def project(self, source: str, names: list[str], title: str) -> str:
        """Multiply by several matrices, given by transformers' names, stacked into one. The state
        then holds the stored weights.
        """
        rows = [len(self.state[f"{name}.weight"]) for name in names]
        whole = np.concatenate([self.state[f"{name}.weight"] for name in names])
        biases = [self.state[f"{name}.bias"] for name in names if f"{name}.bias" in self.state]
        value, held = self.matmul(source, title, whole, np.concatenate(biases) if biases else None)
        for name, part in zip(names, np.split(held, np.cumsum(rows)[:-1]), strict=True):
            self.state[f"{name}.weight"] = part
        return value

    def lookup(self) -> str:
        table = self.state["model.embed_tokens.weight"]
        if self.form.quantized_embedding:
            form = self.form
            codes, scales, zeros = quantize(table, form)
            names = self._bits("lm_head", codes, scales, zeros)
            self.state["model.embed_tokens.weight"] = dequantize(
                codes, scales, zeros, form.bits, table.shape[1]
            )
            flat = self.integers(len(table), -1)
            rows = self.op("Reshape", [names[0], flat], "/embed/Reshape")
            value = self.op(
                "GatherBlockQuantized",
                [rows, "input_ids", *names[1:]],
                "/embed/Gather",
                MICROSOFT,
                bits=form.bits,
                block_size=form.block,
                gather_axis=0,
                quantize_axis=1,
            )
        else:
            value = self.op(
                "Gather",
                [self.weights.add("model.embed_tokens.weight", table), "input_ids"],
                "/embed/Gather",
            )
        factor = (
            math.sqrt(self.hidden)
            if self.is_gemma
            else getattr(self.config, "embedding_multiplier", 1.0)
        )
        return self.times(value, factor)

    def times(self, value: str, factor: float) -> str:
        if factor == 1:
            return value
        return self.op("Mul", [value, self.real(factor)], f"{value}/Mul")

    def capped(self, value: str, cap: float, name: str) -> str:
        limit = self.real(cap)
        tanh = self.op("Tanh", [self.op("Div", [value, limit], f"{name}/Div")], f"{name}/Tanh")
        return self.op("Mul", [tanh, limit], name)

    def head(self, value: str) -> None:
        cap = getattr(self.config, "final_logit_softcapping", None)
        if self.form.quantized_embedding:
            rows, columns = self.state["model.embed_tokens.weight"].shape
            names = ["lm_head.MatMul.weight_Q4", "lm_head.MatMul.weight_scales"]
            value = self.matmul_bits(
                [value, *names], rows, columns, "/lm_head/MatMul" if cap else "logits"
            )
            self.state["lm_head.weight"] = self.state["model.embed_tokens.weight"]
        else:
            value, self.state["lm_head.weight"] = self.matmul(
                value, "lm_head", self.state["lm_head.weight"]
            )
        if cap:
            self.capped(value, cap, "logits")
        elif getattr(self.config, "logits_scaling", 1.0) != 1:
            self.op("Mul", [value, self.real(1 / self.config.logits_scaling)], "logits")
        elif not self.form.quantized_embedding:
            self.op("Cast", [value], "logits", to=1)

    def layer_kind(self, index: int) -> str:
        kinds = getattr(self.config, "layer_types", None)
        return kinds[index] if kinds else "full_attention"

    def window(self, index: int) -> int:
        window = getattr(self.config, "sliding_window", None)
        if self.kind in ("mistral", "phi3"):
            return window or -1
        return window if window and self.layer_kind(index) == "sliding_attention" else -1

    def scale(self) -> float:
        if getattr(self.config, "query_pre_attn_scalar", None):
            return float(self.config.query_pre_attn_scalar**-0.5)
        return float(getattr(self.config, "attention_multiplier", self.dim**-0.5))

    def tables(self, index: int) -> tuple[str, str]:
        """Return the names of a layer's RoPE tables, computed from transformers' frequencies."""
        rotary = self.hf.model.rotary_emb
        kind = self.layer_kind(index) if self.kind == "gemma3_text" else ""
        prefix = f"{kind}_" if kind else ""
        frequencies = getattr(rotary, f"{prefix}inv_freq").numpy().astype(np.float32)
        factor = float(getattr(rotary, f"{prefix}attention_scaling"))
        angles = (
            np.arange(self.config.max_position_embeddings, dtype=np.float32)[:, None] * frequencies
        )
        return (
            self.once(f"{prefix}cos_cache", (np.cos(angles) * factor).astype(np.float32)),
            self.once(f"{prefix}sin_cache", (np.sin(angles) * factor).astype(np.float32)),
        )

    def build(self) -> None:
        """Add all nodes, from the token ids to the logits."""
        one = self.integers(1)
        total = self.op("ReduceSum", ["attention_mask", one], "/lengths/Sum", keepdims=0)
        last = self.op(
            "Cast", [self.op("Sub", [total, one], "/lengths/Sub")], "/lengths/last", to=6
        )
        shape = self.op("Shape", ["attention_mask"], "/lengths/Shape")
        width = self.op("Gather", [shape, self.integer(1)], "/lengths/Gather", axis=0)
        lengths = [last, self.op("Cast", [width], "/lengths/total", to=6)]
        stream = self.lookup()
        branch = ""
        for index in range(self.layers):
            stream, branch = self.layer(index, stream, branch, lengths)
        value, _ = self.add_and_norm(stream, branch, "model.norm")
        self.head(value)

    def normed(self, value: str, name: str) -> str:
        inputs = [value, self.norm(name)]
        return self.op(
            "SimplifiedLayerNormalization", inputs, f"/{name}", epsilon=self.eps, axis=-1
        )

    def add_and_norm(self, stream: str, branch: str, name: str) -> tuple[str, str]:
        """Return the norm of stream + branch, and that sum. The first layer has no branch."""
        if not branch:
            return self.normed(stream, name), stream
        outputs = [f"/{name}", "", "", f"/{name}/sum"]
        inputs = [stream, branch, self.norm(name)]
        self.nodes.append(
            wire.node(
                "SkipSimplifiedLayerNormalization", inputs, outputs, MICROSOFT, epsilon=self.eps
            )
        )
        return outputs[0], outputs[3]

    def layer(self, index: int, stream: str, branch: str, lengths: list[str]) -> tuple[str, str]:
        layer = f"model.layers.{index}."
        value, stream = self.add_and_norm(stream, branch, f"{layer}input_layernorm")
        branch = self.project(
            self.attention(index, value, lengths), [f"{layer}self_attn.o_proj"], f"{layer}o_proj"
        )
        is_both = self.kind in ("gemma2", "gemma3_text")
        branch = self.after(branch, f"{layer}post_attention_layernorm" if is_both else "")
        name = "pre_feedforward_layernorm" if is_both else "post_attention_layernorm"
        value, stream = self.add_and_norm(stream, branch, layer + name)
        branch = self.project(
            self.mlp(index, value), [f"{layer}mlp.down_proj"], f"{layer}down_proj"
        )
        return stream, self.after(branch, f"{layer}post_feedforward_layernorm" if is_both else "")

    def after(self, branch: str, norm: str) -> str:
        if norm:
            return self.normed(branch, norm)
        return self.times(branch, float(getattr(self.config, "residual_multiplier", 1.0)))

    def mlp(self, index: int, value: str) -> str:
        layer = f"model.layers.{index}.mlp."
        if f"{layer}gate_up_proj.weight" in self.state:
            wide = int(self.config.intermediate_size)
            both = self.project(value, [f"{layer}gate_up_proj"], f"{layer}gate_up_proj")
            gate = f"/{layer}Split/0"
            up = f"/{layer}Split/1"
            sizes = self.integers(wide, wide)
            self.nodes.append(wire.node("Split", [both, sizes], [gate, up], axis=-1))
        else:
            gate, up = (
                self.project(value, [layer + name], layer + name)
                for name in ("gate_proj", "up_proj")
            )
        if self.is_gemma:
            active = self.op("Gelu", [gate], f"/{layer}Gelu", approximate="tanh")
        else:
            active = self.op(
                "Mul", [gate, self.op("Sigmoid", [gate], f"/{layer}Sigmoid")], f"/{layer}act"
            )
        return self.op("Mul", [active, up], f"/{layer}Mul")

    def qkv(self, index: int, value: str) -> list[str]:
        """Return queries, keys and values, or a single packed tensor of all three."""
        layer = f"model.layers.{index}.self_attn."
        sizes = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        is_cut = f"{layer}q_norm.weight" in self.state or self.form.outer_rope or self.form.concat
        if f"{layer}qkv_proj.weight" in self.state:
            whole = self.project(value, [f"{layer}qkv_proj"], f"{layer}qkv_proj")
        elif self.form.packed:
            whole = self.project(
                value, [f"{layer}{name}_proj" for name in "qkv"], f"{layer}qkv_proj"
            )
        else:
            return [
                self.project(value, [f"{layer}{name}_proj"], f"{layer}{name}_proj")
                for name in "qkv"
            ]
        if not is_cut:
            return [whole]
        parts = [f"/{layer}Split/{name}" for name in "qkv"]
        self.nodes.append(wire.node("Split", [whole, self.integers(*sizes)], parts, axis=-1))
        return parts

    def heads_norm(self, index: int, value: str, name: str, count: int) -> str:
        norm = f"model.layers.{index}.self_attn.{name}_norm"
        if f"{norm}.weight" not in self.state:
            return value
        cut = self.op("Reshape", [value, self.integers(0, -1, self.dim)], f"/{norm}/cut")
        found = self.normed(cut, norm)
        whole = self.integers(0, -1, count * self.dim)
        return self.op("Reshape", [found, whole], f"/{norm}/whole")

    def attention(self, index: int, value: str, lengths: list[str]) -> str:
        parts = self.qkv(index, value)
        tables = list(self.tables(index))
        if len(parts) == 3:
            for at, (name, count) in enumerate((("q", self.heads), ("k", self.kv_heads))):
                parts[at] = self.heads_norm(index, parts[at], name, count)
                if self.form.outer_rope:
                    inputs = [parts[at], "position_ids", *tables]
                    output = f"/layers.{index}/{name}/rope"
                    parts[at] = self.op(
                        "RotaryEmbedding", inputs, output, MICROSOFT, interleaved=0, num_heads=count
                    )
        if self.form.half_past:  # all inputs of the operator have one type
            parts, tables = ([self.cast(name, HALF) for name in names] for names in (parts, tables))
        inputs = [
            *parts,
            *[""] * (3 - len(parts)),
            *(f"past_key_values.{index}.{name}" for name in ("key", "value")),
        ]
        inputs += [*lengths, *([] if self.form.outer_rope else tables)]
        output = f"/layers.{index}/attention"
        presents = [f"present.{index}.{name}" for name in ("key", "value")]
        self.nodes.append(
            wire.node(
                "GroupQueryAttention",
                inputs,
                [output, *presents],
                MICROSOFT,
                num_heads=self.heads,
                kv_num_heads=self.kv_heads,
                scale=self.scale(),
                local_window_size=self.window(index),
                softcap=float(getattr(self.config, "attn_logit_softcapping", None) or 0.0),
                do_rotary=int(not self.form.outer_rope),
                rotary_interleaved=0,
            )
        )
        return self.cast(output, FLOAT) if self.form.half_past else output

    def cast(self, value: str, kind: int) -> str:
        """Return a value cast to another type. Each cast is added once."""
        name = f"{value}/as/{kind}"
        if name not in self.known:
            self.known.add(name)
            self.op("Cast", [value], name, to=kind)
        return name

    @property
    def past_type(self) -> str:
        return "float16" if self.form.half_past else "float32"

    def past(self) -> list[str]:
        return [f"{index}.{name}" for index in range(self.layers) for name in ("key", "value")]

    def file(self) -> bytes:
        """Return the complete file; external weights are in `weights.data`."""
        past = ["batch", self.kv_heads, "past", self.dim]
        inputs = [wire.value("input_ids", "int64", ["batch", "sequence"])]
        inputs.append(wire.value("attention_mask", "int64", ["batch", "total"]))
        if self.form.outer_rope or self.form.concat:
            inputs.append(wire.value("position_ids", "int64", ["batch", "sequence"]))
        names = self.past()
        inputs += [wire.value(f"past_key_values.{name}", self.past_type, past) for name in names]
        outputs = [
            wire.value("logits", "float32", ["batch", "sequence", int(self.config.vocab_size)])
        ]
        outputs += [
            wire.value(f"present.{name}", self.past_type, [*past[:2], "total", self.dim])
            for name in names
        ]
        return wire.model(wire.graph_of(self.nodes, self.weights.messages, inputs, outputs))


def write_onnx(
    model: PreTrainedModel,
    folder: Path,
    form: Form | None = None,
    kind: type[Decoder] | None = None,
) -> Path:
    """Write a folder with an ONNX model, set the weights of `model` to the stored ones, and return
    the folder.
    """
    form = form or Form()
    decoder = (kind or Decoder)(model, form)
    decoder.build()
    target = folder if form.genai else folder / "onnx"
    target.mkdir(parents=True, exist_ok=True)
    name = "model.onnx" if form.genai else "model_q4.onnx"
    (target / name).write_bytes(decoder.file())
    if decoder.weights.location:
        (target / decoder.weights.location).write_bytes(decoder.weights.data)
    if form.genai:
        (folder / "genai_config.json").write_text(json.dumps(genai_config(decoder)))
    else:
        model.config.save_pretrained(folder)
    save_tokenizer(folder)
    state = {
        key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in decoder.state.items()
    }
    if (
        "lm_head.weight" in state
        and not form.quantized_embedding
        and model.config.tie_word_embeddings
    ):
        # The file's head is quantized and its embedding is not, so they are no longer tied.
        model.lm_head.weight = torch.nn.Parameter(state["lm_head.weight"].clone())
    model.load_state_dict(state, strict=False)
    return folder


def genai_config(decoder: Decoder) -> dict[str, Any]:
    names = {
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    }
    return {
        "model": {
            "type": decoder.kind,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "context_length": decoder.config.max_position_embeddings,
            "vocab_size": decoder.config.vocab_size,
            "decoder": {
                "filename": "model.onnx",
                "head_size": decoder.dim,
                "hidden_size": decoder.hidden,
                "num_attention_heads": decoder.heads,
                "num_key_value_heads": decoder.kv_heads,
                "num_hidden_layers": decoder.layers,
                "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
                "outputs": {"logits": "logits"},
            },
        }
    }
