"""Faults in the runners."""

from __future__ import annotations

from faults.fault import fault
from faults.suites import GEMMA4, GEMMA4_EXPERTS, GEMMA4_ROWS

FAULTS = (
    fault(
        "reuses attention rows after their schedule is gone",
        "runners/native/whole_pass.py",
        "*(id(plan.items) for plan in plans))",
        "*(0 for plan in plans))",
        "tests/runners/native/test_long.py",
    ),
    fault(
        "all layers read the first layer's per-layer input",
        "runners/native/program.py",
        "self.sizes.per_layer, index * width)",
        "self.sizes.per_layer, 0)",
        *GEMMA4,
    ),
    fault(
        "overwrites open blocks that later layers read",
        "runners/native/select_native.py",
        "layer.kv + 1 if layer.kv in given else 0",
        "0",
        *GEMMA4_ROWS,
    ),
    fault(
        "selected rows get the per-layer inputs of other rows",
        "runners/native/runner.py",
        "per_layer(num_tokens)[rows]",
        "per_layer(num_tokens)[: len(rows)]",
        *GEMMA4_ROWS,
    ),
    fault(
        "normalizes the router's input with the experts' norm",
        "runners/native/moe_layers.py",
        'out.norm(f"{layer}router_in", f"{layer}router")',
        'out.norm(f"{layer}experts_in", f"{layer}router")',
        *GEMMA4_EXPERTS,
    ),
    fault(
        "drops the router's factor for the width",
        "runners/native/moe_layers.py",
        "factor=size**-0.5",
        "factor=1.0",
        *GEMMA4_EXPERTS,
    ),
    fault(
        "experts read the MLP's normalized input",
        "runners/native/moe_layers.py",
        'f"{layer}experts_in", f"{layer}router"',
        'f"{layer}mlp_in", f"{layer}router"',
        *GEMMA4_EXPERTS,
    ),
    fault(
        "passes no attention sinks to the kernels",
        "runners/native/whole_pass.py",
        (
            "        fixed[la.R_SINKS] = np.array(\n"
            "            [0 if sinks is None else sinks.ctypes.data for sinks in self._sinks]\n"
            "        )\n"
        ),
        "        fixed[la.R_SINKS] = np.array([0 for sinks in self._sinks])\n",
        "tests/runners/native/test_gpt_oss.py::test_logits_around_window_and_block_borders_equal_transformers",
    ),
    fault(
        "stores a mixer's output in the buffer of the queries",
        "runners/native/recurrent_layers.py",
        "lt.B_MIXED if builder.sizes.mixed else lt.B_QUERY",
        "lt.B_QUERY",
        "tests/runners/native/test_hybrids.py::test_hybrid_models_equal_transformers[falcon_h1]",
    ),
)
