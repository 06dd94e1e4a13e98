"""What the bits of keys and values depend on, which outlive the process, beside the model and the
kernels' forms.
"""

from __future__ import annotations

import llvmlite
import numpy as np

__all__ = ["NUMERICS_VERSION", "describe_numerics"]

NUMERICS_VERSION = 2
"""Raised with every change of the bits that a kernel or a program gives: blocks stored under
another number are not found again. A test holds the bits of a small model against this number.
"""


def describe_numerics() -> str:
    """The version of what is computed, and of what turns it into machine code and tables of
    angles.
    """
    llvm = ".".join(map(str, llvmlite.binding.llvm_version_info))
    return f"kernels {NUMERICS_VERSION} llvm {llvm} numpy {np.__version__}"
