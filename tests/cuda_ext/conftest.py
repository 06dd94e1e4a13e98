"""What compiles the CUDA kernels for this processor is collected where a compiler is."""

from __future__ import annotations

from helpers.cuda.on_cpu import find_compiler

collect_ignore_glob = [] if find_compiler() else ["test_*.py"]
