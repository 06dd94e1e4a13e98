"""Helpers shared by several test files, by subject: `from helpers.SUBJECT.NAME import ...`.

NumPy and torch use one thread unless a test asks for more, also in processes that tests start. Work
as small as a tiny model's gains nothing from more threads, and the threads of two pytest workers
would wait for each other. Kernels are compiled from the sources under test, even on a machine that
has a prebuilt library of them.
"""

from __future__ import annotations

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("KVBOOST_EDGE_KERNELS", "none")
