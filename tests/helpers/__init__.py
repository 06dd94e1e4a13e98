"""What several test files share, by subject; `from helpers.SUBJECT.NAME import ...`.

NumPy and torch take one thread where nothing else is said, in processes that tests start, too: work
as small as a tiny model's gains nothing from more, and those of two workers of pytest would wait
for one another. Kernels are compiled from the sources that are tested, also where this machine has a
library of them.
"""

from __future__ import annotations

import os

for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("KVBOOST_EDGE_KERNELS", "none")
