"""Faults in the runners."""

from __future__ import annotations

from faults.fault import fault
from faults.suites import GEMMA4, GEMMA4_EXPERTS, GEMMA4_ROWS

FAULTS = (
    fault(
        "rows of attention outlive their plan",
        "runners/native/whole_pass.py",
        "*(id(plan.items) for plan in plans))",
        "*(0 for plan in plans))",
        "tests/runners/native/test_long.py",
    ),
    fault(
        "a layer takes another's input",
        "runners/native/program.py",
        "self.sizes.per_layer, index * width)",
        "self.sizes.per_layer, 0)",
        *GEMMA4,
    ),
    fault(
        "open blocks that later layers read are written over",
        "runners/native/select_native.py",
        "layer.kv + 1 if layer.kv in given else 0",
        "0",
        *GEMMA4_ROWS,
    ),
    fault(
        "rows go on with the inputs of others",
        "runners/native/runner.py",
        "per_layer(num_tokens)[rows]",
        "per_layer(num_tokens)[: len(rows)]",
        *GEMMA4_ROWS,
    ),
    fault(
        "the factors of the router's inputs are dropped",
        "runners/native/moe_layers.py",
        'out.norm(f"{layer}router_in", f"{layer}router")',
        'out.norm(f"{layer}experts_in", f"{layer}router")',
        *GEMMA4_EXPERTS,
    ),
    fault(
        "the router's root of the width is dropped",
        "runners/native/moe_layers.py",
        "factor=size**-0.5",
        "factor=1.0",
        *GEMMA4_EXPERTS,
    ),
    fault(
        "experts read what the MLP beside them reads",
        "runners/native/moe_layers.py",
        'f"{layer}experts_in", f"{layer}router"',
        'f"{layer}mlp_in", f"{layer}router"',
        *GEMMA4_EXPERTS,
    ),
    fault(
        "sinks are dropped",
        "runners/native/whole_pass.py",
        (
            "        fixed[la.R_SINKS] = np.array(\n"
            "            [0 if sinks is None else sinks.ctypes.data for sinks in self._sinks]\n"
            "        )\n"
        ),
        "        fixed[la.R_SINKS] = np.array([0 for sinks in self._sinks])\n",
        "tests/runners/native/test_gpt_oss.py::test_all_logits_of_prompts_around_window_and_block",
    ),
    fault(
        "what a mixer leaves waits where queries go",
        "runners/native/recurrent_layers.py",
        "lt.B_MIXED if builder.sizes.mixed else lt.B_QUERY",
        "lt.B_QUERY",
        "tests/runners/native/test_hybrids.py::test_a_hybrid_equals_transformers[falcon_h1]",
    ),
)
