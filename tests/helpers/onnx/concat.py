"""The second graph variant of the tests' ONNX decoders: attention in small operators, with new KV
concatenated after the past KV, as in a plain export of a model.
"""

from __future__ import annotations

from helpers.onnx import wire
from helpers.onnx.writer import FLOAT, HALF, Decoder


class ConcatDecoder(Decoder):
    """Decoder with inputs past [1, heads, past, dim] and outputs present [1, heads, past + new,
    dim].
    """

    def attention(self, index: int, value: str, lengths: list[str]) -> str:
        at = f"/layers.{index}/"
        queries, keys, values = self.qkv(index, value)
        queries = self.turned(
            index, self.heads_norm(index, queries, "q", self.heads), self.heads, f"{at}q"
        )
        keys = self.turned(
            index, self.heads_norm(index, keys, "k", self.kv_heads), self.kv_heads, f"{at}k"
        )
        both = []
        for name, new in (("key", keys), ("value", self.cut(values, self.kv_heads, f"{at}v"))):
            is_half = self.form.half_past
            new = self.cast(new, HALF) if is_half else new
            whole = self.op(
                "Concat",
                [f"past_key_values.{index}.{name}", new],
                f"present.{index}.{name}",
                axis=2,
            )
            whole = self.cast(whole, FLOAT) if is_half else whole
            both.append(self.op("Unsqueeze", [whole, self.integers(2)], f"{at}{name}/5"))
        groups = self.heads // self.kv_heads
        grouped = self.integers(1, self.kv_heads, groups, -1, self.dim)
        queries = self.op("Reshape", [queries, grouped], f"{at}q/5")
        across = self.op("Transpose", [both[0]], f"{at}across", perm=[0, 1, 2, 4, 3])
        scale = self.real(self.scale())
        scores = self.op(
            "Mul", [self.op("MatMul", [queries, across], f"{at}qk"), scale], f"{at}scores"
        )
        cap = getattr(self.config, "attn_logit_softcapping", None)
        if cap:
            scores = self.capped(scores, cap, f"{at}capped")
        hidden = self.real(-1e9)
        scores = self.op("Where", [self.visible(self.window(index)), scores, hidden], f"{at}masked")
        weights = self.op("Softmax", [scores], f"{at}softmax", axis=-1)
        out = self.op("MatMul", [weights, both[1]], f"{at}out")
        out = self.op("Reshape", [out, self.integers(1, self.heads, -1, self.dim)], f"{at}out/4")
        out = self.op("Transpose", [out], f"{at}out/T", perm=[0, 2, 1, 3])
        return self.op(
            "Reshape", [out, self.integers(1, -1, self.heads * self.dim)], f"{at}attention"
        )

    def cut(self, value: str, heads: int, name: str) -> str:
        """Convert [1, tokens, heads * dim] to [1, heads, tokens, dim]."""
        value = self.op("Reshape", [value, self.integers(1, -1, heads, self.dim)], f"{name}/heads")
        return self.op("Transpose", [value], f"{name}/T", perm=[0, 2, 1, 3])

    def turned(self, index: int, value: str, heads: int, name: str) -> str:
        halves = [f"{name}/first", f"{name}/second"]
        self.nodes.append(
            wire.node("Split", [self.cut(value, heads, name)], halves, axis=-1, num_outputs=2)
        )
        cosines, sines = (self.angles(table) for table in self.tables(index))
        parts = []
        for op, (one, other) in (("Sub", halves), ("Add", halves[::-1])):
            left = self.op("Mul", [one, cosines], f"{name}/{op}/cos")
            right = self.op("Mul", [other, sines], f"{name}/{op}/sin")
            parts.append(self.op(op, [left, right], f"{name}/{op}"))
        return self.op("Concat", parts, f"{name}/turned", axis=-1)

    def angles(self, table: str) -> str:
        name = f"/angles/{table}"
        if name not in self.known:
            self.known.add(name)
            found = self.op("Gather", [table, "position_ids"], f"{name}/Gather", axis=0)
            self.op("Unsqueeze", [found, self.integers(1)], name)
        return name

    def visible(self, window: int) -> str:
        """Return a mask of the keys that each query sees, bool [1, 1, 1, tokens, total]."""
        name = f"/visible/{window}"
        if name in self.known:
            return name
        self.known.add(name)
        zero, one = (self.integer(number) for number in (0, 1))
        shape = self.op("Shape", ["attention_mask"], f"{name}/Shape")
        total = self.op("Gather", [shape, one], f"{name}/total", axis=0)
        keys = self.op("Range", [zero, total, one], f"{name}/keys")
        queries = self.op("Unsqueeze", ["position_ids", self.integers(1, 2, 4)], f"{name}/queries")
        past = self.op("LessOrEqual", [keys, queries], f"{name}/past" if window > 0 else name)
        if window <= 0:
            return past
        oldest = self.op("Sub", [queries, self.integer(window)], f"{name}/oldest")
        return self.op("And", [past, self.op("Greater", [keys, oldest], f"{name}/near")], name)
