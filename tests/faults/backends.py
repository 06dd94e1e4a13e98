"""Faults in the attention backends."""

from __future__ import annotations

from faults.fault import fault
from faults.suites import GEMMA4_ROWS

_CONTRACT = ("tests/backends",)

FAULTS = (
    fault(
        "torch: causal mask off by one",
        "backends/torch/masked_attention.py",
        "(keys <= queries)",
        "(keys <= queries + 1)",
        *_CONTRACT,
    ),
    fault(
        "torch: sliding window off by one",
        "backends/torch/masked_attention.py",
        "(keys > queries - window)",
        "(keys >= queries - window)",
        *_CONTRACT,
    ),
    fault(
        "attention over selected rows misses the last token",
        "backends/cpu.py",
        "- rows_to_end + counts)",
        "- rows_to_end + counts - 1)",
        *GEMMA4_ROWS,
    ),
    fault(
        "treats separate selected rows as one sequence",
        "backends/cpu.py",
        "(np.diff(rows, prepend=-2) != 1) | ",
        "",
        *GEMMA4_ROWS,
    ),
)
