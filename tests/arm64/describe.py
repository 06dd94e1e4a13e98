"""One-line description of the emulated processor and of its kernel variant."""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import binding

from kvboost_edge.host.processor import describe_cpu
from kvboost_edge.kernels.integers import dot_form
from kvboost_edge.kernels.quantized_kv.code_dot import coded_dot_form

print(
    f"{binding.get_host_cpu_name()} ({describe_cpu().isa}): linear layers {dot_form()!r}, "
    f"quantized attention {coded_dot_form()!r}; numba {numba.__version__}, numpy {np.__version__}"
)
